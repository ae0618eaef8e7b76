"""The simulation sees what it is there to see: one thing is broken on purpose, and the run fails and says where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from inflight.bench.simulation.sim_executor import SimExecutor
from inflight.bench.simulation.sim_link import SimLink
from inflight.bench.simulation.sim_router import SimRouter
from inflight.bench.simulation.world import SimulationFailed, World
from inflight.bench.timeline.faults import FaultRates
from inflight.bench.timeline.population import limits_of
from inflight.bench.timeline.traffic import SimRequest, prompt_of
from inflight.executor.scheduler.blocks import BlockPool
from inflight.router.dispatch import dispatcher
from inflight.router.dispatch.ledger_writer import ledger_report
from inflight.router.dispatch.waiting_audit import WaitingAudit
from inflight.router.executors.link import ExecutorLink
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.types import NO_LIMITS, Demand, ExecutorReport, Lost, Placement
from inflight.router.lifecycle import lifecycle
from inflight.router.lifecycle.events import RequeueReason
from inflight.router.lifecycle.lifecycle import Lifecycle
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2
from tests.simulation.worlds import make_world, run_world

CRASHES = FaultRates(executor_crash=12.0, link_break=12.0)


def fails(world: World, what: str) -> None:
    with pytest.raises(SimulationFailed, match=rf"seed \d+, step \d+, [\d.]+ s: .*{what}"):
        run_world(world)


def test_token_that_is_not_the_next_one_is_seen(redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimExecutor, "submit", _with_wrong_tokens(SimExecutor.submit))
    fails(make_world(redis_url, pool, 1), "token 1 is 7, not")


def _with_wrong_tokens(submit: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: SimExecutor, *args: object) -> None:
        submit(self, *args)
        right = self.device.next_token
        self.device.next_token = lambda request_id, offset: 7 if offset == 1 else right(request_id, offset)

    return wrong


def test_reservation_that_nothing_stands_for_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = SimExecutor._newest_report

    def haunted(self: SimExecutor) -> executor_pb2.Report:
        false = report(self)
        false.held.add(request_id=f"ghost of {self.executor_id}", attempt=1, reserved_blocks=3)
        return false

    monkeypatch.setattr(SimExecutor, "_newest_report", haunted)
    fails(make_world(redis_url, pool, 1, duration_s=5), "for which it is reserved, for 4")


def test_lost_placement_that_is_not_handed_back_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(self: object, lost: object) -> None:
        """Takes no notice."""

    monkeypatch.setitem(lifecycle.ON_EVENT, Lost, deaf)
    monkeypatch.setattr(World, "_unlink", deaf)
    fails(make_world(redis_url, pool, 3, faults=CRASHES), "without an end")


def test_request_that_a_router_forgets_is_seen(redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Lifecycle, why: RequeueReason) -> None:
        self._clear_placement()
        self._forget()

    monkeypatch.setattr(Lifecycle, "_requeue", forgetful)
    fails(make_world(redis_url, pool, 3, faults=CRASHES), "served by no router")


def test_block_that_is_not_given_back_is_seen(redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def leaky(self: BlockPool, block_table: Sequence[int]) -> None:
        release(self, block_table[1:])

    monkeypatch.setattr(BlockPool, "release", leaky)
    fails(make_world(redis_url, pool, 1, duration_s=5), "")


def test_budget_above_what_there_is_is_seen(redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def boastful(link: ExecutorLink, told: executor_pb2.Report) -> ExecutorReport:
        return replace(ledger_report(link, told), budget_blocks=10 * told.total_blocks, budget_sequences=100)

    monkeypatch.setattr(dispatcher, "ledger_report", boastful)
    fails(make_world(redis_url, pool, 1, rate_per_s=40), "of (32 blocks|6 sequences) are reserved")


def test_attempt_that_runs_twice_is_seen(redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that takes matters into its own hands: it sends a placement to another executor as well."""
    submit = SimLink.submit

    def hasty(self: SimLink, stream: RequestStream, placement: executor_pb2.Submit) -> None:
        submit(self, stream, placement)
        router = self.session.router
        assert isinstance(router, SimRouter)
        for other in router.links.values():
            if other is not self:
                submit(other, stream, placement)
                return

    monkeypatch.setattr(SimLink, "submit", hasty)
    fails(make_world(redis_url, pool, 1), r"attempt 1 runs on x\d+ \(generation \d+\) and on x\d+")


@pytest.mark.parametrize("limit", ["above its rate", "and may 8"])
def test_limit_of_a_tenant_that_is_exceeded_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    demand = RequestStream.demand

    def unlimited(self: RequestStream, **how: bool) -> Demand:
        return replace(demand(self, **how), limits=NO_LIMITS)

    monkeypatch.setattr(RequestStream, "demand", unlimited)
    tenant = {"above its rate": 6, "and may 8": 4}[limit]
    world = make_world(redis_url, pool, 1, requests=_of_one_tenant(tenant), num_executors=6, duration_s=5)
    fails(world, limit)


def test_limits_of_a_tenant_hold(redis_url: str, pool: str) -> None:
    for tenant in (4, 6):
        requests = _of_one_tenant(tenant)
        world = make_world(redis_url, f"{pool}-{tenant}", 1, requests=requests, num_executors=6, duration_s=5)
        run_world(world)


def _of_one_tenant(number: int) -> list[SimRequest]:
    tenant, limits = f"tenant{number:03}", limits_of(number)
    return [
        SimRequest(index, f"q{index}", 20_000 * index, prompt_of(index, 20), 20, 24, tenant, limits)
        for index in range(40)
    ]


def test_request_that_redis_has_forgotten_and_that_is_not_asked_for_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitingAudit, "check_next", _trusting)
    fails(make_world(redis_url, pool, 0, faults=FaultRates(store_stale=24.0), rate_per_s=14), "without an end")


async def _trusting(self: WaitingAudit) -> None:
    """Believes that what waits here waits in the ledger."""


def test_reply_that_is_lost_when_the_pool_forgot_the_router_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply that says so may be the one that is lost, so every lost reply counts as one that said so."""
    ignoring = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(RedisLedger, "_missed_reply", ignoring, raising=False)
    monkeypatch.setattr(WaitingAudit, "check_next", _trusting)
    faults = FaultRates(store_away=12.0, store_empty=12.0, router_hang=4.0)
    fails(make_world(redis_url, pool, 14, faults=faults, rate_per_s=10, duration_s=20), "without an end")


def test_number_of_an_attempt_that_is_used_again_is_seen(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A placement whose number is spent must be handed back: to ignore it leaves two that look alike. The table of the
    life cycle sees it first."""
    place = Lifecycle._place

    def ignoring(self: Lifecycle, placement: Placement) -> None:
        if self.is_abandoned or self.has_ended or self.attempt < placement.attempt:
            place(self, placement)

    monkeypatch.setattr(Lifecycle, "_place", ignoring)
    monkeypatch.setattr(WaitingAudit, "check_next", _trusting)
    faults = FaultRates(router_hang=20.0, executor_crash=20.0, store_away=6.0, store_empty=20.0)
    fails(make_world(redis_url, pool, 59, faults=faults, rate_per_s=10, duration_s=20), "Placement led to WAITING")


def test_wait_without_bound_is_seen(redis_url: str, pool: str) -> None:
    fails(make_world(redis_url, pool, 1, rate_per_s=30, max_wait_s=2.0), "waits by class above 2 s")
