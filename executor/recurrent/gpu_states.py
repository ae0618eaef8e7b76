"""State of the recurrent layers on a GPU: slots and checkpoints of all layers, and what a step tells the kernels of
them.

The kernels (`executor/kernels/recurrent.py`) need for each sequence the boundary of its slot. It follows from the steps
alone, so the host keeps it, and steps can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.common.model_files.recurrent import DELTA_GRID, DELTA_PLACES, MixerShape
from inflight.executor.kernels.recurrent import MAX_SAVES, ROW_WORDS
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.recurrent.short_conv import num_conv_places
from inflight.executor.scheduler.sequence import StateLoad
from inflight.executor.step.batch import NO_SLOT, StepBatch

NUM_ROW_WORDS = int(ROW_WORDS.value)


@dataclass(frozen=True, slots=True, eq=False)
class StateTensors:
    """The memory of all recurrent layers, which are the second dimension. Inputs of the convolution have the type of
    the activations, `inputs[slots, layers, places, channels]`, that of position p at place `p % places`, and
    `saved_inputs[checkpoints, layers, width - 1, channels]`. The rest is float32, of gated delta nets only: `states`
    and `saved_states` `[slots or checkpoints, layers, heads, key_dim, value_dim]`, and behind the boundary, position p
    at place `p % DELTA_PLACES`, `keys[slots, layers, key_heads, places, key_dim]`, `updates[slots, layers, heads,
    places, value_dim]` and `decays[slots, layers, heads, places]`, the g of the position."""

    inputs: Tensor
    saved_inputs: Tensor
    states: Tensor
    saved_states: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))


class GpuStates:
    """Slots and checkpoints of `num_layers` layers. `reserve` must precede the first step."""

    def __init__(self, shape: MixerShape, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._num_layers, self._dtype, self._device = shape, num_layers, dtype, device
        self._tensors: StateTensors | None = None
        self._boundaries = np.zeros(0, np.int32)

    @property
    def tensors(self) -> StateTensors:
        """The memory that is reserved."""
        assert self._tensors is not None, "there are no slots yet"
        return self._tensors

    @property
    def grid_tokens(self) -> int:
        """A checkpoint can be taken at multiples of it."""
        return DELTA_GRID if self._shape.num_heads else 1

    @property
    def num_slots(self) -> int:
        """Slots that are reserved."""
        return len(self._boundaries)

    def slot_bytes(self, max_drafts: int) -> int:
        """Returns the memory of a slot for a number of drafts."""
        return self._allocate(StateSizes(1, 0, max_drafts), torch.device("meta")).num_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """The memory of a checkpoint."""
        return self._allocate(StateSizes(0, 1, 0), torch.device("meta")).num_bytes

    def reserve(self, sizes: StateSizes) -> None:
        """Makes slots and checkpoints, in place of those that were made before."""
        self._tensors = None
        self._tensors = self._allocate(sizes, self._device)
        self._boundaries = np.zeros(sizes.num_slots, np.int32)

    def slots(self) -> list[Tensor]:
        """Returns the tensors of which a slot is a row each."""
        of = self.tensors
        return [torch.from_numpy(self._boundaries), of.inputs, of.states, of.keys, of.updates, of.decays]

    def follow(self, batch: StepBatch) -> npt.NDArray[np.int32]:
        """Loads the checkpoints of a step on the current stream, and returns the rows `[S, NUM_ROW_WORDS]` that the
        kernels read, on the host. Those of a step without states are padding."""
        rows = np.zeros((batch.num_sequences, NUM_ROW_WORDS), np.int32)
        rows[:, 0] = NO_SLOT
        if batch.states is None:
            return rows
        for load in batch.states.loads:
            self._load(load)
        slots, ends = batch.states.slots.numpy(), batch.context_lengths.numpy()
        starts = ends - np.diff(batch.query_starts.numpy())
        rows[:, 0], rows[:, 1] = slots, self._boundaries[slots]
        # As `boundary_after` of the kernels.
        self._boundaries[slots] = np.maximum(starts, ends - DELTA_GRID) // DELTA_GRID * DELTA_GRID
        for save in batch.states.saves:
            row = rows[save.row]
            assert row[2] < MAX_SAVES.value, "a sequence saves more states than there are places of them"
            first = 3 + 2 * row[2]
            row[first : first + 2] = save.position, save.checkpoint
            row[2] += 1
        return rows

    def _load(self, load: StateLoad) -> None:
        """Copies a checkpoint to a slot."""
        of = self.tensors
        num_past, num_places = of.saved_inputs.shape[2], of.inputs.shape[2]
        for index in range(max(0, num_past - load.position), num_past):
            place = (load.position - num_past + index) % num_places
            of.inputs[load.slot, :, place].copy_(of.saved_inputs[load.checkpoint, :, index])
        if self._shape.num_heads:
            of.states[load.slot].copy_(of.saved_states[load.checkpoint])
        self._boundaries[load.slot] = load.position

    def _allocate(self, sizes: StateSizes, device: torch.device) -> StateTensors:
        shape, layers, slots, saved = self._shape, self._num_layers, sizes.num_slots, sizes.num_checkpoints
        places = num_conv_places(shape.conv_width, sizes.max_drafts)
        heads, key_dim, value_dim = shape.num_heads, shape.key_dim, shape.value_dim

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return StateTensors(
            zeros(slots, layers, places, shape.channels, dtype=self._dtype),
            zeros(saved, layers, shape.conv_width - 1, shape.channels, dtype=self._dtype),
            zeros(slots, layers, heads, key_dim, value_dim),
            zeros(saved, layers, heads, key_dim, value_dim),
            zeros(slots, layers, shape.num_key_heads, DELTA_PLACES, key_dim),
            zeros(slots, layers, heads, DELTA_PLACES, value_dim),
            zeros(slots, layers, heads, DELTA_PLACES),
        )
