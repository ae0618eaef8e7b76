"""`ExecutorService`: routers' streams on one side, the engine on the other.

Owns the sessions, and whether new work is accepted: not while it drains, nor while the engine stalls (`watchdog`).
`PlacementTable` owns the sequences and their readers. Engine output arrives from the engine's thread as one callback
per turn of the loop. A stream that breaks leaves its sequences behind for another router to attach to.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio

from common.errors import FieldViolation, Reason, RequestError, invalid
from common.protocol import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from common.telemetry.tracing import NO_TRACING, Tracing
from executor.engine.engine import Engine
from executor.engine.output import EngineOutput, EngineStatus
from executor.scheduler.sequence import FinishReason
from executor.serving.placements import PlacementTable, RetentionPolicy
from executor.serving.report import RecentRates, Reporter, report_of
from executor.serving.router_session import FINISH_REASON_PROTO, Session
from executor.serving.step_feed import StepWatch
from executor.serving.submission import SubmissionError, SubmissionLimits, sequence_from_submit
from executor.serving.tracing import trace_submit
from inflight.v1 import executor_pb2, executor_pb2_grpc

log = logging.getLogger(__name__)

DEFAULT_MAX_UNACKED_STEPS = 64
MAX_ROUTER_ID_CHARACTERS = 512
# A router says hello as soon as it has opened the stream.
HELLO_TIMEOUT_S = 10.0
# Of a router's frame, dealt with before the event loop serves other streams.
ENTRIES_PER_TURN = 100
CANCEL_REASONS = {wire: reason for reason, wire in FINISH_REASON_PROTO.items()}

T = TypeVar("T")
Context = grpc.aio.ServicerContext[executor_pb2.ServeRequest, executor_pb2.ServeResponse]


@dataclass(frozen=True, slots=True)
class Identity:
    """What `Describe` says."""

    description: executor_pb2.DescribeResponse
    limits: SubmissionLimits


class ExecutorService(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves routers. Build it on the event loop's thread; give `on_output` to the engine as its `publish`."""

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        keeping: RetentionPolicy | None = None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._identity = identity
        self._hello_timeout_s = hello_timeout_s
        self._engine = engine
        trace = functools.partial(trace_submit, tracing)
        self._holdings = PlacementTable(keeping or RetentionPolicy(), engine.cancel, time.monotonic, trace=trace)
        self._sessions: set[Session] = set()
        self._reporter = Reporter(self._send_report)
        self._rates = RecentRates()
        self.steps = StepWatch(identity.description, engine.list_sequences, lambda: self.has_work)
        # The newest that the engine said of itself.
        self.status: EngineStatus | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._is_closing = False
        self._stands_still = False
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._all_left = asyncio.Event()
        self._all_left.set()

    @property
    def num_held(self) -> int:
        """Sequences that wait or run here."""
        return self._holdings.num_held

    @property
    def has_work(self) -> bool:
        """Whether the engine has something to do."""
        return self._holdings.has_work

    @property
    def num_orphans(self) -> int:
        """Of the sequences here, those whose router is gone."""
        return self._holdings.num_orphans

    @property
    def description(self) -> executor_pb2.DescribeResponse:
        """What `Describe` says."""
        return self._identity.description

    @property
    def progress(self) -> tuple[int, int]:
        """Changes with every step, and whenever the engine has nothing left to do."""
        return self._engine.num_steps, self._holdings.num_times_idle

    @property
    def takes_work(self) -> bool:
        """Whether a submit has a chance."""
        return not (self._is_draining or self._stands_still)

    async def run(self) -> None:
        """Sends reports when they are due, until cancelled."""
        await self._reporter.run()

    async def Describe(
        self, request: executor_pb2.DescribeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> executor_pb2.DescribeResponse:
        """What this executor serves."""
        return self._identity.description

    async def Drain(
        self, request: executor_pb2.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> executor_pb2.DrainResponse:
        """Stops taking new work and waits for what is held; what is left then is handed back. Without a time to wait
        it answers at once and lets the running go on."""
        await self.drain(float(request.timeout_s))
        if request.timeout_s:
            self.hand_back()
        return executor_pb2.DrainResponse(num_held=self.num_held)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new work, hands back who has had no seat yet, and waits at most `timeout_s` for the others."""
        self._is_draining = True
        self._engine.drain()
        self._reporter.send_first()
        self._holdings.hand_back_unstarted()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._all_gone.wait()

    def hand_back(self, error: str = "") -> None:
        """Ends everything for its router, to go on elsewhere."""
        num_held = self._holdings.hand_back(error)
        if num_held:
            log.warning("%d sequences are handed back to their routers", num_held)
        self._all_gone.set()

    def stand_still(self, stands_still: bool) -> None:
        """The engine has work and makes no step, or does again: its sequences go on elsewhere, and nobody is taken
        in."""
        self._stands_still = stands_still
        self._reporter.send_first()
        if stands_still:
            self.hand_back("the engine made no step")

    async def close(self, timeout_s: float) -> None:
        """Ends every router's stream behind what is still to be sent on it, and waits at most so long for that."""
        self._is_closing = True
        self.steps.close()
        for session in self._sessions:
            session.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._all_left.wait()

    async def Serve(self, request_iterator: AsyncIterator[executor_pb2.ServeRequest], context: Context) -> None:
        """One router's stream: reads work in a task of its own, writes frames here."""
        hello = await self._read_hello(request_iterator)
        session = Session(
            hello.router_id,
            self._identity.description.generation,
            hello.max_unacked_steps or DEFAULT_MAX_UNACKED_STEPS,
            hello.protocol_version,
        )
        self._sessions.add(session)
        self._all_left.clear()
        log.info("router %s joined", session.router_id)
        self._reporter.send_now()
        reader = asyncio.create_task(self._read(request_iterator, session), name=f"read {session.router_id}")
        try:
            await self._write(session, reader, context)
        finally:
            reader.cancel()
            self._leave(session)

    async def WatchSteps(
        self,
        request: executor_pb2.WatchStepsRequest,
        context: grpc.aio.ServicerContext[executor_pb2.WatchStepsRequest, executor_pb2.WatchStepsResponse],
    ) -> None:
        """Tells what the steps do, for as long as the caller looks on."""
        async with aclosing(self.steps.watch(request)) as responses:
            async for response in responses:
                await context.write(response)

    async def _read_hello(self, requests: AsyncIterator[executor_pb2.ServeRequest]) -> executor_pb2.Hello:
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                first = await anext(requests, None)
        except TimeoutError as error:
            raise invalid(FieldViolation("hello", f"has not come within {self._hello_timeout_s:g} s")) from error
        if first is None or not first.HasField("hello"):
            raise invalid(FieldViolation("hello", "must be the first of a stream"))
        hello = first.hello
        if len(hello.router_id) > MAX_ROUTER_ID_CHARACTERS or not hello.router_id.isprintable():
            text = f"must be at most {MAX_ROUTER_ID_CHARACTERS} printable characters"
            raise invalid(FieldViolation("hello.router_id", text))
        if not MIN_PROTOCOL_VERSION <= hello.protocol_version <= PROTOCOL_VERSION:
            allowed = f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
            raise invalid(FieldViolation("hello.protocol_version", f"must be {allowed}"))
        if hello.generation != self._identity.description.generation:
            raise RequestError(Reason.STALE_GENERATION, "hello.generation is not this executor's; describe it again")
        if self._is_closing:
            raise RequestError(Reason.EXECUTOR_LOST, "this executor has drained and stops")
        return hello

    async def _read(self, requests: AsyncIterator[executor_pb2.ServeRequest], session: Session) -> None:
        async for request in requests:
            if request.HasField("hello"):
                raise invalid(FieldViolation("hello", "must be only the first of a stream"))
            if request.HasField("ack"):
                session.acknowledge(request.ack.frame)
            async for submit in _in_turns(request.submits):
                await session.has_room()
                self._submit(submit, session)
            async for attach in _in_turns(request.attaches):
                await session.has_room()
                self._attach(attach, session)
            async for cancel in _in_turns(request.cancels):
                end_reason = CANCEL_REASONS.get(cancel.reason, FinishReason.CANCELLED)
                self._engine.cancel(cancel.request_id, cancel.attempt, end_reason)

    async def _write(self, session: Session, reader: asyncio.Task[None], context: Context) -> None:
        """Writes until one side has closed the stream or the RPC is cancelled."""
        while True:
            pending = asyncio.ensure_future(session.next_response())
            try:
                await asyncio.wait((pending, reader), return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    reader.result()
                    return
                response = pending.result()
                if response is None:
                    return
                await context.write(response)
            finally:
                pending.cancel()

    def _submit(self, submit: executor_pb2.Submit, session: Session) -> None:
        if not self.takes_work:
            draining = executor_pb2.REJECT_REASON_DRAINING
            session.reject(submit.request_id, submit.attempt, draining, "takes no new work")
            return
        try:
            sequence = sequence_from_submit(submit, self._identity.limits)
        except SubmissionError as error:
            session.reject(submit.request_id, submit.attempt, error.reason, str(error))
            return
        if not self._holdings.offer(sequence, submit, session):
            stale = executor_pb2.REJECT_REASON_STALE_ATTEMPT
            session.reject(submit.request_id, submit.attempt, stale, "this attempt or a newer one is known")
            return
        self._all_gone.clear()
        self._engine.submit(sequence, submit.deadline_ms if submit.HasField("deadline_ms") else None)

    def _attach(self, attach: executor_pb2.Attach, session: Session) -> None:
        if session.knows_attach:
            self._holdings.attach(attach, session)
            return
        unsupported = executor_pb2.REJECT_REASON_UNSUPPORTED
        session.reject(attach.request_id, attach.attempt, unsupported, "attach: hello.protocol_version is too old")

    def _leave(self, session: Session) -> None:
        self._sessions.discard(session)
        num_left = self._holdings.leave(session)
        self._tend()
        if not self._sessions:
            self._all_left.set()
        log.info("router %s disconnected; %d of its sequences have no router", session.router_id, num_left)

    def _tend(self) -> None:
        """Does what is due, and comes again when more will be."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._holdings.tend()
        if due_s is not None:
            delay_s = max(0.0, due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tend)

    def on_output(self, output: EngineOutput) -> None:
        """Takes in one turn of the engine. On the event loop's thread."""
        self._holdings.publish(output)
        for session in self._sessions:
            session.end_step(output.step)
        if output.finished and self._timer is None:
            self._tend()
        self.steps.take(output)
        if output.status is not None:
            self.status = output.status
            self._rates.note(output.status.num_steps, output.status.num_output_tokens)
            self._reporter.update(output.status)
        if self.num_held == 0:
            self._all_gone.set()

    def _send_report(self, seq: int, status: EngineStatus) -> None:
        report = report_of(seq, status, self._holdings.reported(status.held), self._rates.per_second())
        report.draining = report.draining or not self.takes_work
        for session in self._sessions:
            session.report(report)


async def _in_turns(entries: Iterable[T]) -> AsyncIterator[T]:
    """The entries of a frame. Other streams have their turn now and then, however many there are."""
    for number, entry in enumerate(entries, start=1):
        if number % ENTRIES_PER_TURN == 0:
            await asyncio.sleep(0)
        yield entry
