"""Interface of a recurrent layer: a mixer of tokens whose memory has a fixed size, in slots.

A mixer sees a step as the new tokens of all its sequences in one flat row, as attention does. The output at a position
is a function of the inputs up to it, computed by one formula however the positions are divided into steps, so that
decode, chunks of a prompt, drafts, recomputation and a loaded checkpoint give the same bits.

A slot has what the next positions of a sequence need. Drafts that were not accepted are behind the next step's first
position: the step overwrites what they left. A slot that is given to another sequence need not be cleared, because
nothing before position 0 is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from inflight.common.model_files.recurrent import MixerShape
from inflight.executor.step.batch import StepBatch


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
