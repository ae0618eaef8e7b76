"""A recurrent layer on a GPU, between its two projections: a short convolution is one kernel, a gated delta net or
Mamba 2 three.

No launch depends on the content of a tensor, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.common.model_files.recurrent import DELTA_GRID, DELTA_PLACES, MixerShape
from inflight.executor.kernels.recurrent import (
    TILE,
    delta_inputs_kernel,
    delta_rule_kernel,
    gated_norm_kernel,
    mamba2_inputs_kernel,
    mamba2_norm_kernel,
    short_conv_kernel,
)
from inflight.executor.kernels.tiling import padded_dim, power_of_two
from inflight.executor.recurrent.gpu_states import StateTensors
from inflight.executor.recurrent.mixer import MixerWeights
from inflight.executor.step.batch import StepBatch

# Channels of a program of a short convolution.
TILE_CHANNELS = 128
# Columns of a state that a program of the delta rule computes, and rows that it has in registers: of a head of 128 x
# 128 numbers more rows would not fit on sm_90, with the loads of the next ones under way.
MAX_TILE_VALUES = 32
SLICE = 16
# Programs that share the positions of a sequence, where these do not depend on each other.
MAX_SPLITS = 16
# Of a norm of many heads, so that a thread has 16.
NUMBERS_OF_WARP = 512
OF_GRID = {"GRID": DELTA_GRID, "PLACES": DELTA_PLACES}


@dataclass(frozen=True, slots=True, eq=False)
class GpuMixer:
    """The weights of a recurrent layer, float32, and its number among the recurrent layers."""

    shape: MixerShape
    taps: Tensor
    vectors: tuple[Tensor, ...]
    number: int

    @classmethod
    def of(cls, weights: MixerWeights, number: int) -> GpuMixer:
        """Takes over the weights of a layer, apart from its projections."""
        return cls(
            weights.shape,
            weights.taps.contiguous(),
            tuple(vector.float().contiguous() for vector in weights.vectors),
            number,
        )

    def mix(self, projected: Tensor, batch: StepBatch, memory: StateTensors, epsilon: float) -> Tensor:
        """Computes the layer for the first projection of a step, `projected[T, columns]`, and returns what its output
        projection reads, `[T, depth]`. `epsilon` is that of the gated norm."""
        assert batch.state_rows is not None, "a step of recurrent layers has no rows of states"
        # Padding tokens belong to no sequence.
        make = torch.zeros if batch.is_padded else torch.empty
        outputs = make((projected.shape[0], self.shape.depth), dtype=projected.dtype, device=projected.device)
        compute = self._states if self.shape.num_heads else self._convolve
        compute(projected, batch, memory, outputs, epsilon)
        return outputs

    def _convolve(
        self, projected: Tensor, batch: StepBatch, memory: StateTensors, outputs: Tensor, epsilon: float
    ) -> None:
        channels, (inputs, saved) = self.shape.channels, self._inputs(memory)
        num_splits = _num_splits(batch)
        short_conv_kernel[(batch.num_sequences, -(-channels // TILE_CHANNELS), num_splits)](
            *(projected, self.taps, *self.vectors, *_rows(batch), inputs, saved, outputs),
            *(projected.stride(0), inputs.stride(0), saved.stride(0)),
            CHANNELS=channels,
            **self._places(inputs),
            NUM_SPLITS=num_splits,
            TILE_COLUMNS=TILE_CHANNELS,
        )

    def _states(
        self, projected: Tensor, batch: StepBatch, memory: StateTensors, outputs: Tensor, epsilon: float
    ) -> None:
        shape, device = self.shape, projected.device
        mixed, gates, unnormed = (
            torch.empty((projected.shape[0], size), dtype=torch.float32, device=device)
            for size in (shape.channels, 2 * shape.num_heads, shape.depth)
        )
        states, saved_states, keys, updates, decays = (
            tensor[:, self.number]
            for tensor in (memory.states, memory.saved_states, memory.keys, memory.updates, memory.decays)
        )
        (self._delta_inputs if shape.corrects else self._mamba2_inputs)(projected, batch, memory, mixed, gates)
        tile_values = min(MAX_TILE_VALUES, padded_dim(shape.value_dim))
        # The states of the positions behind the boundary that slots keep; a step of decodes has none.
        beyond = states
        if batch.num_tokens > batch.num_sequences:
            beyond = torch.empty((batch.num_sequences, *states.shape[1:]), dtype=states.dtype, device=device)
        delta_rule_kernel[(batch.num_sequences, shape.num_heads, -(-shape.value_dim // tile_values))](
            *(mixed, gates, *_rows(batch), states, saved_states, beyond, keys, updates, decays, unnormed),
            *(tensor.stride(0) for tensor in (states, saved_states, keys, updates, decays)),
            **self._sizes,
            **OF_GRID,
            SLICE=SLICE,
            TILE_VALUES=tile_values,
            CORRECTS=shape.corrects,
            num_stages=2,
        )
        norm = self._delta_norm if shape.corrects else self._mamba2_norm
        norm(*(unnormed, projected, mixed, gates, keys, decays, outputs), batch=batch, epsilon=epsilon)

    def _delta_inputs(
        self, projected: Tensor, batch: StepBatch, memory: StateTensors, mixed: Tensor, gates: Tensor
    ) -> None:
        shape, (inputs, saved), num_splits = self.shape, self._inputs(memory), _num_splits(batch)
        rates, gate_bias, _ = self.vectors
        delta_inputs_kernel[(batch.num_sequences, 2 * shape.num_key_heads + shape.num_heads + 1, num_splits)](
            *(projected, self.taps, rates, gate_bias, *_rows(batch), inputs, saved, mixed, gates),
            *(projected.stride(0), inputs.stride(0), saved.stride(0)),
            **self._sizes,
            **self._places(inputs),
            NUM_SPLITS=num_splits,
            TILE_COLUMNS=power_of_two(max(shape.key_dim, shape.value_dim)),
            PADDED_HEADS=power_of_two(shape.num_heads),
            QUERY_SCALE=shape.key_dim**-0.5,
        )

    def _mamba2_inputs(
        self, projected: Tensor, batch: StepBatch, memory: StateTensors, mixed: Tensor, gates: Tensor
    ) -> None:
        shape, (inputs, saved), num_splits = self.shape, self._inputs(memory), _num_splits(batch)
        bias, rates, gate_bias, _, _, limits = self.vectors
        mamba2_inputs_kernel[(batch.num_sequences, -(-shape.channels // TILE_CHANNELS) + 1, num_splits)](
            *(projected, self.taps, bias, rates, gate_bias, limits, *_rows(batch), inputs, saved, mixed, gates),
            *(projected.stride(0), inputs.stride(0), saved.stride(0)),
            NUM_HEADS=shape.num_heads,
            DEPTH=shape.depth,
            CHANNELS=shape.channels,
            **self._places(inputs),
            NUM_SPLITS=num_splits,
            TILE_COLUMNS=TILE_CHANNELS,
            PADDED_HEADS=power_of_two(shape.num_heads),
        )

    def _delta_norm(self, *tensors: Tensor, batch: StepBatch, epsilon: float) -> None:
        unnormed, projected, mixed, gates, keys, decays, outputs = tensors
        shape, num_splits = self.shape, _num_splits(batch)
        gated_norm_kernel[(batch.num_sequences, shape.num_heads, num_splits)](
            *(unnormed, projected, mixed, gates, self.vectors[2], *_rows(batch), keys, decays, outputs),
            *(projected.stride(0), keys.stride(0), decays.stride(0), epsilon),
            **self._sizes,
            **OF_GRID,
            PADDED_KEY=padded_dim(shape.key_dim),
            PADDED_VALUES=power_of_two(shape.value_dim),
            NUM_SPLITS=num_splits,
        )

    def _mamba2_norm(self, *tensors: Tensor, batch: StepBatch, epsilon: float) -> None:
        unnormed, projected, mixed, gates, keys, decays, outputs = tensors
        shape, num_splits = self.shape, _num_splits(batch)
        group = shape.num_heads // shape.num_key_heads
        padded_group = power_of_two(group * shape.value_dim)
        _, _, _, norm, skips, _ = self.vectors
        mamba2_norm_kernel[(batch.num_sequences, shape.num_key_heads, num_splits)](
            *(unnormed, projected, mixed, gates, skips, norm, *_rows(batch), keys, decays, outputs),
            *(projected.stride(0), keys.stride(0), decays.stride(0), epsilon),
            **self._sizes,
            **OF_GRID,
            PADDED_KEY=padded_dim(shape.key_dim),
            PADDED_GROUP=padded_group,
            PADDED_HEADS=power_of_two(group),
            NUM_SPLITS=num_splits,
            num_warps=max(1, min(16, padded_group // NUMBERS_OF_WARP)),
        )

    @property
    def _sizes(self) -> dict[str, int]:
        shape = self.shape
        return {
            "NUM_KEY_HEADS": shape.num_key_heads,
            "NUM_HEADS": shape.num_heads,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
            "CHANNELS": shape.channels,
        }

    def _inputs(self, memory: StateTensors) -> tuple[Tensor, Tensor]:
        return memory.inputs[:, self.number], memory.saved_inputs[:, self.number]

    def _places(self, inputs: Tensor) -> dict[str, int]:
        places = inputs.shape[1]
        return {"WIDTH": self.shape.conv_width, "PLACES": places, "PADDED_PLACES": power_of_two(places)}


def _rows(batch: StepBatch) -> tuple[Tensor, Tensor, Tensor]:
    assert batch.state_rows is not None
    return batch.state_rows, batch.query_starts, batch.context_lengths


def _num_splits(batch: StepBatch) -> int:
    """Returns programs for each sequence: one where every sequence has one token. It is a power of two, since a kernel
    is compiled for each."""
    if batch.num_tokens == batch.num_sequences:
        return 1
    return min(MAX_SPLITS, power_of_two(-(-batch.num_tokens // int(TILE.value))))
