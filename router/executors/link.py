"""The router's `Serve` stream to one executor: connect, describe, serve, and reconnect when it breaks.

Owns the channel, the slots of the stream and the acknowledgements of steps. Output goes to the request's stream. Events
of the request's life cycle go to the pool (`LinkEvents`). A link that breaks reports this once. All its placements are
then void: either the executor is dead, or a router attaches to them. If a token is missing, the link attaches to the
placement again, from that token on. If that fails, the placement is given up and the request continues elsewhere.

An executor's description or frame ends at most this link. `inflight.router.executors.frame_checks` refuses what cannot
be true before any of it is applied. Any other error in handling a frame, an `IllegalTransition` included, is a bug of
this router; it ends the link as well, so that the executor that sends such frames cannot end the router. Both are
logged and counted. The pause before the next connection then doubles each time, up to `MAX_BREACH_BACKOFF_S`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from inflight.common.cancellation import task_is_cancelled
from inflight.common.errors import FieldViolation, Reason, RequestError
from inflight.common.parameters import LATER_PARAMETERS
from inflight.common.protocol import (
    ATTACH_VERSION,
    EXACT_RESUME_VERSION,
    LOGITS_VERSION,
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
)
from inflight.router.executors.channel import ExecutorChannels
from inflight.router.executors.frame_checks import check_description, check_frame
from inflight.router.lifecycle.events import Detached, FirstToken, LinkEvent, Rejected, SequenceEnded, Withdrawn
from inflight.router.request.executor_context import FrameError
from inflight.router.stream.request_stream import RequestStream, unread_stream
from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
LATE_S = 1.0
# The attempt of a slot whose sequence is now read through another slot. No attempt has this number, so the slot is
# never current.
READ_ELSEWHERE = -1
# If a router has not acknowledged this many steps, the executor sends the tokens of later steps together, in one frame.
MAX_UNACKED_STEPS = 16
ACK_EVERY_FRAMES = 4
# By default.
MAX_OUTPUT_DELAY_S = 0.025
DESCRIBE_TIMEOUT_S = 5.0
# Executors of versions without `refusal` do not end the stream.
REFUSAL_TIMEOUT_S = 1.0
# An executor reports at least once a second on every stream, and its lease in the ledger lapses after 5 s.
MAX_SILENT_S = 4
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
# An executor that breaks the protocol costs each request that it gets an attempt.
MAX_BREACH_BACKOFF_S = 30.0

# gRPC's default backoff grows to minutes while an executor loads its model. The reconnect loop below has its own
# backoff.
_RECONNECT_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", int(MIN_BACKOFF_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(MAX_BACKOFF_S * 1000)),
]


class LivenessTimer:
    """Detects the silence of a peer that should send a message every second.

    A check is made every second. `is_over` is set once no message has arrived for `max_silent_s` checks in a row. If a
    check is late, this process was stopped rather than the peer, and messages of the peer may still be unread, so the
    count starts again.
    """

    def __init__(self, max_silent_s: int) -> None:
        self.is_over = False
        self._max_silent = max_silent_s
        self._num_silent = 0
        self._has_heard = False

    def record_message(self) -> None:
        """Records that a message of the peer has arrived."""
        self._has_heard = True

    def check(self, late_s: float) -> bool:
        """Makes a check, which is `late_s` seconds late. Returns whether the peer has been silent for too long."""
        self._num_silent = 0 if self._has_heard or late_s > LATE_S else self._num_silent + 1
        self._has_heard = False
        self.is_over = self._num_silent >= self._max_silent
        return self.is_over

    async def watch(self, end: Callable[[], object]) -> None:
        """Checks every second. Calls `end` once the peer has been silent for too long."""
        loop = asyncio.get_running_loop()
        while not self.is_over:
            due = loop.time() + CHECK_INTERVAL_S
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.check(loop.time() - due)
        end()


class NotAttached(Enum):
    """Why an attach failed."""

    NOT_HELD = auto()
    """The executor does not hold the placement, or does not support attach."""
    LINK_LOST = auto()
    """The stream broke before the executor answered."""


Answer = executor_pb2.SequenceAttached | NotAttached
OnAnswer = Callable[[Answer], RequestStream | None]
Waiting = TypeVar("Waiting")


class LinkEvents(Protocol):
    """Callbacks of a link, implemented by a pool."""

    def on_request(self, link: ExecutorLink, stream: RequestStream, event: LinkEvent) -> None:
        """Receives an event of a placement that was sent over the link."""
        ...

    def on_report(self, link: ExecutorLink, report: executor_pb2.Report) -> None:
        """Receives the executor's newest report."""
        ...

    def on_usage(self, link: ExecutorLink, usage: executor_pb2.UsageReport) -> None:
        """Receives what accounts have used of the executor."""
        ...

    def on_unlinked(self, link: ExecutorLink, streams: Sequence[RequestStream]) -> None:
        """Called once the stream has broken. The current placements of these requests are void. No call follows for
        this connection."""
        ...


