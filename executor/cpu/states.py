"""Memory of the recurrent layers of a packed model: slots and checkpoints as recurrent.h lays them out."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.common.model_files.recurrent import DELTA_GRID, DELTA_PLACES, MixerShape
from inflight.executor.checkpoint.shards import Shard
from inflight.executor.native.memory import huge_zeros
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.recurrent.short_conv import num_conv_places
from inflight.executor.step.batch import StepBatch

BOUNDARY_BYTES = 8  # of a slot of a gated delta net, in each layer
SHORT_CONVOLUTION, GATED_DELTA, MAMBA2 = 1, 2, 3  # `MixerKind` of recurrent.h


@dataclass(frozen=True, slots=True, eq=False)
class _LayerTensors:
    """`MixerMemory` of recurrent.h; None of short convolutions."""

    inputs: Tensor
    saved_inputs: Tensor
    states: Tensor | None = None
    saved_states: Tensor | None = None
    keys: Tensor | None = None
    updates: Tensor | None = None
    decays: Tensor | None = None


class NativeStates:
    """The states of a decoder. Its layers have the same boundaries, so these are kept once."""

    def __init__(self, mixer: MixerShape, layers: tuple[int, ...], num_layers: int, dtype: torch.dtype) -> None:
        self._mixer = mixer
        self._layers = layers
        self._num_layers = num_layers
        self._dtype = dtype
        self._tensors: tuple[_LayerTensors, ...] = ()
        self._memories: Any = None
        self._boundaries = torch.zeros(0, dtype=torch.int64)
        self._num_places = 0

    @property
    def grid_tokens(self) -> int:
        """A checkpoint can be taken at multiples of it."""
        return DELTA_GRID if self._mixer.num_heads else 1

    def slot_bytes(self, max_drafts: int) -> int:
        """Returns the memory of a slot for a number of drafts."""
        places = num_conv_places(self._mixer.conv_width, max_drafts)
        of_inputs = places * self._mixer.channels * self._dtype.itemsize
        return len(self._layers) * (of_inputs + self._delta_slot_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """The memory of a checkpoint."""
        of_inputs = (self._mixer.conv_width - 1) * self._mixer.channels * self._dtype.itemsize
        return len(self._layers) * (of_inputs + 4 * self._state_numbers)

    def reserve(self, sizes: StateSizes) -> None:
        """Makes slots and checkpoints, in place of those that were made before."""
        self._num_places = num_conv_places(self._mixer.conv_width, sizes.max_drafts)
        self._tensors = tuple(self._allocate(sizes) for _ in self._layers)
        self._boundaries = torch.zeros(sizes.num_slots, dtype=torch.int64)
        self._memories = (_Memory * self._num_layers)()
        for layer, tensors in zip(self._layers, self._tensors, strict=True):
            of_layer = (getattr(tensors, name) for name in _LayerTensors.__slots__)
            self._memories[layer] = _Memory(*(None if one is None else one.data_ptr() for one in of_layer))

    def slots(self) -> list[Tensor]:
        """Returns the tensors of which a slot is a row each."""
        names = ("inputs", "states", "keys", "updates", "decays")
        of_layers = (getattr(tensors, name) for tensors in self._tensors for name in names)
        return [self._boundaries, *(tensor for tensor in of_layers if tensor is not None)]

    def of_step(self, batch: StepBatch) -> _States:
        """Returns the states of a step. They keep what they point to alive."""
        rows = batch.states
        assert rows is not None and self._memories is not None, "a step of recurrent layers has no slots"
        loads = (_Load * len(rows.loads))(*(_Load(one.checkpoint, one.slot, one.position) for one in rows.loads))
        saves = (_Save * len(rows.saves))(*(_Save(one.row, one.position, one.checkpoint) for one in rows.saves))
        states = _States(
            memories=ctypes.addressof(self._memories),
            slots=rows.slots.data_ptr(),
            boundaries=self._boundaries.data_ptr(),
            loads=ctypes.addressof(loads),
            saves=ctypes.addressof(saves),
            num_loads=len(loads),
            num_saves=len(saves),
            num_places=self._num_places,
        )
        states.kept = (rows.slots, loads, saves)
        return states

    @property
    def _state_numbers(self) -> int:
        return self._mixer.num_heads * self._mixer.key_dim * self._mixer.value_dim

    @property
    def _delta_slot_bytes(self) -> int:
        mixer = self._mixer
        if not mixer.num_heads:
            return 0
        of_place = mixer.num_key_heads * mixer.key_dim + mixer.num_heads * mixer.value_dim + mixer.num_heads
        return 4 * (self._state_numbers + DELTA_PLACES * of_place) + BOUNDARY_BYTES

    def _allocate(self, sizes: StateSizes) -> _LayerTensors:
        mixer, slots, saved = self._mixer, sizes.num_slots, sizes.num_checkpoints
        inputs = torch.zeros((slots, self._num_places, mixer.channels), dtype=self._dtype)
        saved_inputs = torch.zeros((saved, mixer.conv_width - 1, mixer.channels), dtype=self._dtype)
        if not mixer.num_heads:
            return _LayerTensors(inputs, saved_inputs)
        heads, key_dim, value_dim = mixer.num_heads, mixer.key_dim, mixer.value_dim
        chunks = DELTA_PLACES // DELTA_GRID
        return _LayerTensors(
            inputs,
            saved_inputs,
            huge_zeros((slots, heads, key_dim, value_dim), torch.float32),
            huge_zeros((saved, heads, key_dim, value_dim), torch.float32),
            huge_zeros((slots, chunks, mixer.num_key_heads, key_dim, DELTA_GRID), torch.float32),
            huge_zeros((slots, chunks, heads, DELTA_GRID, value_dim), torch.float32),
            torch.zeros((slots, chunks, heads, DELTA_GRID)),
        )


def mixer_layout(mixer: MixerShape | None, shard: Shard) -> MixerLayout:
    """Returns the sizes of the recurrent layers of a rank as C++ takes them."""
    if mixer is None:
        return MixerLayout()
    kind = SHORT_CONVOLUTION
    if mixer.num_heads:
        kind = GATED_DELTA if mixer.corrects else MAMBA2
    norm_heads = 0 if kind == SHORT_CONVOLUTION else mixer.num_heads // mixer.num_key_heads
    own = shard.mixer(mixer)
    return MixerLayout(kind, *(getattr(own, name) for name in _SIZES), shard.num_ranks, shard.rank, norm_heads)


_SIZES = ("conv_width", "channels", "num_key_heads", "num_heads", "key_dim", "value_dim")


class MixerLayout(ctypes.Structure):
    """`MixerShape` of recurrent.h."""

    _fields_ = tuple((name, c_int64) for name in ("kind", *_SIZES, "num_ranks", "rank", "norm_heads"))


class _Memory(ctypes.Structure):
    """`MixerMemory` of recurrent.h."""

    _fields_ = tuple((name, c_void_p) for name in _LayerTensors.__slots__)


class _Load(ctypes.Structure):
    """`StateLoad` of recurrent.h."""

    _fields_ = tuple((name, c_int64) for name in ("checkpoint", "slot", "position"))


class _Save(ctypes.Structure):
    """`StateSave` of recurrent.h."""

    _fields_ = tuple((name, c_int64) for name in ("row", "position", "checkpoint"))


class _States(ctypes.Structure):
    """`StepStates` of recurrent.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("memories", "slots", "boundaries", "loads", "saves")),
        *((name, c_int64) for name in ("num_loads", "num_saves", "num_places")),
    )
    kept: tuple[Any, ...]
