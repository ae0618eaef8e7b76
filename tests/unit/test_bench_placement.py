"""The records of the benchmark of placement on real executors: what is cached where, and the figures of a run."""

from __future__ import annotations

from typing import cast

import pytest

from inflight import AsyncClient
from inflight.bench.placement.known_line import KnownLine
from inflight.bench.placement.main import Row, Run, Sent, Way
from inflight.bench.placement.real_executors import RealExecutors
from inflight.bench.timeline.traffic import SimRequest

BLOCK = 4
SYSTEM = list(range(100, 108))


def test_prompt_that_an_executor_was_given_is_cached_there_up_to_its_last_token() -> None:
    line = KnownLine(num_blocks=8, block_size=BLOCK)
    assert line.give("a", SYSTEM) == 0
    line.first_token("a")
    line.end("a")
    assert line.give("b", [*SYSTEM, 1, 2]) == len(SYSTEM)
    assert line.give("c", SYSTEM) == BLOCK


def test_prompt_that_is_being_computed_counts_as_cached() -> None:
    line = KnownLine(num_blocks=8, block_size=BLOCK)
    line.give("a", SYSTEM)
    assert line.give("b", [*SYSTEM, 1]) == len(SYSTEM)


def test_prompts_that_were_used_least_recently_are_evicted() -> None:
    line = KnownLine(num_blocks=4, block_size=BLOCK)
    prompts = {name: [*range(start, start + 2 * BLOCK)] for name, start in (("a", 0), ("b", 50), ("c", 100))}
    for name, prompt in prompts.items():
        line.give(name, prompt)
        line.first_token(name)
        line.end(name)
    assert [line.cost([*prompt, 1]) for prompt in prompts.values()] == [2 * BLOCK + 1, 1, 1]


def test_short_prompt_passes_long_one_and_pays_for_its_delay() -> None:
    line = KnownLine(num_blocks=64, block_size=BLOCK)
    line.give("long", list(range(100)))
    assert line.cost([1, 2, 3]) == 3 + 3
    assert line.cost(list(range(200, 350))) == 100 + 150
    line.first_token("long")
    assert line.cost([1, 2, 3]) == 3


def test_request_without_a_first_token_counts_with_its_wait_and_not_as_work() -> None:
    client = cast(AsyncClient, None)
    run = Run(RealExecutors(client, {"one": client, "two": client}), Way.LEAST_LOADED, 0, duration_s=10.0)
    request = SimRequest(0, "r", 0, tuple(range(50)), 5, 5)
    run.sent = [
        Sent(request, 1.0, 9.0, "one", num_output=5),
        Sent(request, 5.0, 0.5, "one", cached_tokens=40, expected_tokens=40, num_output=5),
        Sent(request, 6.0),
        Sent(request, 7.0, error="refused"),
    ]
    row = Row.of(run, "saturated")
    assert (row.num_requests, row.num_failed) == (2, 1)
    assert row.ttft_ms == (500.0, 4000.0, 4000.0)
    assert row.requests_per_s == pytest.approx(2 / 6)
    assert row.cached_fraction == pytest.approx(40 / 50)
    assert row.busiest == 2.0
    assert row.expected == 1.0
