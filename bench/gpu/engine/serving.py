"""The engine alone serving requests: scheduler, loop and runner in one process, without gRPC and Redis."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass, field

from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput, EngineStatus
from inflight.executor.engine.runner import StepRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sampling, Sequence, Stopping

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A prompt, how many tokens shall come back, and when it arrives, in seconds from the start."""

    prompt_ids: ReadOnlyList[int]
    output_tokens: int
    arrival_s: float


@dataclass(slots=True)
class Served:
    """What came of the requests, in seconds."""

    total_s: float = 0.0
    output_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    exposed_host_s: float = 0.0
    device_busy_fraction: float = 0.0


def blocks_of(requests: ReadOnlyList[TimedRequest], block_size: int) -> int:
    """Blocks for all of them at once."""
    return sum(_num_blocks(request, block_size) for request in requests)


def serve(
    runner: StepRunner,
    limits: SchedulerLimits,
    num_blocks: int,
    block_size: int,
    requests: ReadOnlyList[TimedRequest],
) -> Served:
    """Sends every request when it arrives and waits for the last token.

    The pool has blocks, and the limits places, for all of them at once. The runner is free for another engine then.
    """
    outputs: queue.SimpleQueue[tuple[float, EngineOutput | BaseException]] = queue.SimpleQueue()
    scheduler = Scheduler(limits, BlockPool(num_blocks, block_size))
    engine = Engine(
        scheduler,
        runner,
        lambda output: outputs.put((time.perf_counter(), output)),
        lambda error: outputs.put((time.perf_counter(), error)),
    )
    engine.start()
    try:
        return _converse(engine, outputs, [_sequence(i, r, block_size) for i, r in enumerate(requests)], requests)
    finally:
        engine.stop()


def _converse(
    engine: Engine,
    outputs: queue.SimpleQueue[tuple[float, EngineOutput | BaseException]],
    sequences: list[Sequence],
    requests: ReadOnlyList[TimedRequest],
) -> Served:
    """Submits in order of arrival and notes when tokens come."""
    served, newest_s, num_finished = Served(), {}, 0
    status: EngineStatus | None = None
    began_s = time.perf_counter()
    waiting = sorted(zip(sequences, requests, strict=True), key=lambda pair: pair[1].arrival_s, reverse=True)
    while num_finished < len(sequences):
        while waiting and began_s + waiting[-1][1].arrival_s <= time.perf_counter():
            sequence, request = waiting.pop()
            newest_s[sequence.request_id] = began_s + request.arrival_s
            engine.submit(sequence)
        until_next_s = began_s + waiting[-1][1].arrival_s - time.perf_counter() if waiting else TIMEOUT_S
        try:
            at_s, output = outputs.get(timeout=max(0.0, until_next_s))
        except queue.Empty:
            if waiting:
                continue
            raise TimeoutError(f"the engine published nothing for {TIMEOUT_S:.0f} s") from None
        if isinstance(output, BaseException):
            raise output
        assert not output.rejected, output.rejected
        num_finished += len(output.finished)
        _note_tokens(served, newest_s, output, at_s)
        status = output.status or status
    served.total_s = time.perf_counter() - began_s
    if status is not None:
        served.exposed_host_s = (status.exposed_host_ms or 0.0) / 1000
        served.device_busy_fraction = status.device_busy_fraction or 0.0
    return served


def _note_tokens(served: Served, newest_s: dict[str, float], output: EngineOutput, at_s: float) -> None:
    for sequence, offset, _ in output.tokens:
        waited_s = at_s - newest_s[sequence.request_id]
        (served.between_tokens_s if offset else served.first_token_s).append(waited_s)
        newest_s[sequence.request_id] = at_s
        served.output_tokens += 1


def _sequence(number: int, request: TimedRequest, block_size: int) -> Sequence:
    return Sequence(
        request_id=str(number),
        attempt=1,
        token_ids=list(request.prompt_ids),
        num_prompt_tokens=len(request.prompt_ids),
        sampling=GREEDY,
        stopping=Stopping(request.output_tokens, 0, frozenset()),
        num_reserved_blocks=_num_blocks(request, block_size),
        cache_salt=b"bench",
    )


def _num_blocks(request: TimedRequest, block_size: int) -> int:
    return -(-(len(request.prompt_ids) + request.output_tokens) // block_size)
