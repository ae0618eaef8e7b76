"""Grouping of a step's rows by adapter into tiles, on the host. `inflight.executor.kernels.adapters` describes the
tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.executor.kernels.tiling import MIN_ROWS
from inflight.executor.step.batch import StepBatch

# Rows of a tile: those of the smallest matrix instruction. A larger tile would be nearly empty for most decodes.
TILE_ROWS = MIN_ROWS

Words = npt.NDArray[np.int32]


def num_tiles(num_tokens: int, num_slots: int) -> int:
    """Returns tiles that suffice for any adapters of so many tokens: each adapter may leave one tile in part empty."""
    return min(num_tokens, num_tokens // TILE_ROWS + num_slots)


def group_rows(batch: StepBatch, rows: Words, slots: Words) -> None:
    """Writes the tiles of a step on the host: `rows[tiles * TILE_ROWS]` and `slots[tiles]`, -1 where there is none."""
    rows[:], slots[:] = -1, -1
    if batch.adapter_slots is None:
        return
    of_token = np.repeat(batch.adapter_slots.numpy(), np.diff(batch.query_starts.numpy()))
    first = 0
    for slot in np.unique(of_token[of_token >= 0]):
        members = np.flatnonzero(of_token == slot)
        rows[first * TILE_ROWS : first * TILE_ROWS + len(members)] = members
        after = first + -(-len(members) // TILE_ROWS)
        slots[first:after] = slot
        first = after


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """The tiles of a step on the device, as `group_rows` writes them."""

    rows: Tensor
    slots: Tensor

    @classmethod
    def of(cls, batch: StepBatch, num_slots: int, device: torch.device) -> RowGroups:
        """Groups the rows of a batch on the host."""
        count = num_tiles(batch.num_tokens, num_slots)
        rows, slots = torch.empty(count * TILE_ROWS, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
        group_rows(batch, rows.numpy(), slots.numpy())
        return cls(rows.to(device), slots.to(device))
