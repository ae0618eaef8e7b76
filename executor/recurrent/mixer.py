"""Interface of a recurrent layer: a mixer of tokens whose memory has a fixed size, in slots.

A mixer sees a step as the new tokens of all its sequences in one flat row, as attention does. The output at a position
is a function of the inputs up to it, computed by one formula however the positions are divided into steps, so that
decode, chunks of a prompt, drafts, recomputation and a loaded checkpoint give the same bits.

A slot has what the next positions of a sequence need. Drafts that were not accepted are behind the next step's first
position: the step overwrites what they left. A slot that is given to another sequence need not be cleared, because
nothing before position 0 is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from inflight.common.model_files.recurrent import heads_of_rank, indivisible_mixer
from inflight.executor.step.batch import StepBatch

# Heads or channels, and the numbers of each.
Part = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MixerShape:
    """Sizes of a recurrent layer: a convolution of `channels` over `conv_width` positions and, in a gated delta net,
    `num_heads` states of `key_dim` times `value_dim` numbers on `num_key_heads` heads of keys. Without it, in a short
    convolution, these are 0. Mamba 2 is a gated delta net whose tokens are not corrected (`corrects`): its heads of
    keys are its groups."""

    conv_width: int
    channels: int
    num_key_heads: int = 0
    num_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    corrects: bool = True

    @property
    def depth(self) -> int:
        """Numbers of a position before the output projection."""
        return self.num_heads * self.value_dim or self.channels

    @property
    def conv_parts(self) -> tuple[Part, ...]:
        """The channels of the convolution: queries, keys and values of a gated delta net; x, B and C of Mamba 2."""
        if not self.num_heads:
            return ((self.channels, 1),)
        keys, values = (self.num_key_heads, self.key_dim), (self.num_heads, self.value_dim)
        return (keys, keys, values) if self.corrects else (values, keys, keys)

    @property
    def input_parts(self) -> tuple[Part, ...]:
        """The rows of the projections in front of it: B, C and x of a short convolution; beside the channels z, b and a
        of a gated delta net, or z and dt of Mamba 2."""
        if not self.num_heads:
            return self.conv_parts * 3
        values, numbers = (self.num_heads, self.value_dim), (self.num_heads, 1)
        return (*self.conv_parts, values, numbers, numbers) if self.corrects else (values, *self.conv_parts, numbers)

    def indivisible_reason(self, num_ranks: int) -> str | None:
        """Returns why it cannot be divided between so many ranks; None if it can."""
        return indivisible_mixer(self.channels, self.num_key_heads, self.num_heads, num_ranks, self.corrects)

    def of_rank(self, num_ranks: int) -> MixerShape:
        """Returns the heads, or channels, that each rank has. Ranks may have the same keys of Mamba 2."""
        if not self.num_heads:
            return replace(self, channels=self.channels // num_ranks)
        num_key_heads, num_heads = heads_of_rank(self.num_key_heads, self.num_heads, num_ranks)
        own = replace(self, num_key_heads=num_key_heads, num_heads=num_heads)
        return replace(own, channels=sum(count * size for count, size in own.conv_parts))


@dataclass(frozen=True, slots=True, eq=False)
class MixerWeights:
    """The weights of a recurrent layer, for a native forward pass. `inputs` are the linear layers whose outputs, one
    behind the other, are what the layer mixes. The rest is float32: `taps[conv_width, channels]`, the oldest first, and
    the `vectors` that follow them in the C++ code (recurrent.h)."""

    shape: MixerShape
    inputs: tuple[Any, ...]
    output: Any
    taps: Tensor
    vectors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The memory of a recurrent layer: slots, checkpoints, and how many drafts a step verifies at most."""

    num_slots: int
    num_checkpoints: int
    max_drafts: int


class StateStep:
    """What the recurrent layers need of a step: where the tokens of each sequence are. Made once for all layers.

    `starts[S]` and `ends[S]` are the first position of each sequence in the step, and the one behind its last.
    `firsts[S]` are the first tokens in the flat row, and `rows[T]` the sequence of each token.
    """

    def __init__(self, batch: StepBatch) -> None:
        assert batch.states is not None, "a step of recurrent layers has no slots"
        self.batch = batch
        self.slots = batch.states.slots
        self.loads = batch.states.loads
        self.saves = batch.states.saves
        query_starts = batch.query_starts.long()
        lengths = query_starts[1:] - query_starts[:-1]
        self.firsts = query_starts[:-1]
        self.ends = batch.context_lengths.long()
        self.starts = self.ends - lengths
        self.rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)


class LayerMemory(Protocol):
    """The slots and checkpoints of a layer."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...

    @property
    def slots(self) -> tuple[Tensor, ...]:
        """The tensors of which a slot is a row each."""
        ...


class Mixer(Protocol):
    """A recurrent layer without what surrounds it in the network. `grid_tokens`: a checkpoint can be taken at multiples
    of it."""

    grid_tokens: int

    def allocate(self, sizes: StateSizes, dtype: torch.dtype, device: torch.device) -> LayerMemory:
        """Allocates the memory of a layer, for activations of `dtype`."""
        ...

    def weights(self) -> MixerWeights:
        """Returns the weights, as they are now: they may have been rounded since it was made."""
        ...

    def mix(self, inputs: Tensor, memory: Any, step: StateStep) -> Tensor:
        """Computes the layer for `inputs[T, hidden_size]` and returns the same shape. `memory` is what it allocated."""
        ...
