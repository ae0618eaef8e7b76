"""The `inflight` command with executors that compute nothing and produce tokens at a set rate:
`python -m inflight.bench.tokens.modelled 50000 executor --listen …`.

The first argument is the number of tokens per second of all sequences together, the rest is `inflight`'s command line.
Each step gives every sequence one token. The tokens are those of a text, from another place for each sequence. A frame
has the form of a real executor's, and waits for acknowledgements as there.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from inflight.cli.main import main as run_inflight
from inflight.common.model_source import load_tokenizer, resolve_model
from inflight.common.protocol import PROTOCOL_VERSION
from inflight.common.rpc.server import GrpcServer
from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2

TEXT = (
    "In-flight batching lets a sequence join or leave the batch at every step: “no one waits for the slowest”, as a "
    "city bus does – naïve batching doesn't. Größe, 速度 and 🚌 need several bytes per character.\n"
    "def step(batch):\n    return [sequence.next_token() for sequence in batch if not sequence.has_ended]\n"
)
MAX_SEQUENCES = 4096
CONTEXT_LENGTH = 1 << 20
TOTAL_BLOCKS = 1 << 30
REPORT_EVERY_S = 0.25
# No device is faster.
MIN_STEP_S = 0.002


@dataclass(slots=True)
class Running:
    """A sequence, and the number of its next output token."""

    submit: executor_pb2.Submit
    slot: int
    offset: int


@dataclass(slots=True)
class RouterSession:
    """One router's sequences, and what waits to be sent to it."""

    max_unacked: int
    sequences: dict[tuple[str, int], Running] = field(default_factory=dict)
    next_slot: int = 0
    response: executor_pb2.ServeResponse = field(default_factory=executor_pb2.ServeResponse)
    num_frames: int = 0
    acked: int = 0
    num_reports: int = 0


class ModelledExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """The executor API of a device that has each token at the time when it is due."""

    def __init__(self, name: str, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        source = resolve_model("")
        tokenizer = load_tokenizer(source)
        self._text_ids: list[int] = tokenizer.encode(TEXT)
        self._description = executor_pb2.DescribeResponse(
            executor_id=name,
            generation=time.time_ns() // 1_000_000,
            protocol_version=PROTOCOL_VERSION,
            model=source.name,
            block_size=16,
            total_blocks=TOTAL_BLOCKS,
            max_num_sequences=MAX_SEQUENCES,
            max_num_tokens=MAX_SEQUENCES,
            context_length=CONTEXT_LENGTH,
            vocabulary_size=len(tokenizer),
            default_sampling=types_pb2.SamplingParams(),
            batching=types_pb2.BATCHING_MODE_INFLIGHT,
        )

    async def Describe(self, request: object, context: object) -> executor_pb2.DescribeResponse:
        """Returns what this executor serves."""
        return self._description

    async def Serve(self, request_iterator: AsyncIterator[executor_pb2.ServeRequest], context: Any) -> None:
        """Serves one router's stream."""
        hello = (await anext(aiter(request_iterator))).hello
        session = RouterSession(hello.max_unacked_steps)
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            await self._write(session, context)
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[executor_pb2.ServeRequest], session: RouterSession) -> None:
        async for request in requests:
            session.acked = max(session.acked, request.ack.frame)
            for submit in request.submits:
                running = Running(submit, session.next_slot, len(submit.prior_output_ids))
                session.next_slot += 1
                session.sequences[submit.request_id, submit.attempt] = running
                session.response.accepted.add(
                    request_id=submit.request_id, attempt=submit.attempt, slots=[running.slot]
                )
                session.response.step.started.add(slot=running.slot)
            for cancel in request.cancels:
                running_or_none = session.sequences.pop((cancel.request_id, cancel.attempt), None)
                if running_or_none is not None:
                    self._end(session, running_or_none, cancel.reason)

    async def _write(self, session: RouterSession, context: Any) -> None:
        due_s, report_due_s = time.monotonic(), 0.0
        while True:
            step_s = max(MIN_STEP_S, len(session.sequences) / self._tokens_per_s)
            due_s += step_s
            while due_s <= time.monotonic():  # a late loop makes up for the steps in between
                self._step(session)
                due_s += step_s
            await asyncio.sleep(due_s - time.monotonic())
            self._step(session)
            if time.monotonic() >= report_due_s:
                report_due_s = time.monotonic() + REPORT_EVERY_S
                self._report(session)
            response = self._taken(session)
            if response is not None:
                await context.write(response)

    def _step(self, session: RouterSession) -> None:
        text, step = self._text_ids, session.response.step
        slots, offsets, token_ids, ended = [], [], [], []
        for key, running in session.sequences.items():
            slots.append(running.slot)
            offsets.append(running.offset)
            token_ids.append(text[(running.offset + running.slot) % len(text)])
            running.offset += 1
            if running.offset == running.submit.stopping.max_tokens:
                ended.append(key)
        step.slots.extend(slots)
        step.offsets.extend(offsets)
        step.token_ids.extend(token_ids)
        for key in ended:
            self._end(session, session.sequences.pop(key), types_pb2.FINISH_REASON_LENGTH)

    def _end(self, session: RouterSession, running: Running, reason: types_pb2.FinishReason) -> None:
        session.response.step.finished.add(slot=running.slot, reason=types_pb2.FinishReason.Name(reason))

    def _report(self, session: RouterSession) -> None:
        session.num_reports += 1
        report = session.response.report
        report.Clear()
        report.seq, report.num_running = session.num_reports, len(session.sequences)
        report.budget_blocks = report.total_blocks = TOTAL_BLOCKS
        report.budget_sequences = MAX_SEQUENCES
        for running in session.sequences.values():
            submit = running.submit
            report.held.add(
                request_id=submit.request_id, attempt=submit.attempt, reserved_blocks=submit.reserved_blocks
            )

    def _taken(self, session: RouterSession) -> executor_pb2.ServeResponse | None:
        """Returns what waits, unless the router has too many frames that it has not acknowledged."""
        response = session.response
        if session.num_frames - session.acked >= session.max_unacked or not response.ListFields():
            return None
        session.num_frames += 1
        response.generation = self._description.generation
        response.step.frame = response.step.step = session.num_frames
        session.response = executor_pb2.ServeResponse()
        return response


async def serve(name: str, address: str, tokens_per_s: float) -> None:
    """Serves until cancelled."""
    server = GrpcServer(["inflight.v1.ExecutorService"])
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(ModelledExecutor(name, tokens_per_s), server.grpc)
    await server.start(address)
    await server.set_serving(True)
    await asyncio.Event().wait()


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    tokens_per_s, role, *rest = argv
    if role != "executor":
        return run_inflight([role, *rest])
    flags = dict(pairwise(rest))
    asyncio.run(serve(flags["--executor-id"], flags["--listen"], float(tokens_per_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