class LinkRegistry(Protocol):
    """Finds the pool that a link belongs to."""

    def on_linked(self, link: ExecutorLink) -> LinkEvents | str:
        """Registers an executor that has described itself. Returns the receiver of its events, or the reason why the
        executor cannot be used."""
        ...

    def on_breach(self, link: ExecutorLink) -> None:
        """Counts an executor that broke the protocol."""
        ...


class StepOutput:
    """New tokens of one link's streams. They are published together, once per step while the event loop keeps up.

    Publishing creates an event for every client, which is most of a router's work. After a round, the next one is
    therefore delayed for as long as the loop was busy since the last round began, with this link and all other work,
    and for `max_delay_s` at most. Tokens of the steps in that time are published together. A loop that keeps up is busy
    for a fraction of a step, so nothing is delayed. Nor is anything after a round of one stream: there are no events
    to save. First tokens and ends do not pass here.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        # Streams with tokens that have not been published.
        self._streams: dict[RequestStream, None] = {}
        # Time of the event loop at which the pause after the last round ends.
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, streams: Iterable[RequestStream]) -> None:
        """Adds the streams that got tokens in a step. A stream without an `on_output` callback is published at once:
        its reader is a task that waits for news."""
        for stream in streams:
            if stream.on_output is None:
                stream.publish_output()
            else:
                self._streams[stream] = None
        if not self._streams or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due_s:
            self.publish()
        else:
            self._timer = loop.call_at(self._due_s, self.publish)

    def publish(self) -> None:
        """Publishes the tokens of all added streams now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._streams:
            return
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        streams, self._streams = self._streams, {}
        for stream in streams:
            stream.publish_output()
        if len(streams) > 1:
            loop.call_soon(self._note_busy, began_s)

    def _note_busy(self, began_s: float) -> None:
        """Sets the end of the pause. Runs after the callbacks that were due when the round was published."""
        now_s = asyncio.get_running_loop().time()
        self._due_s = now_s + min(now_s - began_s, self._max_delay_s)


