"""What the host prepares of a step, whatever computes it: its tensors, how its rows are sampled, and their masks."""

from __future__ import annotations

import torch

from inflight.executor.logits.grammar import MaskFiller
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.sequence import StepPlan
from inflight.executor.step.batch import StepBatch, StepPacker
from inflight.executor.step.sampling_columns import SamplingBatch, SamplingColumns


class StepInputs:
    """Packs plans, which must come in the order in which they are made. `masks` fills those of constrained rows."""

    def __init__(self, limits: SchedulerLimits, block_size: int, vocabulary_size: int) -> None:
        num_seats, max_blocks = limits.num_seat_rows, -(-limits.context_length // block_size)
        self._packer = StepPacker(
            num_seats,
            max_blocks,
            block_size,
            has_windows=limits.kv_window is not None,
            has_states=limits.states is not None,
        )
        self._columns = SamplingColumns(num_seats, vocabulary_size)
        self.masks = MaskFiller(torch.get_num_threads())

    def pack(self, plan: StepPlan) -> tuple[StepBatch, SamplingBatch]:
        """Returns the step's tensors on the host, and the columns of the rows that sample."""
        batch = self._packer.pack(plan)
        return batch, self._columns.select(plan, batch)

    def close(self) -> None:
        """Ends the thread of the masks."""
        self.masks.close()
