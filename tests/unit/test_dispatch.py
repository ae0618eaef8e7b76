"""Movement of requests between ledger and executors: preemption, pauses, and their ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.dispatch import report_pacer, retry_queue
from inflight.router.dispatch.ledger_writer import ledger_report
from inflight.router.executors.link import ExecutorLink
from inflight.router.ledger.types import (
    CancelOutcome,
    CancelRequested,
    Demand,
    Ending,
    HandBackRefusal,
    LedgerState,
    Lost,
    Placement,
    PreemptRequested,
    Queued,
)
from inflight.router.lifecycle.events import Unlinked
from inflight.router.lifecycle.lifecycle import MAX_CONSECUTIVE_PREEMPTIONS
from inflight.router.stream.relay import Relay
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2, inference_pb2, types_pb2
from tests.support.ledger.scripted_store import (
    ScriptedRouter,
    accepts,
    new_delivery,
    new_stream,
    place,
    placement,
    settled,
    steps,
)

PREEMPTED = types_pb2.FINISH_REASON_PREEMPTED
LENGTH = types_pb2.FINISH_REASON_LENGTH


async def placed(router: ScriptedRouter, stream: RequestStream, blocks: int = 0) -> None:
    """Submits the request, which is placed on e0 at once."""
    router.stores["m"].answers.append(placement(blocks=blocks))
    assert isinstance(await router.pools.find("m").dispatcher.submit(stream), Placement)


@asynccontextmanager
async def boarding() -> AsyncIterator[tuple[ScriptedRouter, RequestStream, ExecutorLink]]:
    """A running router with a request that its executor e0 has accepted."""
    router, stream = ScriptedRouter("m"), new_stream()
    link = router.link("e0", "m")
    async with router.running():
        await placed(router, stream)
        link.receive(accepts(1))
        yield router, stream, link


async def test_executors_of_a_model_whose_tokens_may_differ_are_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = ScriptedRouter("m")
    router.link("a", "m", model_revision="1", dtype="bfloat16")
    router.link("b", "m", model_revision="1", dtype="bfloat16", kv_cache_dtype="bfloat16")
    assert not caplog.messages
    router.link("c", "m", model_revision="1", dtype="bfloat16", kv_cache_dtype="int8")
    router.link("d", "m", model_revision="1", dtype="bfloat16", weight_dtype="int8")
    warning, another = caplog.messages
    assert "executors c and a of model m differ in kv_cache_dtype (int8 and bfloat16)" in warning
    assert "executors d and a of model m differ in weight_dtype (int8 and bfloat16)" in another


@pytest.mark.parametrize("field", ["block_size", "vocabulary_size"])
async def test_executor_that_counts_in_another_way_than_the_others_is_not_used(field: str) -> None:
    router = ScriptedRouter("m")
    router.link("a", "m")
    link = ExecutorLink("b:1", "router", router.pools)
    link.description.CopyFrom(router.pools.find("m").describe())
    link.description.executor_id = "b"
    setattr(link.description, field, 7)
    reason = router.pools.on_linked(link)
    assert isinstance(reason, str)
    assert f"its {field} is 7, that of executor a is" in reason


async def test_requests_are_checked_against_what_most_executors_describe() -> None:
    router = ScriptedRouter("m")
    pool = router.pools.find("m")

    def link(executor_id: str, context_length: int) -> ExecutorLink:
        one = ExecutorLink(f"{executor_id}:1", "router", router.pools)
        one.description.CopyFrom(described)
        one.description.executor_id, one.description.context_length = executor_id, context_length
        events = router.pools.on_linked(one)
        assert not isinstance(events, str)
        one.come_up(events)
        return one

    described = executor_pb2.DescribeResponse(block_size=4, model="m", vocabulary_size=5)
    short = link("a", 2)
    assert pool.describe().context_length == 2
    others = [link("b", 64)]
    assert pool.describe().context_length == 64  # of as many the longest
    link("c", 2**31)
    others.append(link("d", 64))
    assert pool.describe().context_length == 64  # of most
    for one in others:
        one._break()
    assert pool.describe().context_length == 2**31
    submit = executor_pb2.Submit(prompt_ids=[1] * 10)
    assert not short.can_hold(submit)


async def test_request_longer_than_the_context_of_an_executor_continues_elsewhere() -> None:
    router, stream = ScriptedRouter("m"), new_stream()
    router.link("e0", "m").description.context_length = 4
    second = router.link("e1", "m")
    async with router.running():
        router.stores["m"].answers.extend([placement(), placement(2, "e1")])
        await router.pools.find("m").dispatcher.submit(stream)
        await settled()
        assert [submit.attempt for submit in second._outbox.submits] == [2]


async def test_preempted_sequence_goes_on_elsewhere_with_its_output() -> None:
    async with boarding() as (router, stream, first):
        second, store = router.link("e1", "m"), router.stores["m"]
        first.receive(steps(3, 4, cached=4))
        await stream.next()
        # When the executor gives it up
        store.answers.append(placement(2, "e1"))
        first.receive(steps(end=PREEMPTED))
        await settled()
        # Then it was handed back as preempted, and the other executor has it with its output
        assert store.hand_backs == [
            ("r", 1, {"rejected": False, "preempted": True, "output_tokens": 2, "progressed": True})
        ]
        assert store.endings == []
        (submit,) = second._outbox.submits
        assert (submit.attempt, list(submit.prior_output_ids)) == (2, [3, 4])
        news = await stream.next()
        assert (news.preempted, news.end, news.error) == (True, None, None)
        # And it ends there as any other
        second.receive(accepts(2))
        second.receive(steps(2, offset=2, cached=0, end=LENGTH))
        await settled()
        news = await stream.next()
        assert (news.token_ids, news.preempted) == ([2], False)
        assert news.end is not None
        assert stream.num_migrations == 1
        assert store.endings == [Ending("r", 2, computed_tokens=6, output_tokens=3, by_itself=True)]


async def test_preempted_sequence_that_returns_to_its_executor_has_not_moved() -> None:
    async with boarding() as (router, stream, link):
        store = router.stores["m"]
        link.receive(steps(3, 4, cached=4))
        store.answers.append(placement(2, "e0"))
        link.receive(steps(end=PREEMPTED))
        await settled()
        assert [submit.attempt for submit in link._outbox.submits] == [1, 2]
        assert (stream.num_migrations, stream.is_preempted) == (0, True)


@pytest.mark.parametrize(("executor_id", "num_migrations"), [("e0", 0), ("e1", 1)])
async def test_used_reservation_is_extended_and_its_reader_sees_no_pause(executor_id: str, num_migrations: int) -> None:
    router = ScriptedRouter("m")
    links = {name: router.link(name, "m") for name in ("e0", "e1")}
    store = router.stores["m"]
    # Given three blocks of 4 tokens for a prompt of 10, and 2 tokens more
    demand = Demand("r", 2, 9, prompt_tokens=10, max_tokens=26, block_size=4, reservation_tokens=2)
    submit = executor_pb2.Submit(request_id="r", prompt_ids=[1] * 10)
    submit.stopping.max_tokens = 26
    stream = RequestStream(demand, submit, 0.0)
    async with router.running():
        store.answers.append(placement(1, "e0", blocks=3))
        await router.pools.find("m").dispatcher.submit(stream)
        links["e0"].receive(accepts(1))
        links["e0"].receive(steps(3, 4, cached=4))
        await stream.next()
        # When they have come
        store.answers.append(placement(2, executor_id, blocks=4))
        links["e0"].receive(steps(end=PREEMPTED))
        await settled()
        # Then four blocks hold them and 2 tokens more, and this is no failure of anything
        assert [one.placement_blocks for one in store.demands] == [3]
        assert (store.placement_blocks, [how["preempted"] for *_, how in store.hand_backs]) == ([4], [True])
        (*_, again) = links[executor_id]._outbox.submits
        assert (again.attempt, again.reserved_blocks, again.stopping.max_tokens) == (2, 4, 26)
        assert list(again.prior_output_ids) == [3, 4]
        assert (stream.num_migrations, stream.is_preempted) == (num_migrations, False)


@pytest.mark.parametrize("in_one", [True, False])
async def test_sequence_that_a_draining_executor_hands_back_is_not_placed_there_again(in_one: bool) -> None:
    async with boarding() as (router, _stream, link):
        store = router.stores["m"]
        report = executor_pb2.ServeResponse(report=executor_pb2.Report(seq=1, draining=True))
        end = steps(end=types_pb2.FINISH_REASON_PREEMPTED)
        if in_one:
            report.step.CopyFrom(end.step)
        link.receive(report)
        if not in_one:
            link.receive(end)
        await settled()
        ((_, attempt, how),) = store.hand_backs
        # Which has the ledger wait for the executor's next report
        assert (attempt, how["rejected"], how["preempted"]) == (1, True, False)


async def test_sequence_that_is_preempted_again_and_again_for_nothing_waits_for_a_report() -> None:
    router = ScriptedRouter("m")
    link, stream, store = router.link("e0", "m"), new_stream(), router.stores["m"]
    async with router.running():
        await placed(router, stream)
        for attempt in range(1, MAX_CONSECUTIVE_PREEMPTIONS + 3):
            store.answers.append(placement(attempt + 1))
            link.receive(accepts(attempt))
            link.receive(steps(end=types_pb2.FINISH_REASON_PREEMPTED))
            await settled()
        assert [how["rejected"] for _, _, how in store.hand_backs] == [False] * MAX_CONSECUTIVE_PREEMPTIONS + [True] * 2
        # A token begins the count again
        link.receive(accepts(MAX_CONSECUTIVE_PREEMPTIONS + 3))
        link.receive(steps(1, end=types_pb2.FINISH_REASON_PREEMPTED))
        await settled()
        assert not store.hand_backs[-1][2]["rejected"]


async def test_sequence_that_the_ledger_preempts_again_and_again_keeps_its_executor_open_for_others() -> None:
    """The ledger wants the room at once, and would not place another there before a report."""
    router = ScriptedRouter("m")
    link, stream, store = router.link("e0", "m"), new_stream(), router.stores["m"]
    async with router.running():
        await placed(router, stream)
        for attempt in range(1, MAX_CONSECUTIVE_PREEMPTIONS + 3):
            store.answers.append(placement(attempt + 1))
            link.receive(accepts(attempt))
            store.tell(PreemptRequested("r", attempt))
            link.receive(steps(end=types_pb2.FINISH_REASON_PREEMPTED))
            await settled()
        assert [how["preempted"] for _, _, how in store.hand_backs] == [True] * (MAX_CONSECUTIVE_PREEMPTIONS + 2)


async def test_sequence_cancelled_without_a_request_to_do_so_goes_on_elsewhere() -> None:
    async with boarding() as (router, stream, first):
        second, store = router.link("e1", "m"), router.stores["m"]
        first.receive(steps(3, 4, cached=4))
        # When the ledger took the placement for superseded and had it cancelled
        store.answers.append(placement(2, "e1"))
        first.receive(steps(end=types_pb2.FINISH_REASON_CANCELLED))
        await settled()
        # Then the client is not told of a cancel, and another executor goes on
        assert store.hand_backs == [
            ("r", 1, {"rejected": False, "preempted": False, "output_tokens": 2, "progressed": True})
        ]
        (submit,) = second._outbox.submits
        assert list(submit.prior_output_ids) == [3, 4]
        assert (await stream.next()).end is None


async def test_withdrawal_that_the_ledger_did_not_hear_is_repeated_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry_queue, "LEDGER_RETRY_S", 0.0)
    router, stream = ScriptedRouter("m"), new_stream()
    store, dispatcher = router.stores["m"], router.pools.find("m").dispatcher
    asked: list[str] = []

    async def cancel(request_id: str) -> CancelOutcome:
        asked.append(request_id)
        if len(asked) < 3:
            raise RequestError(Reason.STORE_UNAVAILABLE, "Redis is away")
        return CancelOutcome(LedgerState.PLACED, placement())

    store.cancel = cancel  # type: ignore[method-assign]
    async with router.running():
        await dispatcher.submit(stream)
        dispatcher.release(stream)
        await settled()
        # Its seat is free again where it was placed before the ledger heard
        assert asked == ["r", "r", "r"]
        assert dispatcher.streams == ()
        assert store.endings == [Ending("r", 1, 0, 0, cancelled=True)]


async def test_ledger_preempts_by_an_end_with_that_reason() -> None:
    router, stream = ScriptedRouter("m"), new_stream()
    link = router.link("e0", "m")
    async with router.running():
        await placed(router, stream)
        router.stores["m"].tell(PreemptRequested("r", 2))  # of another attempt
        router.stores["m"].tell(PreemptRequested("unknown", 1))
        router.stores["m"].tell(PreemptRequested("r", 1))
        (cancel,) = link._outbox.cancels
        assert (cancel.request_id, cancel.attempt, cancel.reason) == ("r", 1, PREEMPTED)


async def test_sequence_that_ends_by_itself_while_it_is_preempted_has_ended() -> None:
    async with boarding() as (router, _stream, link):
        router.stores["m"].tell(PreemptRequested("r", 1))
        link.receive(steps(3, cached=0, end=LENGTH))
        await settled()
        assert router.stores["m"].hand_backs == []
        assert router.stores["m"].endings == [Ending("r", 1, 10, 1, by_itself=True)]


async def test_request_cancelled_while_it_is_preempted_ends_cancelled() -> None:
    async with boarding() as (router, stream, link):
        router.stores["m"].tell(CancelRequested("r", 1))
        link.receive(steps(end=PREEMPTED))
        await settled()
        news = await stream.next()
        assert news.end is not None
        assert news.end.reason == types_pb2.FINISH_REASON_CANCELLED
        assert router.stores["m"].hand_backs == []
        assert router.stores["m"].endings == [Ending("r", 1, 0, 0, cancelled=True)]


async def test_abandoned_request_that_is_preempted_is_settled() -> None:
    async with boarding() as (router, stream, link):
        link.receive(steps(1, cached=8))
        router.pools.find("m").dispatcher.release(stream)
        link.receive(steps(end=PREEMPTED))
        await settled()
        assert router.stores["m"].endings == [Ending("r", 1, 2, 1, cancelled=True)]
        assert router.pools.find("m").dispatcher.streams == ()


async def test_lost_executor_is_not_preemption() -> None:
    async with boarding() as (router, _stream, _link):
        router.stores["m"].tell(Lost("r", 1, "e0", 1))
        await settled()
        assert router.stores["m"].hand_backs == [
            ("r", 1, {"rejected": False, "preempted": False, "output_tokens": 0, "progressed": False})
        ]


async def test_placement_whose_number_is_spent_is_handed_back() -> None:
    router, stream = ScriptedRouter("m"), new_stream()
    link = router.link("e1", "m")
    store = router.stores["m"]
    async with router.running():
        # Given a placement from before the ledger forgot the request, on an executor that is gone, and a ledger that
        # therefore does not know that attempt but has the request in line
        store.answers.extend([placement(1, "e0"), HandBackRefusal.STALE, Queued(0)])
        await router.pools.find("m").dispatcher.submit(stream)
        await settled()
        assert [demand.last_attempt for demand in store.demands] == [0, 1]
        # When the ledger places it under the same number
        store.answers.append(placement(2, "e1"))
        store.tell(placement(1, "e1"))
        await settled()
        # Then that is handed back, and the next placement is the one that counts
        rejected = {"rejected": True, "preempted": False, "output_tokens": 0, "progressed": False}
        assert store.hand_backs == [("r", 1, rejected), ("r", 1, rejected)]
        assert [submit.attempt for submit in link._outbox.submits] == [2]


async def test_request_that_is_repeated_waits_until_the_end_of_its_placement_before_is_settled() -> None:
    """Otherwise the ledger would answer with the placement that is about to end."""
    router = ScriptedRouter("m")
    router.link("e0", "m")
    store, dispatcher = router.stores["m"], router.pools.find("m").dispatcher
    async with router.running():
        store.may_settle.clear()
        store.tell(placement())  # for a call whose client has gone
        await settled()
        repeated = asyncio.create_task(dispatcher.submit(new_stream()))
        other = asyncio.create_task(dispatcher.submit(new_stream(request_id="s")))
        await settled()
        assert [demand.request_id for demand in store.demands] == ["s"]
        assert other.done()
        store.answers.append(placement(2))
        store.may_settle.set()
        await settled()
        assert repeated.result() == placement(2)
        assert [(ending.request_id, ending.attempt) for ending in store.endings] == [("r", 1)]


async def test_request_whose_placement_before_cannot_be_settled_is_not_submitted() -> None:
    router = ScriptedRouter("m")
    store, dispatcher = router.stores["m"], router.pools.find("m").dispatcher
    away = RequestError(Reason.STORE_UNAVAILABLE, "away")
    store.settle = lambda endings: _raises(away)  # type: ignore[method-assign]
    async with router.running():
        store.tell(placement())
        with pytest.raises(RequestError) as refused:
            await dispatcher.submit(new_stream())
        assert refused.value is away
        assert store.demands == []


async def _raises(error: RequestError) -> int:
    raise error


async def test_executor_that_has_rejected_has_its_next_report_relayed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_pacer, "INTERVAL_S", 1e6)  # no other reason to relay it comes up meanwhile
    router, stream = ScriptedRouter("m"), new_stream()
    link = router.link("e0", "m")
    store = router.stores["m"]
    async with router.running():
        await placed(router, stream)
        for seq in (1, 2):
            link.receive(executor_pb2.ServeResponse(report=executor_pb2.Report(seq=seq, budget_blocks=5)))
            await settled()
        assert [report.seq for report in store.reports] == [1]
        rejected = executor_pb2.ServeResponse()
        rejected.rejected.add(request_id="r", attempt=1, reason=executor_pb2.REJECT_REASON_NO_CAPACITY)
        link.receive(rejected)
        await settled()
        assert [report.seq for report in store.reports] == [1, 2]


async def test_what_an_executor_cannot_do_is_told_with_the_name_of_the_field() -> None:
    for reason, told, violations in (
        (executor_pb2.REJECT_REASON_UNSUPPORTED, Reason.NOT_IMPLEMENTED, [("exact_resume", "not here")]),
        (executor_pb2.REJECT_REASON_INVALID, Reason.INTERNAL, []),
    ):
        router, stream = ScriptedRouter("m"), new_stream()
        link = router.link("e0", "m")
        async with router.running():
            await placed(router, stream)
            rejected = executor_pb2.ServeResponse()
            rejected.rejected.add(request_id="r", attempt=1, reason=reason, detail="exact_resume: not here")
            link.receive(rejected)
            await settled()
        error = stream.life.error
        assert error is not None
        assert error.reason is told
        assert [(one.field, one.description) for one in error.violations] == violations
        assert str(error) == "the executor refused the request: exact_resume: not here"


async def test_submit_carries_the_blocks_that_are_reserved_and_the_time_that_is_left() -> None:
    router, stream = ScriptedRouter("m"), new_stream(deadline=time.monotonic() + 100)
    link = router.link("e0", "m")
    async with router.running():
        await placed(router, stream, blocks=4)
    (submit,) = link._outbox.submits
    assert submit.reserved_blocks == 4
    assert 99_000 < submit.deadline_ms <= 100_000


async def test_submit_without_reserved_blocks_and_deadline_has_the_whole_need_and_none() -> None:
    router, stream = ScriptedRouter("m"), new_stream()
    link = router.link("e0", "m")
    async with router.running():
        await placed(router, stream)
    (submit,) = link._outbox.submits
    assert submit.reserved_blocks == 9
    assert not submit.HasField("deadline_ms")


def test_submit_past_its_deadline_has_no_time_left_but_is_not_without_one() -> None:
    assert place(new_stream(deadline=time.monotonic() - 5), placement()).deadline_ms == 1


def test_request_with_output_is_asked_for_without_the_deadline_of_its_first_token() -> None:
    stream = new_stream()
    place(stream, placement())
    assert stream.demand().deadline_ms == 500
    stream.tokens(0, [1])
    assert replace(stream.demand(), output_tokens=0).deadline_ms is None
    assert (stream.demand().last_attempt, stream.demand().output_tokens) == (1, 1)


async def test_pause_is_told_once_until_it_goes_on() -> None:
    async with boarding() as (_router, stream, link):
        link.receive(steps(1, cached=0, paused=True))
        link.receive(steps(paused=True))
        assert (await stream.next()).preempted
        link.receive(steps(2, offset=1))
        assert not (await stream.next()).preempted
        link.receive(steps(paused=True))
        assert (await stream.next()).preempted


def test_request_that_never_had_a_seat_does_not_pause() -> None:
    stream = new_stream()
    place(stream, placement())
    stream.preempt()
    assert not stream._changed.is_set()


@pytest.mark.parametrize(
    ("end", "matched", "by_itself"),
    [
        (types_pb2.FINISH_REASON_STOP_TOKEN, False, True),
        (LENGTH, False, True),
        (types_pb2.FINISH_REASON_DEADLINE, False, False),
        (types_pb2.FINISH_REASON_CANCELLED, False, False),
        (types_pb2.FINISH_REASON_CANCELLED, True, True),
    ],
)
async def test_ending_says_what_was_used_and_whether_its_length_means_something(
    end: types_pb2.FinishReason, matched: bool, by_itself: bool
) -> None:
    async with boarding() as (router, stream, link):
        link.receive(steps(1, 2, cached=8))
        stream.life.has_matched_stop = matched
        stream.life.is_cancelled = end == types_pb2.FINISH_REASON_CANCELLED
        link.receive(steps(end=end))
        await settled()
        is_cancelled = end == types_pb2.FINISH_REASON_CANCELLED and not matched
        assert router.stores["m"].endings == [Ending("r", 1, 2, 2, by_itself=by_itself, cancelled=is_cancelled)]


async def test_cancel_of_an_unknown_request_finds_nothing() -> None:
    router = ScriptedRouter("m")
    async with router.running():
        assert await router.pools.find("m").dispatcher.cancel("unknown") is None
        router.stores["m"].cancels["r"] = CancelOutcome(LedgerState.ENDED)
        assert await router.pools.find("m").dispatcher.cancel("r") is LedgerState.ENDED


def test_report_reaches_the_ledger_with_what_it_reserves_and_how_fast_it_is() -> None:
    link = ScriptedRouter("m").link("e0", "m")
    report = ledger_report(
        link, executor_pb2.Report(seq=1, reserve_quantile=0.5, step_ms=7, prefill_tokens_per_s=900, draining=True)
    )
    assert (report.reserve_quantile, report.step_ms, report.prefill_tokens_per_s) == (0.5, 7, 900)
    assert not report.accepting
    assert ledger_report(link, executor_pb2.Report()).reserve_quantile == 1.0
    # A batch that has just begun has no output yet; drafts yield more than a token in a step.
    batch = executor_pb2.Report(step_ms=50, num_running=4)
    assert ledger_report(link, batch).output_tokens_per_s == 80
    batch.output_tokens_per_s = 120
    assert ledger_report(link, batch).output_tokens_per_s == 120
    assert ledger_report(link, executor_pb2.Report(num_running=4, num_waiting=3)).output_tokens_per_s == 0
    assert ledger_report(link, executor_pb2.Report(num_waiting=3)).num_standby == 3


async def test_client_reads_of_line_pause_and_move_in_order() -> None:
    stream = new_stream(delivery=new_delivery())
    events: list[inference_pb2.StreamEvent] = []

    async def write(event: inference_pb2.StreamEvent) -> None:
        events.append(event)

    relay = Relay(stream, write)
    await relay.queued(Queued(3, 1500))
    stream.move(Queued(1, None))
    await relay._send_progress(await stream.next())
    place(stream, placement())
    stream.accept()
    stream.board(0)
    stream.tokens(0, [1])
    stream.preempt()
    stream.move(Queued(7, None))  # it is accepted: too late
    await relay._send_progress(await stream.next())
    stream.life.handle(Unlinked(1))
    place(stream, placement(2))
    stream.accept()
    await relay._send_progress(await stream.next())
    told = [(event.WhichOneof("event"), event.queued.position, event.notice.kind) for event in events]
    assert told == [
        ("queued", 3, 0),
        ("queued", 1, 0),
        ("accepted", 0, 0),
        ("started", 0, 0),
        ("notice", 0, inference_pb2.Notice.KIND_PAUSED),
        ("notice", 0, inference_pb2.Notice.KIND_MIGRATED),
    ]
    assert events[0].queued.estimated_wait.ToMilliseconds() == 1500
    assert not events[1].queued.HasField("estimated_wait")


@pytest.mark.parametrize("num_turns", range(5))
async def test_relay_with_a_deadline_ends_when_cancelled_in_the_moment_that_a_token_comes(num_turns: int) -> None:
    stream = new_stream(delivery=new_delivery(deadline=time.monotonic() + 1000))
    place(stream, placement())
    running = asyncio.create_task(Relay(stream, None).run())
    await settled()
    stream.tokens(0, [1])
    for _ in range(num_turns):  # of the event loop
        await asyncio.sleep(0)
    running.cancel()
    ended, _ = await asyncio.wait((running,), timeout=60)
    assert ended
