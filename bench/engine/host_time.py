"""The cost of the host's part of a step: microseconds per step, with a device that takes no time.

    python -m inflight.bench.engine.host_time [--sequences 64 256] [--steps 400]

Scheduler, packing, sampling parameters, retirement and the frame for the router are timed separately. Every sequence
decodes, and one that ends is replaced at once. What remains is Python and numpy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence as SequenceOf

from inflight.bench.report.table import Table
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Batching, Scheduler, SchedulerLimits
from inflight.executor.scheduler.sequence import Sampling, Sequence, StepOutcome, StepPlan, StepResult, Stopping
from inflight.executor.serving.router_session import Session
from inflight.executor.step.batch import StepPacker
from inflight.executor.step.sampling_columns import SamplingColumns

BLOCK_SIZE = 16
PROMPT_TOKENS = 100
OUTPUT_TOKENS = 200
PARTS = ("schedule", "pack", "sampling", "update", "frame")


def decoding_sequence(number: int, max_tokens: int, num_blocks: int) -> Sequence:
    """Returns the sequence of this number. Its prompt begins with the number, so no two share a prefix."""
    return Sequence(
        request_id=f"r{number}",
        attempt=1,
        token_ids=[number, *range(PROMPT_TOKENS - 1)],
        num_prompt_tokens=PROMPT_TOKENS,
        sampling=Sampling(0.0, 0, 1.0, 0),
        stopping=Stopping(max_tokens, 0, frozenset({1})),
        num_reserved_blocks=num_blocks,
        cache_salt=b"",
    )


class HostLoop:
    """The host's work of a step, one step ahead, with a clock on each part."""

    def __init__(self, num_sequences: int) -> None:
        limits = SchedulerLimits(
            max_num_sequences=num_sequences,
            num_standby_sequences=num_sequences,
            max_num_tokens=max(512, num_sequences),
            context_length=2048,
            enable_chunked_context=True,
            batching=Batching.INFLIGHT,
            enable_prefix_cache=True,
        )
        self._scheduler = Scheduler(limits, BlockPool(num_sequences * 64, BLOCK_SIZE))
        self._packer = StepPacker(limits.num_seat_rows, limits.context_length // BLOCK_SIZE, BLOCK_SIZE)
        self._columns = SamplingColumns(limits.num_seat_rows, vocabulary_size=2)
        self._session = Session("bench", 1, 1 << 30)
        self._num_made = 0
        self._launched: list[StepPlan] = []
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def fill(self, count: int) -> None:
        for _ in range(count):
            self._num_made += 1
            # Ends are spread over the steps.
            sequence = decoding_sequence(self._num_made, OUTPUT_TOKENS + self._num_made % 100, num_blocks=32)
            assert self._scheduler.offer(sequence) is None
            self._session.accept(sequence)

    def step(self) -> None:
        """Plans and packs a step, and retires the one before."""
        times = [time.perf_counter()]
        plan = self._scheduler.schedule()
        times.append(time.perf_counter())
        batch = self._packer.pack(plan)
        times.append(time.perf_counter())
        self._columns.select(plan, batch)
        times.append(time.perf_counter())
        self._launched.append(plan)
        if len(self._launched) == 1:
            return
        outcome = self._retire(self._launched.pop(0))
        times.append(time.perf_counter())
        self._frame(outcome)
        times.append(time.perf_counter())
        for part, began, ended in zip(PARTS, times, times[1:], strict=False):
            self.seconds[part] += ended - began
        self.fill(len(outcome.finished))

    def _retire(self, plan: StepPlan) -> StepOutcome:
        return self._scheduler.update(StepResult(plan, (7,) * sum(plan.samples)))

    def _frame(self, outcome: StepOutcome) -> None:
        """What the service does with a step's tokens; in a server another thread does it."""
        for sequence, offset, token_id in outcome.tokens:
            self._session.token(sequence, offset, token_id)
        for event in outcome.finished:
            self._session.finish(event)
        self._session.take()


def measure(num_sequences: int, num_steps: int) -> dict[str, float]:
    """Microseconds per step of each part, once every sequence decodes."""
    loop = HostLoop(num_sequences)
    loop.fill(num_sequences)
    for _ in range(50):
        loop.step()
    loop.seconds = dict.fromkeys(PARTS, 0.0)
    for _ in range(num_steps):
        loop.step()
    return {part: seconds / num_steps * 1e6 for part, seconds in loop.seconds.items()}


def main(argv: SequenceOf[str] | None = None) -> int:
    """Prints a row for each number of sequences."""
    parser = argparse.ArgumentParser(description="The cost of the host's part of a step.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256], help="sequences that decode")
    parser.add_argument("--steps", type=int, default=400, help="steps to measure")
    arguments = parser.parse_args(argv)
    rows = []
    for num_sequences in arguments.sequences:
        parts = measure(num_sequences, arguments.steps)
        rows.append([str(num_sequences), *(f"{value:.0f}" for value in (*parts.values(), sum(parts.values())))])
    print("microseconds per step")
    print(Table(["sequences", *PARTS, "total"], rows).text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