class ExecutorLink:
    """The link to the executor at one address."""

    def __init__(
        self,
        address: str,
        router_id: str,
        registry: LinkRegistry,
        channels: ExecutorChannels | None = None,
        max_output_delay_s: float = MAX_OUTPUT_DELAY_S,
    ) -> None:
        self.address = address
        self._channels = channels or ExecutorChannels()
        self.description = executor_pb2.DescribeResponse()
        self.report: executor_pb2.Report | None = None
        self.is_up = False
        # Why the executor is not used; empty if it is, or if it cannot be reached.
        self.problem = ""
        # The open stream, and whether the router has ended it.
        self._call: grpc.aio.StreamStreamCall[executor_pb2.ServeRequest, executor_pb2.ServeResponse] | None = None
        self._was_ended = False
        # The stub of the open channel; set while the link is up.
        self.stub: executor_pb2_grpc.ExecutorServiceStub | None = None
        self._router_id = router_id
        self._registry = registry
        # The pool's callbacks, set when the link comes up.
        self._events: LinkEvents | None = None
        self._outbox = executor_pb2.ServeRequest()
        self._wake = asyncio.Event()
        # Placements that were sent and have no answer yet, and accepted placements by slot. The attempt fences both. A
        # placement that this router lost and got back is offered or attached again before the first answer: each of
        # its offers and attaches has an answer, in this order.
        self._offered: dict[tuple[str, int], list[RequestStream]] = {}
        self._seated: dict[int, tuple[RequestStream, int]] = {}
        # Attaches without an answer.
        self._attaching: dict[tuple[str, int], list[OnAnswer]] = {}
        # Placements that were attached again because a token was missing.
        self._mended: set[tuple[str, int]] = set()
        self._output = StepOutput(max_output_delay_s)

    @property
    def executor_id(self) -> str:
        """The id that the executor gives itself; empty before its first description."""
        return self.description.executor_id

    def can_hold(self, submit: executor_pb2.Submit) -> bool:
        """Returns whether the executor's context holds a request. Another executor of the model may have a longer
        one."""
        return len(submit.prompt_ids) + submit.stopping.max_tokens <= self.description.context_length

    def refusal_of(self, submit: executor_pb2.Submit) -> RequestError | None:
        """Returns why the executor must not get a request: it would ignore a field of the request. None if it may."""
        if submit.adapter_hash and not self.description.num_adapter_slots:
            return RequestError(Reason.INTERNAL, f"executor {self.executor_id} serves no adapters")
        if submit.HasField("pooled") and not self.description.HasField("pooling"):
            return RequestError(Reason.INTERNAL, f"executor {self.executor_id} makes no embeddings")
        version = self.description.protocol_version
        if submit.exact_resume and version < EXACT_RESUME_VERSION:
            text = f"executor {self.executor_id} speaks protocol version {version}; exact_resume needs a later one"
            violation = FieldViolation("exact_resume", "is not known to this executor")
            return RequestError(Reason.NOT_IMPLEMENTED, text, (violation,))
        unread = _unread_field(submit, version)
        if unread is None:
            return None
        field, needed = unread
        text = f"executor {self.executor_id} speaks protocol version {version}; {field} needs {needed}"
        return RequestError(Reason.INTERNAL, text)

    def submit(self, stream: RequestStream, submit: executor_pb2.Submit) -> None:
        """Sends a placement. An acceptance is reported to the stream, a rejection to the pool."""
        self._offered.setdefault((submit.request_id, submit.attempt), []).append(stream)
        self._outbox.submits.append(submit)
        self._wake.set()

    def cancel(
        self,
        request_id: str,
        attempt: int,
        reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_CANCELLED,
    ) -> None:
        """Asks the executor to end a placement for this reason. The executor then reports the end as usual."""
        self._outbox.cancels.add(request_id=request_id, attempt=attempt, reason=types_pb2.FinishReason.Name(reason))
        self._wake.set()

    def attach(self, request_id: str, attempt: int, offset: int, on_answer: OnAnswer) -> None:
        """Asks for the output of a sequence from the token at `offset` on. The stream that `on_answer` returns gets the
        tokens. If it returns None, the sequence is cancelled and its tokens are dropped."""
        if self.description.protocol_version < ATTACH_VERSION:
            on_answer(NotAttached.NOT_HELD)
            return
        self._attaching.setdefault((request_id, attempt), []).append(on_answer)
        self._outbox.attaches.add(request_id=request_id, attempt=attempt, offset=offset)
        self._wake.set()

    async def run(self) -> None:
        """Keeps the link up until cancelled. Every attempt opens a new channel, with the certificates that are current
        then."""
        backoff_s = MIN_BACKOFF_S
        while True:
            max_backoff_s = MAX_BACKOFF_S
            async with self._channels.open(self.address, _RECONNECT_OPTIONS) as channel:
                try:
                    await self._serve(executor_pb2_grpc.ExecutorServiceStub(channel))
                except grpc.aio.AioRpcError as error:
                    log.debug("executor %s: %s %s", self.address, error.code().name, error.details())
                except FrameError as error:
                    max_backoff_s = MAX_BREACH_BACKOFF_S
                    self._log_breach(error)
                if self.is_up:
                    if max_backoff_s == MAX_BACKOFF_S:
                        backoff_s = MIN_BACKOFF_S
                    self._break()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, max_backoff_s)

    def end(self) -> None:
        """Ends the stream. The link then connects again, and the registry decides whether the executor is used."""
        if self._call is not None:
            self._was_ended = True
            self._call.cancel()

    def _log_breach(self, error: FrameError) -> None:
        self.problem = f"it breaks the protocol: {error}"
        name = f"{self.executor_id} at {self.address}" if self.executor_id else self.address
        if error.__cause__ is None:
            log.warning("executor %s breaks the protocol: %s", name, error)
        else:  # the traceback says where a check is missing
            log.error("executor %s breaks the protocol: %s", name, error, exc_info=error.__cause__)
        self._registry.on_breach(self)

    async def _serve(self, stub: executor_pb2_grpc.ExecutorServiceStub) -> None:
        self.stub = stub
        description = await stub.Describe(executor_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S)
        with _as_breach("description"):
            check_description(description)
        self.description = description
        if description.protocol_version < MIN_PROTOCOL_VERSION:
            spoken = f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
            self._note_problem(f"it speaks protocol version {description.protocol_version}, this router {spoken}")
            return
        self._outbox = executor_pb2.ServeRequest()
        self._outbox.hello.router_id = self._router_id
        self._outbox.hello.protocol_version = min(PROTOCOL_VERSION, description.protocol_version)
        self._outbox.hello.generation = description.generation
        self._outbox.hello.max_unacked_steps = MAX_UNACKED_STEPS
        self._wake.set()
        call = self._call = stub.Serve()
        self._was_ended = False
        writer = asyncio.create_task(self._write(call), name=f"write {self.address}")
        silence = LivenessTimer(MAX_SILENT_S)
        watch = asyncio.create_task(silence.watch(call.cancel), name=f"watch {self.address}")
        try:
            # The first response is the report that the executor sends when a router connects.
            async for response in call:
                silence.record_message()
                if not self.is_up and not self._come_up():
                    await self._refuse(call)
                    return
                self.take_in(response)
        except asyncio.CancelledError:
            # gRPC also raises it if the call is cancelled but not the task. Both can happen at once.
            if not (silence.is_over or self._was_ended) or task_is_cancelled():
                raise
            if silence.is_over:
                log.warning("executor %s at %s has been silent for %d s", self.executor_id, self.address, MAX_SILENT_S)
        finally:
            self._call = None
            watch.cancel()
            writer.cancel()
            call.cancel()

    def _come_up(self) -> bool:
        with _as_breach("description"):
            events = self._registry.on_linked(self)
        if isinstance(events, str):
            self._note_problem(events)
            return False
        self.come_up(events)
        log.info("executor %s at %s is linked", self.executor_id, self.address)
        return True

    def _note_problem(self, problem: str) -> None:
        """Logs why the executor is not used, unless the previous connection had the same problem."""
        if problem != self.problem:
            log.warning("executor %s at %s is not used: %s", self.executor_id, self.address, problem)
        self.problem = problem

    async def _refuse(
        self, call: grpc.aio.StreamStreamCall[executor_pb2.ServeRequest, executor_pb2.ServeResponse]
    ) -> None:
        """Sends the executor the reason why it is not used, for its log. It then ends the stream."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(REFUSAL_TIMEOUT_S):
                await call.write(executor_pb2.ServeRequest(refusal=self.problem))
                async for _ in call:
                    pass

    def come_up(self, events: LinkEvents) -> None:
        """Marks the link as up, so that the executor can be used."""
        self.problem = ""
        self._events = events
        self.is_up = True

    def _break(self) -> None:
        log.warning("executor %s at %s is lost", self.executor_id, self.address)
        self._output.publish()
        self.is_up = False
        self.report = None
        # Some requests may already run elsewhere: a hung executor keeps its link while the ledger places its requests
        # again.
        offered = [(stream, attempt) for (_, attempt), streams in self._offered.items() for stream in streams]
        streams = [stream for stream, attempt in offered if stream.life.is_current(attempt)]
        streams += [stream for stream, attempt in self._seated.values() if stream.life.is_current(attempt)]
        self._offered.clear()
        self._seated.clear()
        self._mended.clear()
        attaching, self._attaching = self._attaching, {}
        events, self._events = self._events, None
        if events is not None:
            events.on_unlinked(self, streams)
        for on_answer in itertools.chain.from_iterable(attaching.values()):
            on_answer(NotAttached.LINK_LOST)

    async def _write(
        self, call: grpc.aio.StreamStreamCall[executor_pb2.ServeRequest, executor_pb2.ServeResponse]
    ) -> None:
        """Sends the collected messages as one request. While a write is in progress, further messages collect."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            request, self._outbox = self._outbox, executor_pb2.ServeRequest()
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # `_serve` sees the same break and reports it

    def take_in(self, response: executor_pb2.ServeResponse) -> None:
        """Checks a response of the executor and applies it. Raises `FrameError` if that fails, whatever the response
        contains."""
        with _as_breach("response"):
            check_frame(response, self.description, self._offered, self._seated.keys(), self._attaching)
            self.receive(response)

    def receive(self, response: executor_pb2.ServeResponse) -> None:
        """Applies a checked response. The report is applied first, because it says whether the executor drains,
        and the handling of ends depends on that."""
        if response.HasField("report"):
            self.report = response.report
            if self._events is not None:
                self._events.on_report(self, response.report)
        if response.HasField("usage") and self._events is not None:
            self._events.on_usage(self, response.usage)
        for accepted in response.accepted:
            self._accept(accepted)
        for rejected in response.rejected:
            self._reject(rejected)
        for attached in response.attached:
            self._attach(attached)
        if response.HasField("step"):
            self._receive_step(response.step)

    def _report_event(self, stream: RequestStream, event: LinkEvent) -> None:
        if self._events is not None:
            self._events.on_request(self, stream, event)

    def _current(self, slot: int) -> RequestStream | None:
        """Returns the stream of the request in a slot; None if the slot's placement is no longer current."""
        stream, attempt = self._seated[slot]
        return stream if stream.life.current_attempt == attempt else None

    def _accept(self, accepted: executor_pb2.SequenceAccepted) -> None:
        stream = _taken(self._offered, (accepted.request_id, accepted.attempt), 0)
        if stream is None:
            return
        self._seated[accepted.slots[0]] = (stream, accepted.attempt)
        if self._current(accepted.slots[0]):
            stream.accept()

    def _reject(self, rejected: executor_pb2.SequenceRejected) -> None:
        key = (rejected.request_id, rejected.attempt)
        if rejected.reason == executor_pb2.REJECT_REASON_NOT_HELD or key not in self._offered:
            on_answer = _taken(self._attaching, key, 0)
            if on_answer is not None:
                on_answer(NotAttached.NOT_HELD)
            return
        # An executor that has a placement refuses a later offer of it as stale, before it answers the first.
        is_stale = rejected.reason == executor_pb2.REJECT_REASON_STALE_ATTEMPT
        stream = _taken(self._offered, key, -1 if is_stale else 0)
        if stream is not None:
            self._report_event(stream, Rejected(rejected.attempt, _refusal(rejected)))

    def _attach(self, attached: executor_pb2.SequenceAttached) -> None:
        key = (attached.request_id, attached.attempt)
        on_answer = self._attaching[key][0] if key in self._attaching else None
        # Raises `FrameError` if the answer cannot be true. The caller then still waits, and gets LINK_LOST.
        stream = on_answer(attached) if on_answer is not None else None
        _taken(self._attaching, key, 0)
        if stream is None:
            # Frames name its slot until the cancel takes effect.
            stream = unread_stream(attached.request_id)
            self.cancel(attached.request_id, attached.attempt)
        for slot, (one, _) in self._seated.items():
            if one is stream:
                self._seated[slot] = (one, READ_ELSEWHERE)
        self._seated[attached.slots[0]] = (stream, attached.attempt)

    def _receive_step(self, step: executor_pb2.StepFrame) -> None:
        for started in step.started:
            if stream := self._current(started.slot):
                stream.board(started.cached_tokens)
        for scored in step.prompt_logprobs:
            if stream := self._current(scored.slot):
                stream.prompt_logprobs(scored.position, scored.values)
        has_output: dict[RequestStream, None] = {}
        for slot, offset, token_ids in _runs(step):
            stream = self._current(slot)
            if stream is None:
                continue
            has_output[stream] = None
            if not stream.tokens(offset, token_ids):
                self._mend(stream, stream.life.current_attempt)
            elif stream.life.is_suspect:
                self._report_event(stream, FirstToken(stream.life.current_attempt))
        for one in step.logprobs:
            if stream := self._current(one.slot):
                stream.logprobs(one.offset, one.values)
        for slot in step.paused:
            if stream := self._current(slot):
                stream.preempt()
                stream.record.preempted()
        for slot in step.detached:
            stream, attempt = self._seated.pop(slot)
            self._mended.discard((stream.request_id, attempt))
            self._report_event(stream, Detached(attempt))
        for finished in step.finished:
            stream, attempt = self._seated[finished.slot]
            # While it is seated, so that an invalid result ends the link for it too.
            if stream.life.is_current(attempt) and (
                finished.pooled or finished.reason == types_pb2.FINISH_REASON_LENGTH
            ):
                stream.pool(tuple(finished.pooled))
            del self._seated[finished.slot]
            self._finish(stream, attempt, finished)
        # After everything else in the frame that concerns these streams.
        self._output.add(has_output)
        if step.frame % ACK_EVERY_FRAMES == 0:
            self._outbox.ack.frame = step.frame
            self._wake.set()

    def _mend(self, stream: RequestStream, attempt: int) -> None:
        """Asks once for a missing token, by an attach. Gives the placement up if a token is missing again."""
        key = (stream.request_id, attempt)
        if key in self._attaching:
            return
        if key in self._mended:
            self._give_up(stream, attempt)
            return
        log.warning("%s: token %d is missing; asking for it", stream.request_id, len(stream.output_ids))
        self._mended.add(key)

        def answered(answer: Answer) -> RequestStream | None:
            if isinstance(answer, executor_pb2.SequenceAttached):
                return stream
            if answer is NotAttached.NOT_HELD and stream.life.is_current(attempt):
                self._give_up(stream, attempt)
            return None

        self.attach(stream.request_id, attempt, len(stream.output_ids), answered)

    def _give_up(self, stream: RequestStream, attempt: int) -> None:
        self.cancel(stream.request_id, attempt)
        self._report_event(stream, Withdrawn(attempt))

    def _finish(self, stream: RequestStream, attempt: int, finished: executor_pb2.SequenceFinished) -> None:
        key = (stream.request_id, attempt)
        if not stream.life.is_current(attempt):
            self._mended.discard(key)
            return
        if not stream.has_ended:
            if finished.reason == types_pb2.FINISH_REASON_LENGTH and stream.is_short:
                self._mend(stream, attempt)
                return
            if key in self._attaching:
                return  # a token is missing: the executor sends it again, followed by the end
        self._mended.discard(key)
        if finished.HasField("used"):
            stream.add_used(finished.used)
        stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
        is_draining = self.report is not None and self.report.draining
        ended = SequenceEnded(
            attempt, finished.reason, stop_token_id, finished.error, is_draining, finished.constraint_unfinished
        )
        self._report_event(stream, ended)


