"""Time bounds in virtual time: each fault by itself where there is room, and what is too late is seen.

The bounds are those of docs/design/time-bounds.md; `inflight.bench.simulation.bounds` states them and checks them in
every simulation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

import inflight.router.ledger.functions
from inflight.bench.simulation.device import TWO_CORES
from inflight.bench.simulation.sim_executor import ExecutorShape
from inflight.bench.simulation.sim_router import RouterShape
from inflight.bench.simulation.world import SimulationFailed, World
from inflight.bench.timeline.faults import FaultKind, SpacedFaults
from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.timeline.traffic import SimRequest, poisson_us, prompt_of
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sequence
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.dispatch.ledger_writer import LedgerWriter
from inflight.router.dispatch.report_pacer import ReportPacer
from inflight.router.ledger.settings import LedgerSettings
from tests.simulation.worlds import ROUTER, make_world, run_world

Result = TypeVar("Result")

COST = replace(TWO_CORES, step_s=0.040)
SHAPE = ExecutorShape(num_blocks=256, num_seats=16, max_num_tokens=512, context_length=256, cost=COST)
DURATION_S = 36.0
# The time until the next token of a stream that nothing interrupts, by its formula for this shape.
NEXT_TOKEN_S = 1.4


def long_answers(seed: int, rate_per_s: float, duration_s: float, gone_fraction: float = 0.2) -> Iterator[SimRequest]:
    """Requests of a few seconds, some of whose clients leave before the end."""
    rng = random.Random(f"{seed}/long answers")
    for number, arrival_us in enumerate(poisson_us(rate_per_s, rng)):
        if arrival_us > duration_s * US_PER_S:
            return
        gone_us = rng.randrange(5 * US_PER_S) if rng.random() < gone_fraction else None
        prompt = prompt_of(number, rng.randrange(10, 50))
        output = rng.randrange(80, 200)
        yield SimRequest(number, f"q{number}", arrival_us, prompt, output, 200, gone_after_us=gone_us)


def spacious(
    redis_url: str,
    pool: str,
    kind: FaultKind,
    *,
    duration_s: float = 12.0,
    seed: int = 1,
    rate_per_s: float = 3.0,
    router: RouterShape = ROUTER,
) -> World:
    """A pool of three executors, of which two would do at 3 requests a second, and one fault after the other."""
    return make_world(
        redis_url,
        pool,
        seed,
        shape=SHAPE,
        router=router,
        faults=SpacedFaults(kind, 18.0, duration_s),
        duration_s=DURATION_S,
        requests=long_answers(seed, rate_per_s, DURATION_S),
        look_s=0.1,
        has_room=rate_per_s <= 3,
    )


def exceeds(world: World, what: str) -> None:
    """The run fails, and says which bound of what."""
    with pytest.raises(SimulationFailed, match=rf"seed \d+, step \d+, [\d.]+ s: .*{what}"):
        run_world(world)


WITH_DURATIONS = (FaultKind.ROUTER_HANG, FaultKind.EXECUTOR_HANG, FaultKind.STORE_AWAY)


@pytest.mark.parametrize(
    ("kind", "duration_s"),
    [*((kind, 12.0) for kind in FaultKind), *((kind, 1.0) for kind in WITH_DURATIONS)],
    ids=lambda value: value.value if isinstance(value, FaultKind) else f"{value:g}",
)
def test_every_bound_is_kept_where_there_is_room(redis_url: str, pool: str, kind: FaultKind, duration_s: float) -> None:
    world = run_world(spacious(redis_url, pool, kind, duration_s=duration_s))
    assert world.num_faults[kind] >= 2
    assert world.bounds.next_token_us() <= NEXT_TOKEN_S * US_PER_S


def test_bounds_are_kept_if_all_requests_wait(redis_url: str, pool: str) -> None:
    run_world(crowded(redis_url, pool))


def crowded(redis_url: str, pool: str) -> World:
    """A pool with a line at all times, looked at between any two reports."""
    requests = long_answers(1, 12.0, 10.0)
    return make_world(redis_url, pool, 1, shape=SHAPE, requests=requests, duration_s=10, num_executors=2, look_s=0.02)


# What is too late is seen: one thing is broken on purpose.


SCRIPTS = [
    # The audit removes a lost reservation 20 s later.
    ("AUDIT_GRACE_MS = 2000", "AUDIT_GRACE_MS = 20000", FaultKind.ROUTER_CRASH, "for which it is reserved"),
    ("AUDIT_INTERVAL_MS = 1000", "AUDIT_INTERVAL_MS = 20000", FaultKind.ROUTER_CRASH, "for which it is reserved"),
    ("LEASE_MS = 5000 ", "LEASE_MS = 15000 ", FaultKind.EXECUTOR_HANG, "has no token|has a lease"),
    ("LEASE_MS = 5000 ", "LEASE_MS = 15000 ", FaultKind.EXECUTOR_CRASH, "is dead or hung and has a lease"),
    ("LEASE_MS = 5000 ", "LEASE_MS = 15000 ", FaultKind.ROUTER_CRASH, "is dead and has a lease"),
    ("complete = reap_routers()", "complete = true", FaultKind.ROUTER_CRASH, "is dead and has a lease"),
    ("if is_unmatched and account_for", "if is_unmatched and false and account_for", FaultKind.STORE_EMPTY, "runs"),
]


@pytest.fixture(autouse=True)
def _own_scripts() -> Iterator[None]:
    """Scripts are composed once per process, so those that a test changes must not stay."""
    inflight.router.ledger.functions.load_scripts.cache_clear()
    yield
    inflight.router.ledger.functions.load_scripts.cache_clear()


@pytest.mark.parametrize(("was", "becomes", "kind", "what"), SCRIPTS)
def test_ledger_that_is_late_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch, was: str, becomes: str, kind: FaultKind, what: str
) -> None:
    change_script(monkeypatch, was, becomes)
    exceeds(spacious(redis_url, pool, kind), what)


def test_new_work_for_an_executor_that_has_been_silent_for_longer_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_script(monkeypatch, "SILENT_MS = 2000", "SILENT_MS = 4900")
    world = spacious(redis_url, pool, FaultKind.EXECUTOR_HANG, rate_per_s=5.0)
    exceeds(world, "is placed on x00.., which is dead or hung")


def change_script(monkeypatch: pytest.MonkeyPatch, was: str, becomes: str) -> None:
    """Every script has one thing instead of another, which at least one of its sources has."""
    read = inflight.router.ledger.functions._read
    assert any(
        was in path.read_text(encoding="utf-8") for path in inflight.router.ledger.functions.SOURCES.rglob("*.lua")
    )
    monkeypatch.setattr(inflight.router.ledger.functions, "_read", lambda name: read(name).replace(was, becomes))


def test_room_that_is_given_with_the_next_report_only_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_script(monkeypatch, "board.run()\n  return reply.finish({'SETTLED'", "return reply.finish({'SETTLED'")
    exceeds(crowded(redis_url, pool), "requests wait beside room for each of them")


def test_leases_that_are_looked_at_every_ten_seconds_are_seen(redis_url: str, pool: str) -> None:
    router = RouterShape(store=LedgerSettings(reap_interval_ms=10_000))
    exceeds(spacious(redis_url, pool, FaultKind.EXECUTOR_CRASH, router=router), "has a lease")


LATE_S = 5.0


def later(action: Callable[..., object]) -> Callable[..., object]:
    """Does something 5 s later."""
    return lambda *args: asyncio.get_running_loop().call_later(LATE_S, action, *args)


def late(action: Callable[..., Awaitable[Result]]) -> Callable[..., Awaitable[Result]]:
    """Begins something 5 s later."""

    async def wait_and_act(*args: object) -> Result:
        await asyncio.sleep(LATE_S)
        return await action(*args)

    return wait_and_act


@pytest.mark.parametrize("kind", [FaultKind.EXECUTOR_CRASH, FaultKind.LINK_BREAK])
def test_request_that_is_handed_back_late_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch, kind: FaultKind
) -> None:
    monkeypatch.setattr(Dispatcher, "_hand_back", late(Dispatcher._hand_back))
    exceeds(spacious(redis_url, pool, kind), "has no token|for which it is reserved")


def test_end_that_is_settled_late_is_seen(redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LedgerWriter, "settle", later(LedgerWriter.settle))
    exceeds(crowded(redis_url, pool), "for which it is reserved, for 0.0.. s; the bound is 0.010 s")


def test_executor_for_which_no_router_stands_in_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReportPacer, "report_overdue", lambda *args: None)
    exceeds(spacious(redis_url, pool, FaultKind.ROUTER_HANG), "reports and the ledger does not hear of it")


def test_place_in_line_that_is_given_up_late_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dispatcher, "_try_to_withdraw", late(Dispatcher._try_to_withdraw))
    exceeds(crowded(redis_url, pool), r"has ended \(cancelled\) and stands in line")


def test_sequence_of_a_client_that_left_and_that_is_cancelled_late_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dispatcher, "_cancel_sequence", later(Dispatcher._cancel_sequence))
    exceeds(crowded(redis_url, pool), r"which has ended \(cancelled\)")


def test_blocks_that_are_free_late_are_seen(redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_blocks(monkeypatch, num_steps=25)
    exceeds(crowded(redis_url, pool), "left 3 steps ago and holds")


def keep_blocks(monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """Blocks are free so many plans after they should be."""
    release, schedule = Scheduler._release, Scheduler.schedule
    kept: dict[tuple[Scheduler, Sequence], int] = {}

    def later(self: Scheduler, sequence: Sequence) -> None:
        kept[self, sequence] = num_steps

    def plan(self: Scheduler, *args: Any) -> object:
        for (scheduler, sequence), left in list(kept.items()):
            if scheduler is self and left > 0:
                kept[self, sequence] = left - 1
            elif scheduler is self:
                del kept[self, sequence]
                release(self, sequence)
        return schedule(self, *args)

    monkeypatch.setattr(Scheduler, "_release", later)
    monkeypatch.setattr(Scheduler, "schedule", plan)
