"""`ExecutorService`: routers' streams on one side, the engine on the other.

Owns the sessions and which session a sequence belongs to. Engine output arrives from the engine's thread as one
callback per turn of the loop. A stream that breaks cancels its sequences: nobody else can read their tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
from inflight.v1 import executor_pb2, executor_pb2_grpc

from common.errors import FieldViolation, Reason, RequestError, invalid
from executor.engine import Engine
from executor.engine_output import EngineOutput, EngineStatus
from executor.report import report_of
from executor.reporter import Reporter
from executor.sequence import FinishReason, Sequence
from executor.session import FINISH_REASON_PROTO, REJECT_REASON_PROTO, Session
from executor.submission import SubmissionError, SubmissionLimits, sequence_from_submit

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
DEFAULT_MAX_UNACKED_STEPS = 64
MAX_ROUTER_ID_CHARACTERS = 512
CANCEL_REASONS = {wire: reason for reason, wire in FINISH_REASON_PROTO.items()}

Context = grpc.aio.ServicerContext[executor_pb2.ServeRequest, executor_pb2.ServeResponse]


@dataclass(frozen=True, slots=True)
class Identity:
    """What `Describe` says."""

    description: executor_pb2.DescribeResponse
    limits: SubmissionLimits


class ExecutorService(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves routers. Build it on the event loop's thread; give `on_output` to the engine as its `publish`."""

    def __init__(self, identity: Identity, engine: Engine) -> None:
        self._identity = identity
        self._engine = engine
        self._sessions: set[Session] = set()
        self._session_of: dict[Sequence, Session] = {}
        # Submitted to the engine, not answered yet.
        self._offered: dict[Sequence, Session] = {}
        self._reporter = Reporter(self._send_report)
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    @property
    def num_held(self) -> int:
        """Sequences that wait or run here."""
        return len(self._session_of) + len(self._offered)

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
        """Stops taking new work and waits for what is held."""
        num_held = await self.drain(float(request.timeout_s))
        return executor_pb2.DrainResponse(num_held=num_held)

    async def drain(self, timeout_s: float) -> int:
        """Refuses new work, waits at most `timeout_s` for what is held, and says how many are left."""
        self._engine.drain()
        try:
            await asyncio.wait_for(self._all_gone.wait(), timeout_s)
        except TimeoutError:
            log.warning("drain: %d sequences are still held", self.num_held)
        return self.num_held

    async def Serve(self, request_iterator: AsyncIterator[executor_pb2.ServeRequest], context: Context) -> None:
        """One router's stream: reads work in a task of its own, writes frames here."""
        hello = await self._read_hello(request_iterator)
        session = Session(
            hello.router_id,
            self._identity.description.generation,
            hello.max_unacked_steps or DEFAULT_MAX_UNACKED_STEPS,
        )
        self._sessions.add(session)
        log.info("router %s joined", session.router_id)
        self._reporter.send_now()
        reader = asyncio.create_task(self._read(request_iterator, session), name=f"read {session.router_id}")
        try:
            await self._write(session, reader, context)
        finally:
            reader.cancel()
            self._leave(session)

    async def _read_hello(self, requests: AsyncIterator[executor_pb2.ServeRequest]) -> executor_pb2.Hello:
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            raise invalid(FieldViolation("hello", "must be the first of a stream"))
        hello = first.hello
        if len(hello.router_id) > MAX_ROUTER_ID_CHARACTERS or not hello.router_id.isprintable():
            text = f"must be at most {MAX_ROUTER_ID_CHARACTERS} printable characters"
            raise invalid(FieldViolation("hello.router_id", text))
        if hello.protocol_version != PROTOCOL_VERSION:
            raise invalid(FieldViolation("hello.protocol_version", f"must be {PROTOCOL_VERSION}"))
        if hello.generation != self._identity.description.generation:
            raise RequestError(Reason.STALE_GENERATION, "hello.generation is not this executor's; describe it again")
        return hello

    async def _read(self, requests: AsyncIterator[executor_pb2.ServeRequest], session: Session) -> None:
        async for request in requests:
            if request.HasField("hello"):
                raise invalid(FieldViolation("hello", "must be only the first of a stream"))
            for submit in request.submits:
                self._submit(submit, session)
            for cancel in request.cancels:
                end_reason = CANCEL_REASONS.get(cancel.reason, FinishReason.CANCELLED)
                self._engine.cancel(cancel.request_id, cancel.attempt, end_reason)
            for attach in request.attaches:
                unsupported = executor_pb2.REJECT_REASON_UNSUPPORTED
                session.reject(attach.request_id, attach.attempt, unsupported, "attach: not implemented yet")
            if request.HasField("ack"):
                session.acknowledge(request.ack.frame)

    async def _write(self, session: Session, reader: asyncio.Task[None], context: Context) -> None:
        """Writes until the router has closed its side or the RPC is cancelled."""
        while True:
            response = asyncio.ensure_future(session.next_response())
            try:
                await asyncio.wait((response, reader), return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    reader.result()
                    return
                await context.write(response.result())
            finally:
                response.cancel()

    def _submit(self, submit: executor_pb2.Submit, session: Session) -> None:
        try:
            sequence = sequence_from_submit(submit, self._identity.limits)
        except SubmissionError as error:
            session.reject(submit.request_id, submit.attempt, error.reason, str(error))
            return
        self._offered[sequence] = session
        self._all_gone.clear()
        self._engine.submit(sequence, submit.deadline_ms if submit.HasField("deadline_ms") else None)

    def _leave(self, session: Session) -> None:
        self._sessions.discard(session)
        held = [s for s, owner in (*self._session_of.items(), *self._offered.items()) if owner is session]
        for sequence in held:
            self._engine.cancel(sequence.request_id, sequence.attempt)
        log.info("router %s left; %d of its sequences are cancelled", session.router_id, len(held))

    def on_output(self, output: EngineOutput) -> None:
        """Takes in one turn of the engine. On the event loop's thread."""
        for sequence in output.accepted:
            session = self._offered.pop(sequence)
            self._session_of[sequence] = session
            session.accept(sequence)
        for sequence, refusal in output.rejected:
            session = self._offered.pop(sequence)
            session.reject(sequence.request_id, sequence.attempt, REJECT_REASON_PROTO[refusal], refusal.value)
        for sequence in output.paused:
            self._session_of[sequence].pause(sequence)
        for sequence in output.started:
            self._session_of[sequence].start(sequence)
        for sequence, offset, token_id in output.tokens:
            self._session_of[sequence].token(sequence, offset, token_id)
        for end in output.finished:
            self._session_of.pop(end.sequence).finish(end)
        for session in self._sessions:
            session.end_step(output.step)
        if output.status is not None:
            self._reporter.update(output.status)
        if self.num_held == 0:
            self._all_gone.set()

    def _send_report(self, seq: int, status: EngineStatus) -> None:
        report = report_of(seq, status)
        # The engine answers between steps; until then the ledger must not take these for lost.
        for sequence in self._offered:
            report.held.add(
                request_id=sequence.request_id,
                attempt=sequence.attempt,
                reserved_blocks=sequence.num_reserved_blocks,
            )
        for session in self._sessions:
            session.report(report)
