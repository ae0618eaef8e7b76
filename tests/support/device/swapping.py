"""Hand-made plans in which a sequence loses its blocks half-way and gets its KV back in others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from inflight.executor.engine.runner import PendingStep, StepRunner
from inflight.executor.scheduler.sequence import PlanRow, Sequence, StepPlan
from tests.support.device.paged_cases import make_sequence
from tests.support.scheduler.scheduling import make_limits

BLOCK_SIZE = 16
NUM_BLOCKS = 12
LIMITS = make_limits(
    max_num_sequences=2,
    num_standby_sequences=0,
    max_num_tokens=64,
    context_length=64,
    enable_prefix_cache=False,
    num_host_blocks=5,
)
NUM_PROMPT_TOKENS = 37
NUM_TOKENS = 10
FIRST_BLOCKS = [7, 2, 11]
OTHER_BLOCKS = [3, 11, 5]
# Neither in order nor all neighbours; the first and the last are among them.
HOST_BLOCKS = [4, 0, 1]


@dataclass(slots=True)
class HandMadeSteps:
    """Launches plans, at most `num_ahead` of them before the oldest is read."""

    runner: StepRunner
    num_ahead: int
    _launched: deque[tuple[StepPlan, PendingStep]] = field(default_factory=deque)

    def launch(self, rows: Iterable[PlanRow], plan: StepPlan) -> None:
        """Launches the rows with what else is in `plan`."""
        made = StepPlan.of(rows)
        plan = replace(made, boarded=plan.boarded, swaps_out=plan.swaps_out, swaps_in=plan.swaps_in)
        for sequence, length, samples in zip(plan.sequences, plan.lengths, plan.samples, strict=True):
            sequence.num_computed += length
            sequence.num_pending += samples
        self._launched.append((plan, self.runner.launch(plan)))
        self.read(self.num_ahead)

    def read(self, num_left: int) -> None:
        """Reads the oldest steps until so many are left."""
        while len(self._launched) > num_left:
            plan, step = self._launched.popleft()
            for sequence, token_id in zip(plan.sequences, step.result(), strict=True):
                assert token_id is not None
                sequence.num_pending -= 1
                sequence.token_ids.append(token_id)


def greedy_tokens(runner: StepRunner, *, swap_after: int | None, num_ahead: int) -> list[int]:
    """What a prompt is continued with. After `swap_after` tokens its KV goes to the host in the very step in which
    another prompt takes the blocks, and comes back in the next step while part of the other's blocks goes to the host
    and its own old ones are taken: in one step blocks are swapped out and swapped into."""
    steps = HandMadeSteps(runner, num_ahead)
    sequence = _seated(0, [5 + (11 * i) % 83 for i in range(NUM_PROMPT_TOKENS)], FIRST_BLOCKS)
    steps.launch([PlanRow(sequence, 0, NUM_PROMPT_TOKENS, True)], _plan(boarded=(sequence,)))
    for count in range(1, NUM_TOKENS):
        plan = _plan()
        if count == swap_after:
            other = _seated(1, [90 - i for i in range(NUM_PROMPT_TOKENS)], FIRST_BLOCKS)
            out = tuple(zip(FIRST_BLOCKS, HOST_BLOCKS, strict=True))
            steps.launch([PlanRow(other, 0, NUM_PROMPT_TOKENS, True)], _plan(boarded=(other,), swaps_out=out))
            sequence.block_table = list(OTHER_BLOCKS)
            back = tuple(zip(HOST_BLOCKS, OTHER_BLOCKS, strict=True))
            plan = _plan(boarded=(sequence,), swaps_out=((11, 3), (2, 2)), swaps_in=back)
        steps.launch([_decode(sequence, is_back=count == swap_after)], plan)
    steps.read(0)
    runner.close()
    return sequence.token_ids[NUM_PROMPT_TOKENS:]


def _decode(sequence: Sequence, *, is_back: bool) -> PlanRow:
    carries = sequence.num_pending > 0
    assert not (is_back and carries), "the token of who was away is known on the host"
    return PlanRow(sequence, sequence.num_computed, 1, True, carries)


def _seated(seat: int, prompt: list[int], blocks: list[int]) -> Sequence:
    sequence = make_sequence(prompt, list(blocks))
    sequence.seat = seat
    return sequence


def _plan(
    boarded: tuple[Sequence, ...] = (),
    swaps_out: tuple[tuple[int, int], ...] = (),
    swaps_in: tuple[tuple[int, int], ...] = (),
) -> StepPlan:
    return replace(StepPlan.of(()), boarded=boarded, swaps_out=swaps_out, swaps_in=swaps_in)
