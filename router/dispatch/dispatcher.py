"""The dispatcher of one model. It connects requests with the service, the executors and the ledger.

`LiveRequests` makes the decisions about requests. The dispatcher passes events to it and executes the effects that it
returns: calls of the ledger, messages on links, notices for readers. The dispatcher owns the calls in progress, the
links that are up and the requests that ended recently. The `LedgerWriter` writes ends and reports, the `QueueWatch`
reports positions in the queue, and the `WaitingAudit` finds waiting requests that the ledger has lost.

While Redis is unavailable, running streams continue. Ends and hand-backs wait until it is available again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

from inflight.common.errors import Reason, RequestError
from inflight.router.dispatch.kept_states import KeptStates
from inflight.router.dispatch.ledger_writer import LedgerWriter, checkpoint_names, ledger_report
from inflight.router.dispatch.queue_updates import QueueWatch
from inflight.router.dispatch.retry_queue import LEDGER_RETRY_S, RetryQueue
from inflight.router.dispatch.usage_writer import UsageWriter, executor_usage
from inflight.router.dispatch.waiting_audit import WaitingAudit
from inflight.router.executors.link import Answer as LinkAnswer
from inflight.router.executors.link import ExecutorLink, NotAttached, OnAnswer
from inflight.router.ledger.ledger import Ledger, OnEvent
from inflight.router.ledger.types import (
    AccountUsage,
    Adopted,
    Attempt,
    CancelOutcome,
    DayUsage,
    Ending,
    Explanation,
    HandBackOutcome,
    HandBackRefusal,
    LeaseLapsed,
    LedgerEvent,
    LedgerState,
    Placement,
    Queued,
    Refused,
    Snapshot,
    TenantLimits,
)
from inflight.router.lifecycle.events import (
    Admitted,
    AdoptedElsewhere,
    AttachAnswered,
    AttachResult,
    CancelFound,
    Event,
    Forgotten,
    HandBackAnswered,
    LifecycleState,
    LinkEvent,
    NotLinked,
    Rejected,
    RequeueReason,
    SubmitAnswer,
    Unlinked,
    WithdrawAnswered,
)
from inflight.router.lifecycle.lifecycle import (
    KEEPS_EXECUTOR,
    Answer,
    Attach,
    CancelSequence,
    ClearSuspicion,
    Effects,
    ExpectReport,
    Forget,
    HandBack,
    Lifecycle,
    LiveRequests,
    PublishEnd,
    ReadOutput,
    RecordAdmitted,
    RecordRequeued,
    ScheduleResubmit,
    ScheduleWithdraw,
    Send,
    Settle,
    SettleUnused,
    SubmitToLedger,
)
from inflight.router.request.errors import (
    RETRY_AFTER_MS,
    being_cancelled,
    draining,
    duplicate,
    mismatch,
    no_executor,
    not_in_the_ledger,
    output_lost,
    refusal,
    still_waits,
)
from inflight.router.request.ids import client_id
from inflight.router.stream.relay import Relay, unattended_s
from inflight.router.stream.request_stream import Reader, RequestStream, unread_stream
from inflight.v1 import executor_pb2, types_pb2

log = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")
OpenAttached = Callable[[executor_pb2.SequenceAttached], RequestStream]

# The number of requests that fit into the concurrent calls of submit.lua (`inflight.router.ledger.calls`). A new
# request that gets no turn within `SUBMIT_TURN_S` is refused. Its client can try another router, or try again later.
MAX_CONCURRENT_SUBMITS = 32
SUBMIT_TURN_S = 2.0
# The ended requests of a pool that are kept.
MAX_STREAMS = 10_000
MAX_BYTES = 64 * 1024 * 1024

QUEUE_EVENT_INTERVAL_S = 1.0
KEEP_ENDED_S = 60.0
# Time for which an adopted request waits for its reader. A reader waits until all choices are adopted, so this time is
# longer than the adoption of another choice can take.
UNCLAIMED_S = 10.0
# Time for which a reconnecting client waits for the end of its request while the request is being cancelled.
CANCEL_WAIT_S = 5.0
# A router that has just started links its executors within a second.
LINK_WAIT_S = 3.0
# An executor answers between two steps, unless it hangs.
ANSWER_WAIT_S = 5.0

# Final errors. A reconnecting client gets them again.
LASTING_ERRORS = frozenset({Reason.INTERNAL, Reason.ATTEMPTS_EXHAUSTED, Reason.NEVER_FITS})


class SubmitTurns:
    """Turns of one pool's new requests. They bound the number of concurrent submits."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_CONCURRENT_SUBMITS)

    async def take(self, submit: Callable[[], Awaitable[Outcome]]) -> Outcome | RequestError:
        """Waits for a turn and calls `submit`. Returns an error if there is no turn within `SUBMIT_TURN_S`."""
        try:
            async with asyncio.timeout(SUBMIT_TURN_S):
                await self._turns.acquire()
        except TimeoutError:
            text = "too many requests come in at once"
            return RequestError(Reason.STORE_UNAVAILABLE, text, retry_after_ms=RETRY_AFTER_MS)
        try:
            return await submit()
        finally:
            self._turns.release()


