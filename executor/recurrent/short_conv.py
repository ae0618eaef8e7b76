"""Gated short convolution of LFM2: the state is the last inputs of a causal convolution of each channel.

    B, C, x = in_proj(inputs);  y[t] = sum over j of w[j] * (B * x)[t - L + 1 + j];  outputs = out_proj(C * y)

The sums are float32 and have one order, an operation on single numbers each, so they do not depend on the other rows.
What a slot and a checkpoint keep is `B * x` in the type of the activations, as transformers' cache does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inflight.common.model_files.recurrent import MixerShape
from inflight.executor.recurrent.mixer import MixerWeights, StateSizes, StateStep


def num_conv_places(width: int, max_drafts: int) -> int:
    """Returns the inputs that a slot of a convolution over `width` positions keeps.

    Of a sequence whose next position is p, a step reads inputs from p - max_drafts - width + 2 on, because drafts may
    have passed the place of a checkpoint. The step before wrote up to p + max_drafts - 1.
    """
    return max(1, width - 1, width - 2 + 2 * max_drafts)


@dataclass(frozen=True, slots=True, eq=False)
class ConvMemory:
    """The newest inputs of a convolution, `inputs[slots, places, channels]`, that of position p at place `p % places`;
    and the `width - 1` inputs before each checkpoint, `checkpoints[checkpoints, width - 1, channels]`, in order."""

    inputs: Tensor
    checkpoints: Tensor

    @classmethod
    def allocate(
        cls, num_channels: int, width: int, sizes: StateSizes, dtype: torch.dtype, device: torch.device
    ) -> ConvMemory:
        """Allocates the memory of a convolution over `width` positions."""
        num_places = num_conv_places(width, sizes.max_drafts)
        return cls(
            torch.zeros((sizes.num_slots, num_places, num_channels), dtype=dtype, device=device),
            torch.zeros((sizes.num_checkpoints, width - 1, num_channels), dtype=dtype, device=device),
        )

    @property
    def num_bytes(self) -> int:
        return self.inputs.nbytes + self.checkpoints.nbytes

    @property
    def slots(self) -> tuple[Tensor, ...]:
        return (self.inputs,)

    def taps(self, inputs: Tensor, step: StateStep) -> list[Tensor]:
        """Returns the inputs that each of the `width` weights multiplies, `[T, channels]` each, for new `inputs` of
        that shape; stores these, and loads and saves checkpoints."""
        num_past, num_places = self.checkpoints.shape[1], self.inputs.shape[1]
        for load in step.loads:
            past = torch.arange(load.position - num_past, load.position)
            self.inputs[load.slot, past % num_places] = self.checkpoints[load.checkpoint]
        # The inputs before each sequence's first new one, then the new ones.
        past = step.starts[:, None] - num_past + torch.arange(num_past)
        history = self.inputs[step.slots[:, None], past % num_places]
        history[past < 0] = 0
        known = torch.cat((history.flatten(0, 1), inputs))
        offsets = torch.arange(len(step.rows)) - step.firsts[step.rows]
        taps = []
        for distance in range(num_past, -1, -1):
            places = offsets - distance
            is_new = places >= 0
            before = step.rows * num_past + num_past + places
            taps.append(known[torch.where(is_new, len(history) * num_past + step.firsts[step.rows] + places, before)])
        self._save(inputs, step)
        self._store(inputs, step)
        return taps

    def _store(self, inputs: Tensor, step: StateStep) -> None:
        """Keeps the last of the new inputs. Of two with the same place, the first is not needed any more."""
        num_places = self.inputs.shape[1]
        positions = step.batch.positions
        kept = torch.nonzero(positions >= step.ends[step.rows] - num_places)[:, 0]
        self.inputs[step.slots[step.rows[kept]], positions[kept] % num_places] = inputs[kept]

    def _save(self, inputs: Tensor, step: StateStep) -> None:
        """Saves checkpoints, from the inputs of earlier steps, which must be there still, and the new ones."""
        num_past, num_places = self.checkpoints.shape[1], self.inputs.shape[1]
        for save in step.saves:
            start, first = int(step.starts[save.row]), int(step.firsts[save.row])
            past = torch.arange(save.position - num_past, save.position)
            earlier = self.inputs[step.slots[save.row], past % num_places]
            new = inputs[(first + past - start).clamp(min=0)]
            state = torch.where((past < start)[:, None], earlier, new)
            state[past < 0] = 0
            self.checkpoints[save.checkpoint] = state


def convolve(taps: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Returns the sum of `taps[i] * weights[i]` in float32, in this order: `[T, channels]` of each and `[channels]`."""
    mixed = taps[0].float() * weights[0]
    for tap, weight in zip(taps[1:], weights[1:], strict=True):
        mixed = mixed + tap.float() * weight
    return mixed


class ShortConvolution(nn.Module):
    """`Mixer` with the weights of a short convolution of transformers."""

    grid_tokens = 1

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = source.in_proj, source.out_proj
        weight: Tensor = source.conv.weight.detach()  # [channels, 1, width]
        self._taps = [tap.contiguous() for tap in weight[:, 0].float().unbind(1)]
        self._bias: Tensor | None = None if source.conv.bias is None else source.conv.bias.detach().float()

    def allocate(self, sizes: StateSizes, dtype: torch.dtype, device: torch.device) -> ConvMemory:
        return ConvMemory.allocate(len(self._taps[0]), len(self._taps), sizes, dtype, device)

    def weights(self) -> MixerWeights:
        bias = torch.zeros_like(self._taps[0]) if self._bias is None else self._bias
        shape = MixerShape(len(self._taps), len(bias))
        return MixerWeights(shape, (self.in_proj,), self.out_proj, torch.stack(self._taps), (bias,))

    def mix(self, inputs: Tensor, memory: ConvMemory, step: StateStep) -> Tensor:
        before, after, values = self.in_proj(inputs).chunk(3, -1)
        taps = memory.taps(before * values, step)
        mixed = convolve(taps, self._taps)
        if self._bias is not None:
            mixed = mixed + self._bias
        outputs: Tensor = self.out_proj(after * mixed.to(inputs.dtype))
        return outputs
