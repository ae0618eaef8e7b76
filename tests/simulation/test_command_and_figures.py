"""The simulation's command, the policies that it compares with, and figures of its reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from inflight.bench.scheduling.fairness import FAIR, FLOODER, ways_to_bear_a_flood
from inflight.bench.scheduling.figures import tokens_per_s, ttft_ms, wait_figures
from inflight.bench.scheduling.lab import Lab
from inflight.bench.simulation.__main__ import main
from inflight.bench.simulation.invariants import RequestOutcome
from inflight.bench.simulation.push import PushPolicy
from inflight.bench.timeline.traffic import SimRequest, prompt_of
from tests.simulation.worlds import make_world


@pytest.mark.parametrize("push", list(PushPolicy), ids=lambda policy: policy.value)
def test_placing_on_arrival_serves_everybody_too(redis_url: str, pool: str, push: PushPolicy) -> None:
    requests = [
        SimRequest(number, f"q{number}", 100_000 * number, prompt_of(number, 20), 8, 24) for number in range(50)
    ]
    world = make_world(redis_url, pool, 1, requests=requests, duration_s=40, num_routers=1, push=push)
    world.run_window()
    world.close()
    assert world.checker.outcomes == {RequestOutcome.COMPLETED: 50}


def test_command_says_in_one_line_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hours", "0.002", "--executors", "2", "--routers", "2", "--rate", "3", "--faults", "none"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("simulation: held seed=0 executors=2 routers=2 simulated_s=7.2")


def test_command_does_the_same_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    """A set of texts has another order there."""
    options = ["--hours", "0.001", "--executors", "3", "--routers", "3", "--faults-per-minute", "20", "--seed", "3"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-m", "inflight.bench.simulation", *options]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert main(options) == 0
    here, there = (re.sub(r"took_s=\S+ ", "", text.splitlines()[-1]) for text in (capsys.readouterr().out, other))
    assert here == there


def test_first_token_waits_in_line_in_standby_and_for_its_prompt(redis_url: str, pool: str) -> None:
    requests = [SimRequest(0, "q0", 9_000_000, prompt_of(0, 20), 3, 3)]
    world = make_world(redis_url, pool, 1, requests=requests, duration_s=15)
    world.run()
    world.close()

    [record] = world.checker.records.values()
    waits = wait_figures(world, [record])
    assert [name for name in waits if name.endswith("p99 ms")] == [
        "in line p99 ms",
        "in standby p99 ms",
        "in prefill p99 ms",
    ]
    assert sum(waits.values()) / 2 == pytest.approx(ttft_ms(record, 0))
    assert set(wait_figures(world, []).values()) == {0.0}
    assert tokens_per_s(world, [record]) == 3 / 15


def test_limit_of_the_flooder_is_told_with_its_requests_only() -> None:
    lab = Lab("redis://nowhere", 0, 0.01)
    ways = {way.name: way.requests for way in ways_to_bear_a_flood(lab, 0.4)}
    [name] = [name for name in ways if "max_running 16" in name]
    assert {(request.tenant == FLOODER, request.limits.max_running) for request in ways[name]} == {
        (True, 16),
        (False, None),
    }
    assert [request.number for request in ways[name]] == list(range(len(ways[FAIR])))
