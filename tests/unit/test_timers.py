"""Timers of routers and executors, in virtual time. The bounds are those of docs/design/time-bounds.md."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import selectors
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, cast

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.executor.engine.output import EngineStatus
from inflight.executor.serving.report import Reporter
from inflight.router.dispatch.dispatcher import ANSWER_WAIT_S, LINK_WAIT_S
from inflight.router.executors.link import MAX_SILENT_S, LivenessTimer
from inflight.router.ledger.redis_ledger import _every
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import Adopted, CancelOutcome, LeaseLapsed, Lost, Queued
from inflight.router.stream.relay import Relay
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2, inference_pb2, types_pb2
from tests.support.ledger.scripted_store import (
    ScriptedRouter,
    accepts,
    new_delivery,
    new_stream,
    placement,
    settled,
    steps,
)


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: the time until the next timer passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if timeout is None and not ready:
            raise RuntimeError("everything waits, and no timer is set")
        self.now_s += timeout or 0.0
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._jumping.now_s


def now_s() -> float:
    """The virtual time."""
    return asyncio.get_running_loop().time()


def virtual(work: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a test run in virtual time from 0. It uses no network and no thread."""

    @functools.wraps(work)
    def test(**fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
            runner.run(work(**fixtures))

    return test


RETRY_S = 0.5
SLACK_S = 1e-6
LEASE_S = 5.0
MAX_REAP_GAP_S = 3.0
"""After a longer gap between two reaps the ledger starts all leases again."""
AWAY = RequestError(Reason.STORE_UNAVAILABLE, "Redis is away")


async def running_stream(router: ScriptedRouter, stream: RequestStream) -> None:
    """The request runs on e0."""
    router.stores["m"].answers.append(placement())
    await router.pools.find("m").dispatcher.submit(stream)
    router.pools.find("m").dispatcher.link_of("e0").receive(accepts(1))  # type: ignore[union-attr]


@virtual
async def test_lost_request_is_handed_back_at_once_and_placed_when_the_ledger_says_so() -> None:
    router = ScriptedRouter("m")
    router.link("e0", "m")
    second = router.link("e1", "m")
    async with router.running():
        await running_stream(router, new_stream())
        lost_s = now_s()
        router.stores["m"].answers.append(placement(2, "e1"))
        router.stores["m"].tell(Lost("r", 1, "e0", 1))
        await settled()
        assert [submit.attempt for submit in second._outbox.submits] == [2]
        assert now_s() == lost_s


@virtual
async def test_request_that_cannot_be_handed_back_is_tried_again_every_half_second() -> None:
    router = ScriptedRouter("m")
    router.link("e0", "m")
    store = router.stores["m"]
    async with router.running():
        await running_stream(router, new_stream())
        store.answers.extend([AWAY] * 3)
        store.tell(Lost("r", 1, "e0", 1))
        for num_tries in (1, 2, 3, 4):
            await settled()
            assert len(store.hand_backs) == num_tries
            await asyncio.sleep(RETRY_S + SLACK_S)
        assert len(store.hand_backs) == 4


@virtual
async def test_request_that_cannot_be_put_in_line_again_is_tried_again_every_half_second() -> None:
    router = ScriptedRouter("m", no_executor_grace_s=10.0)
    router.link("e0", "m")
    store = router.stores["m"]
    async with router.running():
        await router.pools.find("m").dispatcher.submit(new_stream())
        store.answers.extend([AWAY] * 3)
        store.forgotten = frozenset({"r"})
        store.tell(LeaseLapsed())
        for num_submits in (2, 3, 4, 5):
            await settled()
            assert len(store.demands) == num_submits
            await asyncio.sleep(RETRY_S + SLACK_S)
        assert len(store.demands) == 5


@virtual
async def test_end_that_cannot_be_settled_is_tried_again_every_half_second() -> None:
    router = ScriptedRouter("m")
    router.link("e0", "m")
    store = router.stores["m"]
    times_s: list[float] = []
    settle = store.settle

    async def failing(endings: Any) -> int:
        times_s.append(now_s())
        if len(times_s) < 4:
            raise AWAY
        return await settle(endings)

    store.settle = failing  # type: ignore[method-assign]
    async with router.running():
        await running_stream(router, new_stream())
        ended_s = now_s()
        link = router.pools.find("m").dispatcher.link_of("e0")
        assert link is not None
        link.receive(steps(1, cached=0, end=types_pb2.FINISH_REASON_LENGTH))
        await asyncio.sleep(3 * RETRY_S + SLACK_S)
        assert [each_s - ended_s for each_s in times_s] == pytest.approx([0, RETRY_S, 2 * RETRY_S, 3 * RETRY_S])
        assert [ending.request_id for ending in store.endings] == ["r"]


@virtual
async def test_client_that_leaves_has_its_sequence_cancelled_at_once() -> None:
    router = ScriptedRouter("m")
    link = router.link("e0", "m")
    async with router.running():
        stream = new_stream(delivery=new_delivery())
        await running_stream(router, stream)
        before_s = now_s()
        router.pools.find("m").dispatcher.leave(stream, stream.reader)
        assert [one.request_id for one in link._outbox.cancels] == ["r"]
        assert now_s() == before_s


@virtual
async def test_client_that_leaves_the_line_has_its_place_freed_at_once() -> None:
    router = ScriptedRouter("m")
    router.link("e0", "m")
    store, withdrawn = router.stores["m"], []

    async def withdraw(request_id: str) -> CancelOutcome:
        withdrawn.append(request_id)
        return CancelOutcome(None)

    store.withdraw = withdraw  # type: ignore[method-assign]
    async with router.running():
        stream = new_stream(delivery=new_delivery())
        dispatcher = router.pools.find("m").dispatcher
        assert isinstance(await dispatcher.submit(stream), Queued)
        before_s = now_s()
        dispatcher.leave(stream, stream.reader)
        await settled()
        assert (withdrawn, now_s()) == (["r"], before_s)


@virtual
async def test_request_of_another_router_goes_on_here_without_waiting() -> None:
    router = ScriptedRouter("m")
    link = router.link("e0", "m")
    async with router.running():
        router.stores["m"].answers.append(Adopted(placement(), ended=False))
        stream, before_s = new_stream(delivery=new_delivery()), now_s()
        resuming = asyncio.create_task(router.pools.find("m").dispatcher.resume("r", lambda attached: stream))
        await settled()
        assert [attach.request_id for attach in link._outbox.attaches] == ["r"]
        attached = executor_pb2.ServeResponse()
        attached.attached.add(request_id="r", attempt=1, slots=[0], started=True)
        link.receive(attached)
        assert await resuming is stream
        link.receive(steps(5))
        assert ((await stream.next()).token_ids, now_s()) == ([5], before_s)


@virtual
async def test_adopted_request_waits_for_its_reader_while_another_choice_is_adopted() -> None:
    """A reader waits for all choices of its request: each takes a call of Redis, a link and an answer at most."""
    router = ScriptedRouter("m")
    link = router.link("e0", "m")
    async with router.running():
        dispatcher = router.pools.find("m").dispatcher
        router.stores["m"].answers.append(Adopted(placement(), ended=False))
        stream = new_stream(delivery=new_delivery())
        resuming = asyncio.create_task(dispatcher.resume("r", lambda attached: stream))
        await settled()
        attached = executor_pb2.ServeResponse()
        attached.attached.add(request_id="r", attempt=1, slots=[0], started=True)
        link.receive(attached)
        assert await resuming is stream
        longest_s = LedgerSettings().call_timeout_ms / 1000 + LINK_WAIT_S + ANSWER_WAIT_S
        await asyncio.sleep(longest_s - SLACK_S)
        assert dispatcher.stream_of("r") is stream
        assert not stream.life.is_abandoned
        await asyncio.sleep(2 * SLACK_S)
        assert stream.life.is_abandoned


@pytest.mark.parametrize("is_placed", [True, False])
@virtual
async def test_router_ends_a_request_at_its_deadline(is_placed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", now_s)
    router = ScriptedRouter("m")
    router.link("e0", "m")
    stream = new_stream(delivery=new_delivery(deadline=7.0))
    events: list[inference_pb2.StreamEvent] = []

    async def write(event: inference_pb2.StreamEvent) -> None:
        events.append(event)

    async with router.running():
        if is_placed:
            await running_stream(router, stream)
        else:
            await router.pools.find("m").dispatcher.submit(stream)
        await Relay(stream, write).run()
        assert now_s() == pytest.approx(7.0)
        assert [event.finished.reason for event in events if event.HasField("finished")] == [
            types_pb2.FINISH_REASON_DEADLINE
        ]


@virtual
async def test_executor_that_says_nothing_is_given_up_before_its_lease_lapses() -> None:
    ended_s: list[float] = []
    await LivenessTimer(MAX_SILENT_S).watch(lambda: ended_s.append(now_s()))
    assert ended_s == pytest.approx([4.0])
    assert ended_s[0] < LEASE_S


@virtual
async def test_executor_reports_at_least_once_a_second_and_at_most_twenty_times() -> None:
    times_s: list[float] = []
    reporter = Reporter(lambda seq, status: times_s.append(now_s()))
    task = asyncio.create_task(reporter.run())
    reporter.update(cast(EngineStatus, object()))
    await asyncio.sleep(5.0)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    assert len(times_s) >= 4
    assert max([times_s[0], *gaps_s]) <= 1.05 + SLACK_S
    times_s.clear()
    for _ in range(1000):
        reporter.send_now()
        await asyncio.sleep(0.001)
    assert 18 <= len(times_s) <= 21
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@virtual
async def test_reporter_ends_when_it_is_cancelled_just_as_a_change_comes() -> None:
    reporter = Reporter(lambda seq, status: None)
    task = asyncio.create_task(reporter.run())
    await asyncio.sleep(0)
    reporter.send_now()
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=10.0)
    assert done
    assert task.cancelled()


@pytest.mark.parametrize(
    ("interval_ms", "jitter", "most_s"),
    [(LedgerSettings().reap_interval_ms, 0.5, 0.6), (LedgerSettings().renew_interval_ms, 0.1, 1.65)],
    ids=["reap", "renew"],
)
@pytest.mark.parametrize("fails", [True, False])
@virtual
async def test_leases_are_looked_at_and_renewed_often_enough(
    interval_ms: int, jitter: float, most_s: float, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    times_s: list[float] = []

    async def operation() -> None:
        times_s.append(now_s())
        if fails:
            raise AWAY

    task = asyncio.create_task(_every(operation, interval_ms, jitter))
    await asyncio.sleep(10.0)
    task.cancel()
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    assert max(gaps_s) <= most_s + SLACK_S
    # One reply may be waited for in vain, and neither a lease lapses for that nor do all begin again.
    assert most_s + LedgerSettings().call_timeout_ms / 1000 < (MAX_REAP_GAP_S if jitter == 0.5 else LEASE_S)


@virtual
async def test_waiting_request_is_told_after_its_grace_that_there_is_no_executor() -> None:
    router = ScriptedRouter("m", no_executor_grace_s=10.0)
    link = router.link("e0", "m")
    async with router.running():
        stream = new_stream(delivery=new_delivery())
        await router.pools.find("m").dispatcher.submit(stream)
        link._break()
        await asyncio.sleep(10.0 - 0.001)
        errors = [stream.error]
        await asyncio.sleep(0.002)
        errors.append(stream.error)
        assert [error and error.reason for error in errors] == [None, Reason.NO_EXECUTOR]


@virtual
async def test_request_whose_client_asked_for_it_goes_on_unattended_for_that_long() -> None:
    router = ScriptedRouter("m")
    link = router.link("e0", "m")
    async with router.running():
        stream = new_stream(delivery=new_delivery(unattended_s=20.0, kept_s=20.0))
        await running_stream(router, stream)
        router.pools.find("m").dispatcher.leave(stream, stream.reader)
        await asyncio.sleep(19.999)
        assert not link._outbox.cancels
        await asyncio.sleep(0.002)
        assert [one.request_id for one in link._outbox.cancels] == ["r"]
