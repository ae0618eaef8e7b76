"""`ExecutorService`: the gRPC service between routers' streams and the engine.

It owns the sessions, and decides whether new work is accepted: not while it drains, nor while the engine stalls
(`watchdog`). `PlacementTable` owns the sequences and their readers. Engine output arrives from the engine's thread as
one callback per iteration of the loop. If a stream breaks, its sequences stay for another router to attach to.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from inflight.common.errors import FieldViolation, Reason, RequestError, invalid
from inflight.common.grammar import GrammarError
from inflight.common.protocol import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from inflight.common.telemetry.tracing import NO_TRACING, Tracing
from inflight.executor.adapters.errors import AdapterError, AdapterGoneError, NoSlotError, UnknownAdapterError
from inflight.executor.engine.output import EngineOutput, EngineStatus
from inflight.executor.scheduler.sequence import Constraint, FinishReason, Sequence
from inflight.executor.serving.placements import PlacementTable, RetentionPolicy
from inflight.executor.serving.report import RecentRates, Reporter, report_of
from inflight.executor.serving.router_session import FINISH_REASON_PROTO, Session
from inflight.executor.serving.served_engine import Grammars, ServedEngine
from inflight.executor.serving.state_reuse import StateReuse
from inflight.executor.serving.step_feed import StepWatch
from inflight.executor.serving.submission import SubmissionError, SubmissionLimits, sequence_from_submit
from inflight.executor.serving.tracing import trace_submit
from inflight.executor.serving.usage import UsageReporter
from inflight.v1 import executor_pb2, executor_pb2_grpc

if TYPE_CHECKING:
    from inflight.executor.adapters.store import AdapterStore

log = logging.getLogger(__name__)

DEFAULT_MAX_UNACKED_STEPS = 64
MAX_ROUTER_ID_CHARACTERS = 512
MAX_REFUSAL_CHARACTERS = 1000
# Routers whose refusals are remembered, so that the same one is logged once.
MAX_REFUSALS = 1000
# A router sends its hello as soon as it has opened the stream.
HELLO_TIMEOUT_S = 10.0
# Entries of a router's frame that are processed before the event loop serves other streams.
ENTRIES_PER_TURN = 100
# The router has compiled the grammar before, within its own limit. This one also bounds the wait behind other grammars.
COMPILE_TIMEOUT_S = 10.0
# Adapters are loaded one after the other, each in well under a second unless the disk is slow.
LOAD_TIMEOUT_S = 60.0
CANCEL_REASONS = {wire: reason for reason, wire in FINISH_REASON_PROTO.items()}

T = TypeVar("T")
Context = grpc.aio.ServicerContext[executor_pb2.ServeRequest, executor_pb2.ServeResponse]


@dataclass(frozen=True, slots=True)
class Identity:
    """Description of this executor, and the limits of its submits."""

    description: executor_pb2.DescribeResponse
    limits: SubmissionLimits


class ExecutorService(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves routers. Must be built on the event loop's thread; `on_output` is the engine's `publish`."""

    def __init__(
        self,
        identity: Identity,
        engine: ServedEngine,
        retention: RetentionPolicy | None = None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        tracing: Tracing = NO_TRACING,
        grammars: Grammars | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self._identity = identity
        self._grammars = grammars
        self.adapters = adapters
        # Sequences whose grammar is being compiled or whose adapter is being loaded.
        self._preparing: dict[Sequence, asyncio.Task[None]] = {}
        self._hello_timeout_s = hello_timeout_s
        # By router, the reason that was logged last.
        self._refusals: dict[str, str] = {}
        self._engine = engine
        trace = functools.partial(trace_submit, tracing)
        self._placements = PlacementTable(retention or RetentionPolicy(), engine.cancel, time.monotonic, trace=trace)
        self._sessions: set[Session] = set()
        self._reporter = Reporter(self._send_report)
        if adapters is not None:
            adapters.on_change = self._reporter.send_now
        self._rates = RecentRates()
        self._state_reuse = StateReuse()
        self._usage = UsageReporter(time.monotonic)
        self.steps = StepWatch(identity.description, engine.list_sequences, lambda: self.has_work)
        # The newest status of the engine.
        self.status: EngineStatus | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._is_closing = False
        self._is_stalled = False
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._all_left = asyncio.Event()
        self._all_left.set()

    @property
    def num_held(self) -> int:
        """Sequences that wait or run here."""
        return self._placements.num_held

    @property
    def has_work(self) -> bool:
        """Whether the engine has something to do. It has not while all sequences wait for their grammars or
        adapters."""
        only_prepares = bool(self.num_held) and self.num_held <= len(self._preparing)
        return self._placements.has_work and not only_prepares

    @property
    def num_orphans(self) -> int:
        """Sequences whose router is gone."""
        return self._placements.num_orphans

    @property
    def description(self) -> executor_pb2.DescribeResponse:
        """The response of `Describe`."""
        return self._identity.description

    @property
    def progress(self) -> tuple[int, int]:
        """A value that changes with every step, and whenever the engine becomes idle."""
        return self._engine.num_steps, self._placements.num_times_idle

    @property
    def expected_step_s(self) -> float:
        """The seconds that the step in flight is expected to take."""
        return self._engine.expected_step_s

    @property
    def takes_work(self) -> bool:
        """Whether submits are offered to the engine."""
        return not (self._is_draining or self._is_stalled)

    async def run(self) -> None:
        """Sends reports when they are due, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reporter.run(), name="reports of capacity")
            tasks.create_task(self._usage.run(lambda: self._sessions), name="reports of usage")

    async def Describe(
        self, request: executor_pb2.DescribeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> executor_pb2.DescribeResponse:
        """Returns what this executor serves."""
        return self._identity.description

    async def Drain(
        self, request: executor_pb2.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> executor_pb2.DrainResponse:
        """Stops taking new work, waits for held sequences, and hands back those left after `timeout_s`. With a timeout
        of 0 it returns at once and lets running sequences go on."""
        await self.drain(float(request.timeout_s))
        if request.timeout_s:
            self.hand_back()
        return executor_pb2.DrainResponse(num_held=self.num_held)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new work, hands back sequences that have had no seat, and waits at most `timeout_s` for the
        others."""
        self._is_draining = True
        self._engine.drain()
        self._reporter.send_first()
        self._placements.hand_back_unstarted()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._all_gone.wait()

    def hand_back(self, error: str = "") -> None:
        """Hands all sequences back to their routers, to continue elsewhere."""
        num_held = self._placements.hand_back(error)
        if num_held:
            log.warning("%d sequences were handed back to their routers", num_held)
        self._all_gone.set()

    def set_stalled(self, is_stalled: bool) -> None:
        """Records that the engine stalls, or no longer does. When it stalls, its sequences are handed back."""
        self._is_stalled = is_stalled
        self._reporter.send_first()
        if is_stalled:
            self.hand_back("the engine made no step")

    async def close(self, timeout_s: float) -> None:
        """Ends every router's stream after its pending output, and waits at most `timeout_s` for that."""
        self._is_closing = True
        self.steps.close()
        self._usage.send_all(self._sessions)
        for task in self._preparing.values():
            task.cancel()
        if self._grammars is not None:
            self._grammars.close()
        for session in self._sessions:
            session.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._all_left.wait()

    async def Serve(self, request_iterator: AsyncIterator[executor_pb2.ServeRequest], context: Context) -> None:
        """Serves one router's stream. It reads in a task of its own and writes here."""
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
        """Streams steps until the caller leaves."""
        async with aclosing(self.steps.watch(request)) as responses:
            async for response in responses:
                await context.write(response)

    async def _read_hello(self, requests: AsyncIterator[executor_pb2.ServeRequest]) -> executor_pb2.Hello:
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                first = await anext(requests, None)
        except TimeoutError as error:
            raise invalid(FieldViolation("hello", f"did not arrive within {self._hello_timeout_s:g} s")) from error
        if first is None or not first.HasField("hello"):
            raise invalid(FieldViolation("hello", "must be the first message of a stream"))
        hello = first.hello
        if len(hello.router_id) > MAX_ROUTER_ID_CHARACTERS or not hello.router_id.isprintable():
            text = f"must be at most {MAX_ROUTER_ID_CHARACTERS} printable characters"
            raise invalid(FieldViolation("hello.router_id", text))
        if not MIN_PROTOCOL_VERSION <= hello.protocol_version <= PROTOCOL_VERSION:
            allowed = f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
            raise invalid(FieldViolation("hello.protocol_version", f"must be {allowed}"))
        if hello.generation != self._identity.description.generation:
            raise RequestError(Reason.STALE_GENERATION, "hello.generation is not this executor's; call Describe again")
        if self._is_closing:
            raise RequestError(Reason.EXECUTOR_LOST, "this executor has drained and is stopping")
        return hello

    async def _read(self, requests: AsyncIterator[executor_pb2.ServeRequest], session: Session) -> None:
        async for request in requests:
            if request.HasField("hello"):
                raise invalid(FieldViolation("hello", "must be only the first message of a stream"))
            if request.refusal:
                self._note_refusal(session.router_id, request.refusal)
                return
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

    def _note_refusal(self, router_id: str, refusal: str) -> None:
        """Logs that a router does not use this executor. The router tries again every second, with the same result."""
        if self._refusals.get(router_id) != refusal:
            log.warning("router %s does not use this executor: %s", router_id, refusal[:MAX_REFUSAL_CHARACTERS])
        if len(self._refusals) >= MAX_REFUSALS:
            self._refusals.clear()
        self._refusals[router_id] = refusal

    async def _write(self, session: Session, reader: asyncio.Task[None], context: Context) -> None:
        """Writes until one side has closed the stream or the RPC is cancelled."""
        reader.add_done_callback(lambda _: session.stop())
        while (response := await session.next_response()) is not None:
            await context.write(response)
        if reader.done():
            reader.result()

    def _submit(self, submit: executor_pb2.Submit, session: Session) -> None:
        if not self.takes_work:
            draining = executor_pb2.REJECT_REASON_DRAINING
            session.reject(submit.request_id, submit.attempt, draining, "the executor takes no new work")
            return
        try:
            sequence = sequence_from_submit(submit, self._identity.limits)
            self._find_grammar(sequence)
            self._hold_adapter(sequence)
        except SubmissionError as error:
            session.reject(submit.request_id, submit.attempt, error.reason, str(error))
            return
        if not self._placements.offer(sequence, submit, session):
            self._release_adapters((sequence,))
            stale = executor_pb2.REJECT_REASON_STALE_ATTEMPT
            session.reject(submit.request_id, submit.attempt, stale, "this attempt or a newer one is known")
            return
        self._all_gone.clear()
        self._engine.submit(sequence, submit.deadline_ms if submit.HasField("deadline_ms") else None)
        if not sequence.is_ready:
            task = asyncio.create_task(self._prepare(sequence), name=f"prepare {sequence.request_id}")
            self._preparing[sequence] = task
            task.add_done_callback(lambda _: self._preparing.pop(sequence, None))

    def _find_grammar(self, sequence: Sequence) -> None:
        """Sets the compiled grammar of a sequence if it is known."""
        if sequence.constraint is None:
            return
        if self._grammars is None:
            raise SubmissionError(executor_pb2.REJECT_REASON_UNSUPPORTED, "constraint: this executor compiles none")
        sequence.constraint.compiled = self._grammars.find(sequence.constraint.key)

    def _hold_adapter(self, sequence: Sequence) -> None:
        """Makes the sequence hold its adapter until its end."""
        if not sequence.adapter_hash or self.adapters is None:
            return
        try:
            self.adapters.hold(sequence)
        except UnknownAdapterError:
            # Its files were replaced or removed after the report that the ledger had. The next report says so.
            text = f"adapter_hash: this executor has no adapter {sequence.adapter_hash.hex()}"
            raise SubmissionError(executor_pb2.REJECT_REASON_NO_CAPACITY, text) from None
        except NoSlotError:
            text = f"sequences hold {self.adapters.num_slots} other adapters, as many as there are slots"
            raise SubmissionError(executor_pb2.REJECT_REASON_NO_CAPACITY, text) from None

    def _release_adapters(self, ended: Iterable[Sequence]) -> None:
        if self.adapters is not None:
            self.adapters.release(ended)

    async def _prepare(self, sequence: Sequence) -> None:
        """Compiles the grammar of a sequence, loads its adapter and lets it board. Without one of them it ends with an
        error. One whose adapter is gone returns to its router: another executor may have the adapter."""
        waits = []
        if sequence.constraint is not None and sequence.constraint.compiled is None:
            what = "the grammar of the constraint"
            compiling = self._compile_grammar(sequence.constraint)
            waits.append(_reason(compiling, sequence.request_id, what, "compiled", COMPILE_TIMEOUT_S))
        if sequence.adapter_hash and sequence.adapter_slot is None:
            assert self.adapters is not None
            loading = self.adapters.load(sequence)
            waits.append(_reason(loading, sequence.request_id, "the adapter", "loaded", LOAD_TIMEOUT_S))
        try:
            errors = await asyncio.gather(*waits)
        except AdapterGoneError as gone:
            log.info("%s: %s", sequence.request_id, gone)
            self._engine.cancel(sequence.request_id, sequence.attempt, FinishReason.PREEMPTED)
            return
        self._engine.mark_prepared(sequence, next(filter(None, errors), ""))

    async def _compile_grammar(self, constraint: Constraint) -> None:
        assert self._grammars is not None
        compiling = asyncio.wrap_future(self._grammars.compile(constraint))
        # Retrieved even after a timeout, or asyncio would log it.
        compiling.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Other sequences may wait for the same result.
        constraint.compiled = await asyncio.shield(compiling)

    def _attach(self, attach: executor_pb2.Attach, session: Session) -> None:
        if session.knows_attach:
            self._placements.attach(attach, session)
            return
        unsupported = executor_pb2.REJECT_REASON_UNSUPPORTED
        session.reject(attach.request_id, attach.attempt, unsupported, "attach: hello.protocol_version is too old")

    def _leave(self, session: Session) -> None:
        self._sessions.discard(session)
        num_left = self._placements.leave(session)
        self._expire()
        if not self._sessions:
            self._all_left.set()
        log.info("router %s disconnected; %d of its sequences have no router", session.router_id, num_left)

    def _expire(self) -> None:
        """Expires orphans and records that are due, and schedules the next expiry."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._placements.expire()
        if due_s is not None:
            delay_s = max(0.0, due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def on_output(self, output: EngineOutput) -> None:
        """Processes the output of one engine iteration. Runs on the event loop's thread."""
        self._placements.publish(output)
        self._release_adapters(
            [*(event.sequence for event in output.finished), *(sequence for sequence, _ in output.rejected)]
        )
        for session in self._sessions:
            session.end_step(output.step)
        if output.finished and self._timer is None:
            self._expire()
        self.steps.take(output)
        self._usage.take(output.usage)
        if output.status is not None:
            is_urgent = _changes_admission(output, self.status)
            self.status = output.status
            self._rates.observe(output.status.num_steps, output.status.num_output_tokens)
            self._reporter.update(output.status, is_urgent=is_urgent)
            if output.status.kv.states is not None:
                self._state_reuse.observe(output.status.kv.states)
        if self.num_held == 0:
            self._all_gone.set()

    def _send_report(self, seq: int, status: EngineStatus) -> None:
        report = report_of(seq, status, self._placements.reported(status.held), self._rates.per_second())
        report.draining = report.draining or not self.takes_work
        for one in [] if self.adapters is None else self.adapters.states():
            report.adapters.add(name=one.name, hash=one.hash, rank=one.rank, resident=one.is_resident)
        for session in self._sessions:
            session.report(report)


async def _reason(preparing: Awaitable[None], request_id: str, what: str, done: str, timeout_s: float) -> str:
    """Waits for what a sequence needs. Returns the reason if it cannot have it. Raises `AdapterGoneError`."""
    try:
        async with asyncio.timeout(timeout_s):
            await preparing
    except AdapterGoneError:
        raise
    except (GrammarError, AdapterError) as failure:
        return str(failure)
    except TimeoutError:
        return f"{what} was not {done} within {timeout_s:g} s"
    except Exception:
        log.exception("%s of %s cannot be %s", what, request_id, done)
        return f"{what} cannot be {done}"
    return ""


def _changes_admission(output: EngineOutput, before: EngineStatus | None) -> bool:
    """Returns whether routers admit differently after this: sequences came, moved or left, or the budget changed."""
    after = output.status
    if before is None or after is None:
        return True
    if output.accepted or output.rejected or output.preempted or output.boarded or output.finished:
        return True
    budget, budget_before = (
        (status.budget_blocks, status.budget_sequences, status.draining) for status in (after, before)
    )
    return budget != budget_before


async def _in_turns(entries: Iterable[T]) -> AsyncIterator[T]:
    """Yields the entries of a frame, and lets other streams run after every `ENTRIES_PER_TURN`."""
    for number, entry in enumerate(entries, start=1):
        if number % ENTRIES_PER_TURN == 0:
            await asyncio.sleep(0)
        yield entry
