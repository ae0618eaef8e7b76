"""Runs a plan on the device: pack, forward, sample."""

from __future__ import annotations

from executor.batch import pack
from executor.model import PagedModel
from executor.sampling import SampleRow, choose_sampler, sample
from executor.sequence import PlanRow, StepPlan

NO_TOKENS: frozenset[int] = frozenset()


class ModelRunner:
    """The engine's way to the model."""

    def __init__(self, model: PagedModel, block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        self._sampler = choose_sampler(model.device)

    def run(self, plan: StepPlan) -> tuple[int, ...]:
        """Returns the sampled token ids of the rows that sample, in the order of the plan's rows."""
        logits = self._model.forward(pack(plan, self._block_size))
        rows = [_sample_row(row) for row in plan.rows if row.samples]
        return tuple(sample(logits, rows, self._sampler).tolist()) if rows else ()


def _sample_row(row: PlanRow) -> SampleRow:
    """The ids that would end the sequence are banned until it has its least number of tokens."""
    stopping = row.sequence.stopping
    # The token at output_index is the (output_index + 1)-th.
    is_too_early = row.output_index + 1 < stopping.min_tokens
    banned_ids = stopping.stop_token_ids if is_too_early else NO_TOKENS
    return SampleRow(row.sequence.sampling, row.output_index, banned_ids)
