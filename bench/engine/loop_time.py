"""CPU time of the engine loop per step, with a device that takes no time.

    python -m inflight.bench.engine.loop_time [--sequences 32 128 256] [--steps 400]

As many sequences wait as have a seat, and one that ends is replaced at once. The parts are those of the loop: commands,
plan, launch, which packs the batch and the sampling parameters, waiting for the device, retirement with the status for
reports, and publishing, which makes the frame for a router; in a server another thread makes it. All figures are CPU
time of the loop's thread, so other processes on the machine disturb them little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from inflight.bench.report.table import Table
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Batching, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import NO_LOGPROBS, Sampling, Sequence, StepPlan, Stopping, TokenLogprobs
from inflight.executor.scheduler.step_record import PART_NAMES
from inflight.executor.serving.router_session import Session
from inflight.executor.step.batch import StepPacker
from inflight.executor.step.sampling_columns import SamplingColumns

BLOCK_SIZE = 16
PROMPT_TOKENS = 100
TOKEN_ID = 7
NUM_WARM_UP_STEPS = 200


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


class EndedStep:
    """A step of a device that takes no time."""

    allows_next = True
    copied_s = 0.0

    def __init__(self, plan: StepPlan, now_s: float) -> None:
        self.began_s = self.ended_s = now_s
        self._num_tokens = sum(plan.samples)

    def result(self) -> tuple[int, ...]:
        return (TOKEN_ID,) * self._num_tokens

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        return NO_LOGPROBS


class NoDevice:
    """A runner that packs its steps for no device."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._packer = StepPacker(limits.num_seat_rows, limits.context_length // BLOCK_SIZE, BLOCK_SIZE)
        self._columns = SamplingColumns(limits.num_seat_rows, vocabulary_size=2)

    def launch(self, plan: StepPlan) -> EndedStep:
        self._columns.select(plan, self._packer.pack(plan))
        return EndedStep(plan, time.thread_time())

    def close(self) -> None:
        """Does nothing."""


class LoopTime:
    """An engine that this thread turns, and the CPU time of each part."""

    def __init__(self, num_sequences: int, policy: SchedulerPolicy, output_tokens: int) -> None:
        limits = SchedulerLimits(
            max_num_sequences=num_sequences,
            num_standby_sequences=num_sequences,
            max_num_tokens=max(1024, num_sequences),
            context_length=2048,
            enable_chunked_context=True,
            batching=Batching.INFLIGHT,
            enable_prefix_cache=True,
            policy=policy,
        )
        self._num_blocks = -(-(PROMPT_TOKENS + output_tokens) // BLOCK_SIZE)
        self._output_tokens = output_tokens
        # Room for everything that is held, with the watermark.
        pool = BlockPool(int(2.2 * num_sequences * self._num_blocks), BLOCK_SIZE)
        self.engine = Engine(
            Scheduler(limits, pool), NoDevice(limits), self._publish, lambda error: None, clock=time.thread_time
        )
        self._session = Session("bench", 1, 1 << 30)
        self._num_made = 0
        self._num_ended = 0
        self.seconds = [0.0] * len(PART_NAMES)

    def submit(self, count: int) -> None:
        for _ in range(count):
            self._num_made += 1
            # Ends are spread over the steps.
            max_tokens = self._output_tokens - self._num_made % 16
            self.engine.submit(decoding_sequence(self._num_made, max_tokens, self._num_blocks))

    def run(self, num_steps: int) -> None:
        """Turns the loop until `num_steps` more steps have retired."""
        last = self.engine.num_steps + num_steps
        while self.engine.num_steps < last:
            self.engine.step()
            self.submit(self._num_ended)
            self._num_ended = 0

    def _publish(self, output: EngineOutput) -> None:
        assert not output.rejected, output.rejected[0][1]
        for sequence in output.accepted:
            self._session.accept(sequence)
        for sequence in output.preempted:
            self._session.preempt(sequence)
        for sequence in output.boarded:
            self._session.start(sequence)
        for sequence, offset, token_id in output.tokens:
            self._session.token(sequence, offset, token_id)
        for event in output.finished:
            self._session.finish(event)
        self._session.take()
        self._num_ended += len(output.finished)
        if output.record is not None:
            for part, seconds in enumerate(output.record.part_s):
                self.seconds[part] += seconds


def measure(num_sequences: int, policy: SchedulerPolicy, output_tokens: int, num_steps: int) -> list[float]:
    """Returns the microseconds per step of each part and their sum."""
    loop = LoopTime(num_sequences, policy, output_tokens)
    loop.submit(2 * num_sequences)
    loop.run(NUM_WARM_UP_STEPS)
    loop.seconds = [0.0] * len(PART_NAMES)
    loop.run(num_steps)
    parts = [seconds / num_steps * 1e6 for seconds in loop.seconds]
    return [*parts, sum(parts)]


def main(argv: SequenceOf[str] | None = None) -> int:
    """Prints a row for each policy, output length and number of sequences."""
    parser = argparse.ArgumentParser(description="CPU time of the engine loop per step.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 128, 256], help="sequences on a seat")
    parser.add_argument("--output-tokens", type=int, nargs="+", default=[40, 200], help="output of each request")
    parser.add_argument("--steps", type=int, default=400, help="steps to measure")
    arguments = parser.parse_args(argv)
    rows = []
    for policy in SchedulerPolicy:
        for output_tokens in arguments.output_tokens:
            for num_sequences in arguments.sequences:
                figures = measure(num_sequences, policy, output_tokens, arguments.steps)
                labels = [policy.value, str(output_tokens), str(num_sequences)]
                rows.append([*labels, *(f"{figure:.0f}" for figure in figures)])
    print("microseconds of CPU per step")
    print(Table(["policy", "output", "sequences", *PART_NAMES, "total"], rows).text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