@contextmanager
def _as_breach(what: str) -> Iterator[None]:
    """Raises any error as `FrameError`. `what` names the message that is handled."""
    try:
        yield
    except FrameError:
        raise
    except Exception as error:
        raise FrameError(f"its {what} cannot be handled: {type(error).__name__}: {error}") from error


def _taken(waiting: dict[tuple[str, int], list[Waiting]], key: tuple[str, int], index: int) -> Waiting | None:
    """Removes and returns one of those that wait for an answer about a placement; None if none does."""
    if key not in waiting:
        return None
    taken = waiting[key].pop(index)
    if not waiting[key]:
        del waiting[key]
    return taken


def _runs(step: executor_pb2.StepFrame) -> Iterator[tuple[int, int, list[int]]]:
    """Yields the tokens of a frame as runs: a slot, the offset of the first token, and ids without a gap. A frame of
    several steps names a slot once for each token."""
    runs: dict[int, tuple[int, list[int]]] = {}
    for slot, offset, token_id in zip(step.slots, step.offsets, step.token_ids, strict=True):
        run = runs.get(slot)
        if run is not None and offset == run[0] + len(run[1]):
            run[1].append(token_id)
            continue
        if run is not None:
            yield slot, *run
        runs[slot] = (offset, [token_id])
    for slot, run in runs.items():
        yield slot, *run