class EndedStreams:
    """The ended requests of one pool, kept for a while so that clients can read them again.

    Count and bytes are bounded, and the oldest requests are dropped first. Executors also keep the output of ended
    requests. All times are seconds of one monotonic clock.
    """

    def __init__(self, keep_s: float, max_streams: int = MAX_STREAMS, max_bytes: int = MAX_BYTES) -> None:
        self._keep_s = keep_s
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        # By id: the stream, the time to drop it and its bytes, in the order in which the requests ended.
        self._kept: OrderedDict[str, tuple[RequestStream, float, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, stream: RequestStream, now: float) -> None:
        """Keeps a request that has ended. It replaces an older request with the same id."""
        self._drop(stream.request_id)
        delivery = stream.delivery
        asked_s = None if delivery is None else delivery.kept_s
        keep_s = self._keep_s if asked_s is None else min(asked_s, self._keep_s)
        num_bytes = stream.num_bytes
        self._kept[stream.request_id] = (stream, now + keep_s, num_bytes)
        self._num_bytes += num_bytes
        while self._kept and self._is_too_much(now):
            self._drop(next(iter(self._kept)))

    def find(self, ledger_id: str, now: float) -> RequestStream | None:
        """Returns the request with this id if it is still kept."""
        stream, until, _ = self._kept.get(ledger_id, (None, now, 0))
        if stream is not None and until <= now:
            self._drop(ledger_id)
            return None
        return stream

    def _is_too_much(self, now: float) -> bool:
        _, oldest_until, _ = next(iter(self._kept.values()))
        return oldest_until <= now or len(self._kept) > self._max_streams or self._num_bytes > self._max_bytes

    def _drop(self, ledger_id: str) -> None:
        _, _, num_bytes = self._kept.pop(ledger_id, (None, 0.0, 0))
        self._num_bytes -= num_bytes


class Dispatcher:
    """The live requests of one model on this router."""

    def __init__(
        self,
        open_ledger: Callable[[OnEvent], Ledger],
        max_attempts: int,
        no_executor_grace_s: float,
        queue_event_interval_s: float = QUEUE_EVENT_INTERVAL_S,
        keep_ended_s: float = KEEP_ENDED_S,
        on_lapse: Callable[[], None] = lambda: None,
        on_charged: Callable[[AccountUsage], None] = lambda added: None,
    ) -> None:
        self._ledger = open_ledger(self._on_ledger_event)
        self._writer = LedgerWriter(self._ledger, self._cancel_superseded)
        self._usage = UsageWriter(self._ledger, on_charged)
        self._requests = LiveRequests(no_executor_grace_s)
        self._ended = EndedStreams(keep_ended_s)
        self._links: dict[str, ExecutorLink] = {}
        self.kept_states = KeptStates()
        self._description: executor_pb2.DescribeResponse | None = None
        self._linked = asyncio.Event()
        self._max_attempts = max_attempts
        self._no_executor_grace_s = no_executor_grace_s
        self._keep_ended_s = keep_ended_s
        self._on_lapse = on_lapse
        self._submitting: dict[Lifecycle, asyncio.Future[Admitted | RequestError]] = {}
        self._resuming: dict[str, asyncio.Task[RequestStream | RequestError]] = {}
        self._resubmissions: RetryQueue[Lifecycle] = RetryQueue(self._try_to_submit, self._spawn)
        self._withdrawals: RetryQueue[Lifecycle] = RetryQueue(self._try_to_withdraw, self._spawn)
        self._queue_watch = QueueWatch(self._ledger.explain, queue_event_interval_s)
        self._waiting_audit = WaitingAudit(self, self._ledger.find_forgotten)
        self._turns = SubmitTurns()
        self._on_effect = self._effect_table()
        self._tasks = asyncio.TaskGroup()
        self._has_stopped = False

    @property
    def links(self) -> tuple[ExecutorLink, ...]:
        """The executors that can be used now."""
        return tuple(self._links.values())

    @property
    def description(self) -> executor_pb2.DescribeResponse | None:
        """What new requests are checked against; None while no executor is linked."""
        if self._description is None:
            # Not at every change of the links: it takes 2 ms with 1,000 executors.
            self._description = shared_description(one.description for one in self._links.values())
        return self._description

    @property
    def streams(self) -> tuple[RequestStream, ...]:
        """The requests that wait or run."""
        return tuple(stream_of(life) for life in self._requests.served.values())

    def link_of(self, executor_id: str) -> ExecutorLink | None:
        """Returns the link to an executor if it can be used now."""
        return self._links.get(executor_id)

    def stream_of(self, request_id: str) -> RequestStream | None:
        """Returns the stream of a request that this router serves."""
        life = self._requests.served.get(request_id)
        return None if life is None else stream_of(life)

    async def run(self) -> None:
        """Runs the background tasks until cancelled."""
        try:
            async with self._tasks:
                self._tasks.create_task(self._ledger.run(), name="ledger")
                self._tasks.create_task(self._writer.run(), name="ledger writer")
                self._tasks.create_task(self._usage.run(), name="usage writer")
                self._tasks.create_task(self._queue_watch.run(), name="queue watch")
                self._tasks.create_task(self._waiting_audit.run(), name="waiting audit")
                self._tasks.create_task(self._waiting_audit.run_after_lapses(), name="waiting audit after a lapse")
        finally:
            self._has_stopped = True

    async def close(self) -> None:
        """Settles the placements that have ended, and books usage, if the ledger answers now."""
        await self._writer.settle_now()
        await self._usage.charge_now()
        await self._ledger.aclose()

    # Calls of the service.

    async def submit(self, stream: RequestStream) -> Admitted:
        """Admits a request. It is then placed, waits, or continues on the executor where it ran. Raises `RequestError`
        if it is refused.

        The call of the ledger continues if the caller is cancelled. Its reply must not reach another caller, and a
        request that was admitted nevertheless must be withdrawn.
        """
        effects = self._requests.submit(stream.life)
        self._submitting[stream.life] = asyncio.get_running_loop().create_future()
        self._execute(effects)
        outcome = await self.admitted(stream)
        assert outcome is not None
        return outcome

    async def admitted(self, stream: RequestStream) -> Admitted | None:
        """Waits until the ledger has answered the first submit of a request; None: it has done so before. Raises
        `RequestError` if the request is refused, or as soon as its current reader is displaced."""
        reader, answered = stream.reader, self._submitting.get(stream.life)
        if answered is None:
            return None
        try:
            if reader is None:
                outcome = await asyncio.shield(answered)
            else:
                outcome = await reader.await_unless_displaced(answered)
        except asyncio.CancelledError:
            self.leave(stream, reader)
            raise
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def check_rates(
        self, tenant: str, limits: TenantLimits, tokens: int, request_id: str = "", *, takes: bool = False
    ) -> Refused | None:
        """Calls `Ledger.check_rates`. Raises `RequestError` if the ledger does not answer."""
        return await self._ledger.check_rates(tenant, limits, tokens, request_id, takes=takes)

    async def find_repeated(self, stream: RequestStream) -> RequestStream | None:
        """Returns the request that this one repeats, if it is served or kept here. Raises `RequestError` if the id
        belongs to a different request."""
        known = await self._find_wanted(stream.request_id)
        if known is None:
            known = self._ended.find(stream.request_id, time.monotonic())
            if known is None or known.life.was_cancelled or known.error is not None:
                return None
        if not stream.life.is_repeatable:
            raise duplicate(client_id(stream.request_id))
        if stream.digest != known.digest:
            raise mismatch()
        return known

    async def find(self, ledger_id: str) -> RequestStream | None:
        """Returns a request that is served or kept here, for a client that reconnects.

        Returns None for a request that ended here because its client left. It may continue on another router, which
        the ledger knows. Raises `RequestError` if the request is being cancelled and this takes too long.
        """
        served = await self._find_wanted(ledger_id)
        if served is not None:
            return served
        kept = self._ended.find(ledger_id, time.monotonic())
        return None if kept is not None and kept.life.was_cancelled and not kept.life.is_cancelled else kept

    async def _find_wanted(self, ledger_id: str) -> RequestStream | None:
        """Returns a request that is served here. If it is being cancelled because its client left, waits until it has
        ended, so that no other client reads that end."""
        known = self.stream_of(ledger_id)
        if known is None or not _is_being_cancelled(known):
            return known
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_WAIT_S):
                await known.forgotten.wait()
        known = self.stream_of(ledger_id)
        if known is not None and _is_being_cancelled(known):
            raise being_cancelled()
        return known

    async def resume(self, ledger_id: str, open_attached: OpenAttached) -> RequestStream:
        """Continues a request that another router started. Raises `RequestError` if this is impossible.

        The takeover continues if the caller is cancelled, because this router owns an adopted request even without a
        reader.
        """
        resuming = self._resuming.get(ledger_id)
        if resuming is None:
            resuming = self._resuming[ledger_id] = self._tasks.create_task(self._resume(ledger_id, open_attached))
        outcome = await asyncio.shield(resuming)
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def _resume(self, ledger_id: str, open_attached: OpenAttached) -> RequestStream | RequestError:
        outcome = await self._adopt(ledger_id, open_attached)
        del self._resuming[ledger_id]
        if isinstance(outcome, RequestStream):
            # If it has no reader by then, its client has left.
            asyncio.get_running_loop().call_later(UNCLAIMED_S, self.leave, outcome, None)
        return outcome

    def leave(self, stream: RequestStream, reader: Reader | None, grace_s: float = 0.0) -> None:
        """Handles the loss of a reader. The request ends, or continues for as long as its client requested or for
        `grace_s` seconds, whichever is longer. A choice whose reader was displaced continues, because the call that
        reads another choice is about to read this one. No effect if another call reads the request."""
        if reader is not stream.reader:
            return
        self._queue_watch.unwatch(stream)
        drain_s = unattended_s(stream.delivery, grace_s, self._keep_ended_s)
        if reader is not None and reader.is_displaced and drain_s is not None:
            drain_s = max(drain_s, UNCLAIMED_S)
        if stream.has_ended or drain_s == 0:
            self.release(stream)
        elif self._is_served(stream):
            self._spawn(self._drain_unattended(stream, stream.drain(), drain_s))

    async def _drain_unattended(self, stream: RequestStream, reader: Reader, drain_s: float | None) -> None:
        """Drains the stream for a reader without a client, so that stop strings and deadlines still apply."""
        try:
            async with asyncio.timeout(drain_s):
                await Relay(stream, None, reader=reader).run()
        except TimeoutError:
            log.info("%s: no client resumed the request within %g s", stream.request_id, drain_s)
        except RequestError as error:
            log.debug("%s: without a client: %s", stream.request_id, error.reason.value)
        if reader is stream.reader:
            self.release(stream)

    def release(self, stream: RequestStream) -> None:
        """Ends the request in any state, because its client has left. Safe to repeat, also after its end."""
        self._queue_watch.unwatch(stream)
        self._execute(self._requests.release(stream.life))

    def drain_waiting(self) -> None:
        """Ends the waiting requests, because this router drains. A request that can be repeated keeps its position in
        the queue."""
        self._execute(self._requests.drain_waiting(draining("the router is draining")))

    async def wait_until_empty(self) -> None:
        """Waits until no request waits or runs here."""
        while self._requests.served:
            await stream_of(next(iter(self._requests.served.values()))).forgotten.wait()

    def leave_running(self) -> None:
        """Stops serving all requests. Their clients resume them on other routers."""
        error = draining("the router has drained; resume on another", is_resumable=True)
        self._execute(self._requests.leave_all(error))

    def watch_queue(self, stream: RequestStream, told: Queued) -> None:
        """Reports the position of a waiting request to its client when it changes. The client already knows `told`."""
        self._queue_watch.watch(stream, told)

    async def cancel(self, request_id: str) -> LedgerState | None:
        """Ends a request of any router. Returns its state before; None if there is no such request."""
        outcome = await self._ledger.cancel(request_id)
        if outcome.state is None:
            return None
        life = self._requests.served.get(request_id)
        if life is not None:
            self._apply(life, CancelFound(outcome.state))
        elif outcome.placement is not None and not outcome.owner_notified:
            placement = outcome.placement
            self._execute([CancelSequence(placement.executor_id, request_id, placement.attempt)])
        return outcome.state

    async def knows(self, request_id: str) -> bool:
        """Returns whether a request of any router waits, runs or has ended recently."""
        if self.stream_of(request_id) is not None or self._ended.find(request_id, time.monotonic()) is not None:
            return True
        return await self._ledger.explain(request_id) is not None

    async def explain(self, request_id: str) -> Explanation | None:
        """Returns the state of a request of any router; None if there is no such request."""
        return await self._ledger.explain(request_id)

    async def snapshot(self, max_tenant_queues: int = 0) -> Snapshot:
        """Returns the current state of the ledger."""
        return await self._ledger.snapshot(max_tenant_queues)

    async def usage(self, day: int) -> DayUsage:
        """Returns what all accounts used of the model on a day, in days since 1970."""
        return await self._ledger.usage(day)

    # Callbacks of links.

    def on_linked(self, link: ExecutorLink) -> None:
        """Registers the link to an executor that can be used."""
        self._links[link.executor_id] = link
        self._description = None
        self._linked.set()
        self._linked = asyncio.Event()

    def on_request(self, stream: RequestStream, event: LinkEvent) -> None:
        """Applies an event of a placement that was sent over a link."""
        self._apply(stream.life, event)

    def on_report(self, link: ExecutorLink, report: executor_pb2.Report) -> None:
        """Queues a report of an executor for the ledger. Only the newest report counts."""
        self._writer.report(ledger_report(link, report))
        if link.description.state_grid_tokens:
            self.kept_states.set(link.executor_id, checkpoint_names(report))

    def on_usage(self, link: ExecutorLink, usage: executor_pb2.UsageReport) -> None:
        """Queues what accounts have used of an executor, for the ledger."""
        self._usage.add(executor_usage(link, usage))

    def on_unlinked(self, link: ExecutorLink, streams: Sequence[RequestStream]) -> None:
        """Hands the requests of a lost executor back to the queue, with their output so far."""
        if self._links.get(link.executor_id) is link:
            del self._links[link.executor_id]
            self._description = None
            self._writer.forget(link.executor_id)
            self.kept_states.forget(link.executor_id)
        for stream in streams:
            self._apply(stream.life, Unlinked(stream.life.current_attempt))
        if not self._links:
            self._spawn(self._give_up_without_executor())

    async def _give_up_without_executor(self) -> None:
        await asyncio.sleep(self._no_executor_grace_s)
        if not self._links:
            text = f"no executor has been reachable for {self._no_executor_grace_s:g} s"
            self._execute(self._requests.no_executor(no_executor(text)))

    # Events of the ledger.

    def _on_ledger_event(self, event: LedgerEvent) -> None:
        if not isinstance(event, LeaseLapsed):
            self._execute(self._requests.on_ledger_event(event))
            return
        if event.is_certain:
            log.warning("the ledger has taken this router for dead; it is asked which waiting requests it still has")
        self._on_lapse()
        self._writer.start_over()
        self._execute(self._requests.apply_lapse_outside_queue())
        self._waiting_audit.lapsed()

    def _cancel_superseded(self, executor_id: str, attempt: Attempt) -> None:
        self._execute([CancelSequence(executor_id, attempt.request_id, attempt.attempt)])

    # Calls of the audit (`inflight.router.dispatch.waiting_audit`).

    def waiting(self) -> list[RequestStream]:
        """Returns the requests that are in the queue, as far as this router knows."""
        return [stream_of(life) for life in self._requests.waiting()]

    def waits(self, stream: RequestStream) -> bool:
        """Returns whether the request is in the queue, as far as this router knows."""
        return self._is_served(stream) and stream.life.is_in_queue

    def resubmit_forgotten(self, stream: RequestStream) -> None:
        """Submits a request again that waits here but is not in the ledger's queue."""
        self._apply(stream.life, Forgotten())

    # Execution of effects.

    def _apply(self, life: Lifecycle, event: Event) -> None:
        self._execute(self._requests.apply(life, event))

    def _execute(self, effects: Effects) -> None:
        for effect in effects:
            self._on_effect[type(effect)](effect)

    def _effect_table(self) -> dict[type, Callable[[Any], None]]:
        return {
            SubmitToLedger: self._start_submit,
            Answer: self._answer,
            RecordAdmitted: lambda effect: stream_of(effect.life).record.admitted(),
            ScheduleResubmit: self._schedule_resubmit,
            ScheduleWithdraw: self._schedule_withdraw,
            Attach: lambda effect: self._spawn(self._attach(effect)),
            ReadOutput: self._read_output,
            Send: self._send,
            CancelSequence: self._cancel_sequence,
            HandBack: lambda effect: self._spawn(self._hand_back(effect)),
            ExpectReport: lambda effect: self._writer.expect_report(effect.executor_id),
            Settle: lambda effect: self._writer.settle(stream_of(effect.life).ending(effect.attempt)),
            SettleUnused: lambda effect: self._writer.settle(effect.ending),
            ClearSuspicion: lambda effect: self._spawn(self._clear_suspicion(effect)),
            RecordRequeued: self._record_requeued,
            PublishEnd: lambda effect: stream_of(effect.life).publish_end(),
            Forget: self._forget,
        }

    def _start_submit(self, effect: SubmitToLedger) -> None:
        if not effect.is_served:  # a served request is submitted by `_resubmissions`
            self._tasks.create_task(self._submit_first(effect.life))

    def _answer(self, effect: Answer) -> None:
        answered = self._submitting.pop(effect.life)
        if not answered.done():  # the caller may have been cancelled
            answered.set_result(effect.outcome)

    def _schedule_resubmit(self, effect: ScheduleResubmit) -> None:
        if not effect.is_retry:  # a retry stays in the queue
            self._resubmissions.add(effect.life)

    def _schedule_withdraw(self, effect: ScheduleWithdraw) -> None:
        if not effect.is_retry:
            self._withdrawals.add(effect.life)

    def _read_output(self, effect: ReadOutput) -> None:
        stream_of(effect.life).attach(has_started=effect.has_started, num_cached_tokens=effect.num_cached_tokens)

    def _send(self, effect: Send) -> None:
        stream, placement = stream_of(effect.life), effect.placement
        submit = stream.place(placement)
        link = self._links.get(placement.executor_id)
        if link is None or link.description.generation != placement.generation or not link.can_hold(submit):
            self._apply(effect.life, NotLinked(placement.attempt))
        elif (refusal := link.refusal_of(submit)) is not None:
            self._apply(effect.life, Rejected(placement.attempt, refusal))
        else:
            link.submit(stream, submit)

    def _cancel_sequence(self, effect: CancelSequence) -> None:
        link = self._links.get(effect.executor_id)
        if link is not None:
            link.cancel(effect.request_id, effect.attempt, cast(types_pb2.FinishReason, effect.reason))

    def _record_requeued(self, effect: RecordRequeued) -> None:
        stream_of(effect.life).requeue(effect.why)

    def _forget(self, effect: Forget) -> None:
        stream = stream_of(effect.life)
        stream.forget()
        is_lasting = stream.error is not None and stream.error.reason in LASTING_ERRORS
        is_left = stream.life.state is LifecycleState.LEFT
        if stream.delivery is not None and not is_left and (stream.end is not None or is_lasting):
            self._ended.keep(stream, time.monotonic())

    async def _submit_first(self, life: Lifecycle) -> None:
        async def submit_unless_abandoned() -> SubmitAnswer:
            if life.is_abandoned:  # the client left while the request waited for its turn
                return draining("the client is gone")
            return await self._submit_to_ledger(life)

        outcome = await self._turns.take(submit_unless_abandoned)
        self._execute(self._requests.submit_answered(life, outcome))

    async def _try_to_submit(self, life: Lifecycle) -> bool:
        """Tries to submit a request again whose placement or queue entry the ledger has lost. Returns whether this is
        done. While Redis is unavailable, the request stays in the queue of resubmissions."""
        if not self._requests.resubmit_due(life):
            return True
        outcome = await self._submit_to_ledger(life, is_served=True)
        self._execute(self._requests.resubmit_answered(life, outcome, asyncio.get_running_loop().time()))
        return not life.is_resubmit_queued

    async def _submit_to_ledger(self, life: Lifecycle, *, is_served: bool = False) -> SubmitAnswer:
        try:
            await self._writer.settled(life.request_id)
            return await self._ledger.submit(stream_of(life).demand(is_served=is_served))
        except RequestError as error:
            return error

    async def _try_to_withdraw(self, life: Lifecycle) -> bool:
        """Tries to take a request out of the queue. Returns whether this is done."""
        if not self._requests.withdraw_due(life):
            return True
        outcome: CancelOutcome | None = None
        try:
            outcome = await self._ledger.withdraw(life.request_id)
        except RequestError as error:
            log.debug("%s cannot be withdrawn yet: %s", life.request_id, error)
        self._apply(life, WithdrawAnswered(outcome))
        return outcome is not None

    async def _hand_back(self, effect: HandBack) -> None:
        outcome = await self._hand_back_to_ledger(effect)
        self._apply(effect.life, HandBackAnswered(effect.placement, effect.why, outcome, self._max_attempts))

    async def _hand_back_to_ledger(self, effect: HandBack) -> HandBackOutcome:
        stream, placement, why = stream_of(effect.life), effect.placement, effect.why
        while True:
            with suppress(RequestError):  # the ledger does not answer
                outcome = await self._ledger.hand_back(
                    placement.request_id,
                    placement.attempt,
                    self._max_attempts,
                    rejected=why in (RequeueReason.REJECTED, RequeueReason.HANDED_BACK),
                    preempted=why in KEEPS_EXECUTOR,
                    output_tokens=len(stream.output_ids),
                    progressed=stream.has_progressed,
                    stood_still=why is RequeueReason.STALLED,
                    placement_blocks=stream.placement_blocks,
                )
                if outcome is not HandBackRefusal.UNDECIDED:
                    return outcome
            await asyncio.sleep(LEDGER_RETRY_S)

    async def _clear_suspicion(self, effect: ClearSuspicion) -> None:
        try:
            await self._ledger.clear_suspect(effect.life.request_id, effect.attempt)
        except RequestError as error:
            log.debug("%s stays under suspicion: %s", effect.life.request_id, error)

    # Takeover of other routers' requests.

    async def _attach(self, effect: Attach) -> None:
        """Attaches to the placement of a request that a client of this router repeats."""
        life, adopted, is_first = effect.life, effect.adopted, effect.is_first

        def on_answer(answer: LinkAnswer) -> RequestStream | None:
            if not isinstance(answer, executor_pb2.SequenceAttached):
                return None
            if not stream_of(life).is_repeat_of(answer):
                # The executor holds another request with this id, which the ledger had forgotten. It continues for its
                # own client.
                self._apply(life, AttachAnswered(adopted, AttachResult.MISMATCH, is_first))
                return unread_stream(answer.request_id)
            self._apply(
                life,
                AttachAnswered(adopted, AttachResult.ATTACHED, is_first, answer.started, answer.cached_tokens),
            )
            if life.is_current(adopted.placement.attempt):
                return stream_of(life)
            return unread_stream(answer.request_id) if life.state is LifecycleState.LEFT else None

        answer = await self._ask_executor(adopted.placement, on_answer)
        if isinstance(answer, NotAttached):
            self._apply(life, AttachAnswered(adopted, NOT_ATTACHED[answer], is_first))

    async def _adopt(self, ledger_id: str, open_attached: OpenAttached) -> RequestStream | RequestError:
        """Adopts a request of which only the id is known. Returns its stream, or the error if it cannot be
        continued."""
        try:
            adopted = await self._ledger.adopt(ledger_id)
        except RequestError as error:
            return error
        if adopted is None:
            return not_in_the_ledger()
        if isinstance(adopted, Refused):
            return refusal(adopted)
        if adopted in (LedgerState.WAITING, LedgerState.LOST):
            return still_waits()
        if not isinstance(adopted, Adopted):
            return output_lost("no executor holds the request")
        opened: list[RequestStream] = []

        def on_answer(answer: LinkAnswer) -> RequestStream | None:
            if not isinstance(answer, executor_pb2.SequenceAttached):
                return None
            stream = open_attached(answer)
            opened.append(stream)
            event = AdoptedElsewhere(adopted, answer.started, answer.cached_tokens)
            self._execute(self._requests.adopt(stream.life, event))
            return stream

        answer = await self._ask_executor(adopted.placement, on_answer)
        if opened:
            log.info("%s continues on this router", ledger_id)
            return opened[0]
        if answer is NotAttached.NOT_HELD and not adopted.ended:
            # The prompt is lost, so the request cannot run. Its reservation is released.
            self._writer.settle(Ending(ledger_id, adopted.placement.attempt, cancelled=True))
        return output_lost("its executor does not hold the request any more, or cannot be reached")

    async def _ask_executor(self, placement: Placement, on_answer: OnAnswer) -> LinkAnswer:
        """Asks the executor of a placement for its output from the first token on. `on_answer` is called if the answer
        arrives in time, before any frame that names the sequence's slot is applied."""
        link = await self._link_to(placement)
        if link is None:
            # The executor is linked with another generation: it has restarted and holds no earlier request.
            is_another = placement.executor_id in self._links
            return NotAttached.NOT_HELD if is_another else NotAttached.LINK_LOST
        answered: asyncio.Future[LinkAnswer] = asyncio.get_running_loop().create_future()

        def answer_once(answer: LinkAnswer) -> RequestStream | None:
            if answered.done():  # the wait has timed out
                return None
            stream = on_answer(answer)
            answered.set_result(answer)
            return stream

        link.attach(placement.request_id, placement.attempt, 0, answer_once)
        try:
            async with asyncio.timeout(ANSWER_WAIT_S):
                return await answered
        except TimeoutError:
            return NotAttached.LINK_LOST

    async def _link_to(self, placement: Placement) -> ExecutorLink | None:
        """Returns the link to the executor of a placement; None if the executor has restarted. Waits up to
        `LINK_WAIT_S` for the link to come up; None if it does not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINK_WAIT_S):
                while True:
                    link = self._links.get(placement.executor_id)
                    if link is not None:
                        return link if link.description.generation == placement.generation else None
                    await self._linked.wait()
        return None

    def _is_served(self, stream: RequestStream) -> bool:
        return self._requests.served.get(stream.request_id) is stream.life

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._has_stopped:  # other routers continue the remaining work
            work.close()
            return
        self._tasks.create_task(work)


NOT_ATTACHED = {NotAttached.NOT_HELD: AttachResult.NOT_HELD, NotAttached.LINK_LOST: AttachResult.LINK_LOST}


def shared_description(
    descriptions: Iterable[executor_pb2.DescribeResponse],
) -> executor_pb2.DescribeResponse | None:
    """Returns the description that most executors share in what requests are checked against. Of several, it has the
    longest context. So one executor with a short context, or with other defaults, does not decide for all."""
    by_terms: dict[bytes, list[executor_pb2.DescribeResponse]] = {}
    for one in descriptions:
        terms = executor_pb2.DescribeResponse(
            block_size=one.block_size,
            context_length=one.context_length,
            vocabulary_size=one.vocabulary_size,
            eos_token_ids=one.eos_token_ids,
            default_sampling=one.default_sampling,
        )
        by_terms.setdefault(terms.SerializeToString(deterministic=True), []).append(one)
    largest = max(by_terms.values(), key=lambda group: (len(group), group[0].context_length), default=None)
    return None if largest is None else min(largest, key=lambda one: one.executor_id)


def stream_of(life: Lifecycle) -> RequestStream:
    assert isinstance(life.output, RequestStream)
    return life.output


def _is_being_cancelled(stream: RequestStream) -> bool:
    """Returns whether the client has left and the request has not ended yet."""
    return stream.life.is_abandoned and not stream.has_ended
