"""The parts of the simulation: virtual time, processes, the wire to Redis, faults, requests, commands and reports."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from inflight.bench.redis.pipelined import RedisWire
from inflight.bench.redis.wire import WireError, command
from inflight.bench.scheduling.fairness import FAIR, FLOODER, ways_to_bear_a_flood
from inflight.bench.scheduling.figures import tokens_per_s, ttft_ms, wait_figures
from inflight.bench.scheduling.lab import Lab
from inflight.bench.simulation.__main__ import main
from inflight.bench.simulation.invariants import RequestOutcome
from inflight.bench.simulation.push import PushPolicy
from inflight.bench.timeline.conversations import Conversations
from inflight.bench.timeline.faults import FaultKind, FaultRates
from inflight.bench.timeline.population import Population
from inflight.bench.timeline.timeline import US_PER_S, Process, Timeline
from inflight.bench.timeline.traffic import STOP_ID, SimRequest, heavy_tailed, prompt_of, published
from tests.simulation.worlds import make_world


def test_events_happen_by_time_and_equal_times_in_order() -> None:
    timeline, seen = Timeline(), list[str]()
    timeline.at(20, seen.append, "c")
    timeline.at(10, seen.append, "a")
    timeline.at(20, seen.append, "d")
    timeline.after(10, lambda: timeline.after(0, seen.append, "b"))
    timeline.at(31, seen.append, "later")
    timeline.run_until(30)
    assert seen == ["a", "b", "c", "d"]
    assert (timeline.now_us, timeline.num_steps) == (30, 6 - 1)


def test_hung_process_catches_up_in_order_and_dead_one_does_nothing() -> None:
    timeline, seen = Timeline(), list[int]()
    process = Process(timeline)
    process.hang(100)
    for number in range(3):
        timeline.at(10 * number, process.run, seen.append, number)
    timeline.run_until(99)
    assert not seen
    timeline.run_until(100)
    assert seen == [0, 1, 2]
    process.kill()
    process.run(seen.append, 3)
    assert seen == [0, 1, 2]


def test_doomed_process_dies_in_place_of_its_next_action() -> None:
    timeline, seen = Timeline(), list[str]()
    process = Process(timeline)
    process.doom(1, process.kill)
    for name in ("first", "second", "third"):
        process.run(seen.append, name)
    assert seen == ["first"]
    assert not process.is_alive


@pytest.fixture
def wire(redis_url: str) -> Iterator[RedisWire]:
    wire = RedisWire.connect(redis_url, lambda push: None)
    yield wire
    wire.close()


def test_wire_reads_every_kind_of_reply(wire: RedisWire, pool: str) -> None:
    assert wire.call(command("SET", pool, "x" * 100_000)) == "OK"
    assert wire.call(command("GET", pool)) == "x" * 100_000
    assert wire.call(command("GET", f"{pool}-not")) is None
    assert wire.call(command("EVAL", "return {1, 'a', {2, {}}, false}", 0)) == [1, "a", [2, []], None]
    assert wire.call(command("HSET", f"{pool}-h", "field", b"\xc3\xa4")) == 1
    assert wire.call(command("HGETALL", f"{pool}-h")) == ["field", "ä"]
    assert wire.call(command("DEL", pool, f"{pool}-h")) == 2
    with pytest.raises(WireError, match="unknown command"):
        wire.call(command("NONSENSE"))


def test_equal_replies_of_a_kind_are_one_object(wire: RedisWire) -> None:
    replies = []
    for text in ("same", "same", "other"):
        wire.send(command("EVAL", f"return {{'{text}'}}", 0))
        replies.append(wire.read("kind"))
    assert replies == [["same"], ["same"], ["other"]]
    assert replies[0] is replies[1]


def test_push_comes_between_replies(redis_url: str, pool: str) -> None:
    pushed: list[list[object]] = []
    wire = RedisWire.connect(redis_url, pushed.append)
    wire.send(command("SUBSCRIBE", pool))
    wire.send(command("PUBLISH", pool, "news"))
    wire.send(command("ECHO", "end"))
    # Since Redis 7.2 a client gets its own message after the reply to its command
    assert [wire.read(), wire.read()] == [1, "end"]
    wire.close()
    assert pushed == [["subscribe", pool, 1], ["message", pool, "news"]]


def test_schedule_of_faults_follows_from_its_seed() -> None:
    rates = FaultRates.of("router_crash,store_empty", 30.0)
    faults = rates.schedule(1, 60 * US_PER_S)
    assert faults == rates.schedule(1, 60 * US_PER_S) != rates.schedule(2, 60 * US_PER_S)
    assert {fault.kind for fault in faults} == {FaultKind.ROUTER_CRASH, FaultKind.STORE_EMPTY}
    assert [fault.at_us for fault in faults] == sorted(fault.at_us for fault in faults)
    with pytest.raises(ValueError, match="'flood' is no fault"):
        FaultRates.of("flood", 1.0)


def test_request_ends_with_a_stop_token_only_where_it_ends_by_itself() -> None:
    short = SimRequest(1, "a", 0, prompt_of(1, 5), 3, 10)
    cut = SimRequest(2, "b", 0, prompt_of(2, 5), 30, 10)
    assert [short.token(offset) == STOP_ID for offset in range(3)] == [False, False, True]
    assert STOP_ID not in [cut.token(offset) for offset in range(cut.num_output)]
    assert prompt_of(1, 3) != prompt_of(2, 3)


def test_lengths_are_what_they_say() -> None:
    rng = random.Random(1)
    drawn = [heavy_tailed().draw(rng) for _ in range(2000)]
    outputs = sorted(output for _, output, _ in drawn)
    assert 80 <= outputs[1000] <= 100
    assert {limit for _, _, limit in drawn} == {1024} == {outputs[-1]}
    assert all(output == limit for _, output, limit in (published("short").draw(rng) for _ in range(20)))


def test_later_turns_of_a_chat_begin_with_the_earlier_ones() -> None:
    chats = Conversations(rate_per_s=0.2).requests(1, 60, names_prefixes=True)
    first = chats[0]
    turns = sorted((one for one in chats if one.number // 6 == first.number // 6), key=lambda one: one.number)
    assert len(turns) == 6
    for earlier, later in itertools.pairwise(turns):
        answer = tuple(earlier.token(offset) for offset in range(earlier.num_output - 1))
        assert later.prompt[: len(earlier.prompt) + len(answer)] == earlier.prompt + answer
    assert set(turns[0].prefix_hashes[:-1]) <= set(turns[1].prefix_hashes)


def test_population_is_the_same_for_equal_seeds() -> None:
    population = Population(num_tenants=7)
    assert list(population.requests(3, 20)) == list(population.requests(3, 20))
    assert {request.priority_class for request in population.requests(3, 20)} == {1, 2, 3}


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