def _unread_field(submit: executor_pb2.Submit, version: int) -> tuple[str, int] | None:
    """Returns a field of the request that executors of a version ignore, and the first version that reads it."""
    for field in ("constraint", "num_prompt_logprobs"):
        if version < LOGITS_VERSION and submit.HasField(field):
            return field, LOGITS_VERSION
    for parameter in LATER_PARAMETERS:
        value = getattr(submit.sampling, parameter.name)
        if version < parameter.since and value and value != parameter.neutral:
            return parameter.field, parameter.since
    return None


def _refusal(rejected: executor_pb2.SequenceRejected) -> RequestError | None:
    """Returns why no executor would accept the request; None if another executor, or this one later, may accept it.

    What is not supported is told the client with the name of the field; a value out of range is a bug of the router.
    """
    text = f"the executor refused the request: {rejected.detail}"
    match rejected.reason:
        case executor_pb2.REJECT_REASON_UNSUPPORTED:
            field, _, description = rejected.detail.partition(": ")
            log.info("%s: %s", rejected.request_id, text)
            return RequestError(Reason.NOT_IMPLEMENTED, text, (FieldViolation(field, description),))
        case executor_pb2.REJECT_REASON_INVALID:
            log.error("%s: %s", rejected.request_id, text)
            return RequestError(Reason.INTERNAL, text)
    return None
