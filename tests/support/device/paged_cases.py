"""Step batches over sequences whose blocks lie scattered in the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from inflight.executor.scheduler.sequence import PlanRow, Sampling, Sequence, StepPlan, Stopping
from inflight.executor.step.batch import StepBatch, pack

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


@dataclass(frozen=True, slots=True)
class Spec:
    """A sequence that has `num_context` tokens, of which a step computes the last `num_new`."""

    num_new: int
    num_context: int


@dataclass(frozen=True, slots=True)
class PagedCase:
    """The batch of a step, one that holds every token of the same sequences, and the blocks that they need."""

    batch: StepBatch
    history: StepBatch
    num_blocks: int


def make_sequence(token_ids: list[int], block_table: list[int], sampling: Sampling = GREEDY) -> Sequence:
    """A sequence whose tokens are all prompt."""
    stopping = Stopping(max_tokens=1000, min_tokens=0, stop_token_ids=frozenset())
    sequence = Sequence("request", 1, token_ids, len(token_ids), sampling, stopping, 0, None)
    sequence.block_table = block_table
    return sequence


def make_case(specs: SequenceOf[Spec], block_size: int, seed: int = 0) -> PagedCase:
    """Packs the specs, decodes first, each with blocks of its own in random order."""
    specs = sorted(specs, key=lambda spec: spec.num_new != 1)
    counts = [-(-spec.num_context // block_size) for spec in specs]
    blocks = list(range(1, sum(counts) + 1))
    random.Random(seed).shuffle(blocks)
    sequences = [make_sequence([0] * spec.num_context, [blocks.pop() for _ in range(count)])
                 for spec, count in zip(specs, counts, strict=True)]  # fmt: skip
    new = [
        PlanRow(sequence, spec.num_context - spec.num_new, spec.num_new, True)
        for sequence, spec in zip(sequences, specs, strict=True)
    ]
    whole = [PlanRow(sequence, 0, sequence.num_tokens, True) for sequence in sequences]
    return PagedCase(pack(StepPlan.of(new), block_size), pack(StepPlan.of(whole), block_size), sum(counts))
