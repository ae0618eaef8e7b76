"""The router's `Serve` stream to one executor: connect, describe, serve, and again when it breaks.

Owns the channel, the slots of the stream and the credits; what a frame means for a request is told to the `Observer`.
A link that breaks tells the observer once; every placement that went over it is void then: the executor is dead, or
leaves it to whichever router comes for it. Where a token is missing the placement is attached to anew, once, from that
token on; where that is in vain, it is given up and goes on elsewhere. What cannot be true breaks the link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

import grpc
import grpc.aio

from common.cancellation import task_is_cancelled
from common.errors import Reason, RequestError
from common.protocol import ATTACH_VERSION, MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from router.executors.channel import ExecutorChannels
from router.executors.frame_checks import check_description, check_frame
from router.executors.silence import LivenessTimer
from router.request.executor_context import FrameError
from router.stream.request_stream import End, RequestStream, unread_stream

log = logging.getLogger(__name__)

# Of a seat whose sequence is read by another slot.
NO_ATTEMPT = 0
MAX_UNACKED_STEPS = 64
ACK_EVERY_FRAMES = 8
DESCRIBE_TIMEOUT_S = 5.0
# An executor reports at least once a second on every stream, and its lease in the ledger lapses after 5 s.
MAX_SILENT_S = 4
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0

# gRPC's own backoff grows to minutes while an executor loads its model; ours is enough.
_RECONNECT_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", int(MIN_BACKOFF_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(MAX_BACKOFF_S * 1000)),
]


class NotAttached(Enum):
    """Why there is nothing to attach to."""

    NOT_HELD = auto()
    """The executor does not know the placement, or not how to attach."""
    LINK_LOST = auto()
    """The stream broke before it answered."""


Answer = executor_pb2.SequenceAttached | NotAttached
OnAnswer = Callable[[Answer], RequestStream | None]


class Observer(Protocol):
    """Whom a link tells what happens."""

    def on_linked(self, link: ExecutorLink) -> str | None:
        """The executor has described itself; returns why it cannot be used, or None."""
        ...

    def on_unlinked(self, link: ExecutorLink, streams: list[RequestStream]) -> None:
        """The stream broke; the placements of these requests are void."""
        ...

    def on_rejected(self, link: ExecutorLink, stream: RequestStream, rejected: executor_pb2.SequenceRejected) -> None:
        """The executor did not take a placement."""
        ...

    def on_preempted(self, link: ExecutorLink, stream: RequestStream, attempt: int) -> None:
        """A sequence gave up its place on the executor; its request is to go on elsewhere."""
        ...

    def on_stood_still(self, link: ExecutorLink, stream: RequestStream, attempt: int) -> None:
        """The executor ended a sequence because its engine stood still under it."""
        ...

    def on_withdrawn(self, link: ExecutorLink, stream: RequestStream, attempt: int) -> None:
        """A sequence was cancelled though neither its client nor anybody else asked for it; its placement is void."""
        ...

    def on_detached(self, link: ExecutorLink, stream: RequestStream) -> None:
        """Another router reads the sequence from now on."""
        ...

    def on_absolved(self, link: ExecutorLink, stream: RequestStream, attempt: int) -> None:
        """A suspect has brought a token."""
        ...

    def on_finished(self, link: ExecutorLink, stream: RequestStream, attempt: int) -> None:
        """A sequence ended and its blocks are free."""
        ...

    def on_report(self, link: ExecutorLink, report: executor_pb2.Report) -> None:
        """The executor says how it stands."""
        ...


class ExecutorLink:
    """The link to the executor at one address."""

    def __init__(
        self, address: str, router_id: str, observer: Observer, channels: ExecutorChannels | None = None
    ) -> None:
        self.address = address
        self._channels = channels or ExecutorChannels()
        self.description = executor_pb2.DescribeResponse()
        self.report: executor_pb2.Report | None = None
        self.is_up = False
        # Of the channel that is open now, which it is while the link is up.
        self.stub: executor_pb2_grpc.ExecutorServiceStub | None = None
        self._router_id = router_id
        self._observer = observer
        self._outbox = executor_pb2.ServeRequest()
        self._wake = asyncio.Event()
        # Sent, not answered yet; and accepted, by slot. The attempt fences both.
        self._offered: dict[tuple[str, int], RequestStream] = {}
        self._seated: dict[int, tuple[RequestStream, int]] = {}
        # Asked for, not answered yet.
        self._attaching: dict[tuple[str, int], OnAnswer] = {}
        # Asked for once more because a token was missing.
        self._mended: set[tuple[str, int]] = set()

    @property
    def executor_id(self) -> str:
        """The executor's own name; empty before the first description."""
        return self.description.executor_id

    def submit(self, stream: RequestStream, submit: executor_pb2.Submit) -> None:
        """Sends a placement. The answer comes to the observer or the stream."""
        self._offered[submit.request_id, submit.attempt] = stream
        self._outbox.submits.append(submit)
        self._wake.set()

    def cancel(
        self,
        request_id: str,
        attempt: int,
        reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_CANCELLED,
    ) -> None:
        """Asks the executor to end a placement for this reason; its end comes as any other."""
        self._outbox.cancels.add(request_id=request_id, attempt=attempt, reason=types_pb2.FinishReason.Name(reason))
        self._wake.set()

    def attach(self, request_id: str, attempt: int, offset: int, on_answer: OnAnswer) -> None:
        """Asks for a sequence that this link does not read, from a token on. What `on_answer` returns gets its tokens;
        where it returns None they are passed over."""
        if self.description.protocol_version < ATTACH_VERSION:
            on_answer(NotAttached.NOT_HELD)
            return
        self._attaching[request_id, attempt] = on_answer
        self._outbox.attaches.add(request_id=request_id, attempt=attempt, offset=offset)
        self._wake.set()

    async def run(self) -> None:
        """Keeps the link up until cancelled. Every try has a channel of its own, with the certificates of then."""
        backoff_s = MIN_BACKOFF_S
        while True:
            async with self._channels.open(self.address, _RECONNECT_OPTIONS) as channel:
                try:
                    await self._serve(executor_pb2_grpc.ExecutorServiceStub(channel))
                except grpc.aio.AioRpcError as error:
                    log.debug("executor %s: %s %s", self.address, error.code().name, error.details())
                except FrameError as error:
                    log.warning("executor %s breaks the protocol: %s", self.address, error)
                if self.is_up:
                    backoff_s = MIN_BACKOFF_S
                    self._break()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _serve(self, stub: executor_pb2_grpc.ExecutorServiceStub) -> None:
        self.stub = stub
        description = await stub.Describe(executor_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S)
        check_description(description)
        self.description = description
        if description.protocol_version < MIN_PROTOCOL_VERSION:
            spoken = f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
            log.warning(
                "executor %s at %s is not used: it speaks protocol version %d, this router %s",
                self.executor_id,
                self.address,
                description.protocol_version,
                spoken,
            )
            return
        self._outbox = executor_pb2.ServeRequest()
        self._outbox.hello.router_id = self._router_id
        self._outbox.hello.protocol_version = min(PROTOCOL_VERSION, description.protocol_version)
        self._outbox.hello.generation = description.generation
        self._outbox.hello.max_unacked_steps = MAX_UNACKED_STEPS
        self._wake.set()
        call = stub.Serve()
        writer = asyncio.create_task(self._write(call), name=f"write {self.address}")
        silence = LivenessTimer(MAX_SILENT_S)
        watch = asyncio.create_task(silence.watch(call.cancel), name=f"watch {self.address}")
        try:
            # The first response is the report that the executor sends when a router joins.
            async for response in call:
                silence.hear()
                if not self.is_up and not self._come_up():
                    return
                check_frame(response, description, self._offered.keys(), self._seated.keys(), self._attaching.keys())
                self.receive(response)
        except asyncio.CancelledError:
            # gRPC raises it also where the call is cancelled, not the task; or both are.
            if not silence.is_over or task_is_cancelled():
                raise
            log.warning("executor %s at %s has been silent for %d s", self.executor_id, self.address, MAX_SILENT_S)
        finally:
            watch.cancel()
            writer.cancel()
            call.cancel()

    def _come_up(self) -> bool:
        refusal = self._observer.on_linked(self)
        if refusal is not None:
            log.warning("executor %s at %s is not used: %s", self.executor_id, self.address, refusal)
            return False
        self.is_up = True
        log.info("executor %s at %s is linked", self.executor_id, self.address)
        return True

    def _break(self) -> None:
        log.warning("executor %s at %s is lost", self.executor_id, self.address)
        self.is_up = False
        self.report = None
        # Some may run elsewhere by now: a hung executor keeps its link while the ledger places its requests anew.
        streams = [stream for (_, attempt), stream in self._offered.items() if _is_current(stream, attempt)]
        streams += [stream for stream, attempt in self._seated.values() if _is_current(stream, attempt)]
        self._offered.clear()
        self._seated.clear()
        self._mended.clear()
        attaching, self._attaching = self._attaching, {}
        self._observer.on_unlinked(self, streams)
        for on_answer in attaching.values():
            on_answer(NotAttached.LINK_LOST)

    async def _write(
        self, call: grpc.aio.StreamStreamCall[executor_pb2.ServeRequest, executor_pb2.ServeResponse]
    ) -> None:
        """Sends what has collected; while one write is under way more collects."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            request, self._outbox = self._outbox, executor_pb2.ServeRequest()
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader sees the same break and tells it

    def receive(self, response: executor_pb2.ServeResponse) -> None:
        """Takes in what the executor sends. Its report comes first: whether it drains decides what ends mean."""
        if response.HasField("report"):
            self.report = response.report
            self._observer.on_report(self, response.report)
        for accepted in response.accepted:
            self._accept(accepted)
        for rejected in response.rejected:
            self._reject(rejected)
        for attached in response.attached:
            self._attach(attached)
        if response.HasField("step"):
            self._receive_step(response.step)

    def _accept(self, accepted: executor_pb2.SequenceAccepted) -> None:
        stream = self._offered.pop((accepted.request_id, accepted.attempt), None)
        if stream is None:
            return
        self._seated[accepted.slots[0]] = (stream, accepted.attempt)
        if _is_current(stream, accepted.attempt):
            stream.accept()

    def _reject(self, rejected: executor_pb2.SequenceRejected) -> None:
        key = (rejected.request_id, rejected.attempt)
        on_answer = self._attaching.pop(key, None)
        stream = self._offered.pop(key, None)
        if on_answer is not None:
            on_answer(NotAttached.NOT_HELD)
        elif stream is not None:
            self._observer.on_rejected(self, stream, rejected)

    def _attach(self, attached: executor_pb2.SequenceAttached) -> None:
        on_answer = self._attaching.pop((attached.request_id, attached.attempt), None)
        stream = on_answer(attached) if on_answer is not None else None
        if stream is None:
            # Frames name its slot until it is cancelled.
            stream = unread_stream(attached.request_id)
            self.cancel(attached.request_id, attached.attempt)
        for slot, (one, _) in self._seated.items():
            if one is stream:
                self._seated[slot] = (one, NO_ATTEMPT)
        self._seated[attached.slots[0]] = (stream, attached.attempt)

    def _receive_step(self, step: executor_pb2.StepFrame) -> None:
        for started in step.started:
            stream, attempt = self._seated[started.slot]
            if _is_current(stream, attempt):
                stream.start(started.cached_tokens)
        for slot, offset, token_id in zip(step.slots, step.offsets, step.token_ids, strict=True):
            stream, attempt = self._seated[slot]
            if not _is_current(stream, attempt):
                continue
            if not stream.token(offset, token_id):
                self._mend(stream, attempt)
            elif stream.is_suspect:
                stream.is_suspect = False
                self._observer.on_absolved(self, stream, attempt)
        for one in step.logprobs:
            stream, attempt = self._seated[one.slot]
            if _is_current(stream, attempt):
                stream.logprobs(one.offset, one.values)
        for slot in step.paused:
            stream, attempt = self._seated[slot]
            if _is_current(stream, attempt):
                stream.pause()
                stream.record.preempted()
        for slot in step.detached:
            stream, attempt = self._seated.pop(slot)
            self._mended.discard((stream.request_id, attempt))
            if _is_current(stream, attempt):
                self._observer.on_detached(self, stream)
        for finished in step.finished:
            stream, attempt = self._seated.pop(finished.slot)
            self._finish(stream, attempt, finished)
        if step.frame % ACK_EVERY_FRAMES == 0:
            self._outbox.ack.frame = step.frame
            self._wake.set()

    def _mend(self, stream: RequestStream, attempt: int) -> None:
        """A token is missing: asks for it once, and gives the placement up where that was in vain."""
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
            if answer is NotAttached.NOT_HELD and _is_current(stream, attempt):
                self._give_up(stream, attempt)
            return None

        self.attach(stream.request_id, attempt, len(stream.output_ids), answered)

    def _give_up(self, stream: RequestStream, attempt: int) -> None:
        self.cancel(stream.request_id, attempt)
        self._observer.on_withdrawn(self, stream, attempt)

    def _finish(self, stream: RequestStream, attempt: int, finished: executor_pb2.SequenceFinished) -> None:
        if _is_current(stream, attempt) and not stream.has_ended:
            if finished.reason == types_pb2.FINISH_REASON_LENGTH and stream.is_short:
                self._mend(stream, attempt)
                return
            if (stream.request_id, attempt) in self._attaching:
                return  # a token is missing: it comes once more, and the end behind it
        self._mended.discard((stream.request_id, attempt))
        if _is_current(stream, attempt):
            if finished.reason == types_pb2.FINISH_REASON_PREEMPTED:
                # With an error it says that the engine stood still.
                tell = self._observer.on_stood_still if finished.error else self._observer.on_preempted
                tell(self, stream, attempt)
                return
            if finished.reason == types_pb2.FINISH_REASON_CANCELLED and (stream.is_wanted or stream.is_uncancelled):
                self._observer.on_withdrawn(self, stream, attempt)
                return
            if finished.error:
                stream.fail(RequestError(Reason.INTERNAL, finished.error))
            else:
                stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
                stream.finish(End(finished.reason, stop_token_id))
        if not stream.is_let_go:
            self._observer.on_finished(self, stream, attempt)


def _is_current(stream: RequestStream, attempt: int) -> bool:
    return stream.placement is not None and stream.placement.attempt == attempt
