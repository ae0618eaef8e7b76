"""Mamba 2 of Granite 4 and Nemotron-H: the state is a matrix for each head, which a token decays and adds to.

    S[t] = exp(dt[t] * A) * S[t-1] + B[t] (dt[t] * x[t])ᵀ,  y[t] = S[t]ᵀ C[t] + D * x[t]

This is the delta rule without its correction: B are keys and C queries, which the heads of a group share, dt * x are
updates and dt * A gates. So slots, boundaries and tiles are those of `gated_delta`. In front of it is a convolution of
x, B and C with a bias and SiLU, behind it the norm of y * SiLU(z), of each group. Source: Dao and Gu, arXiv 2405.21060.

`dt` is limited as transformers limits it where it computes a whole prompt, at every position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.common.model_files.recurrent import DELTA_GRID, MixerShape
from inflight.common.model_source import ModelError
from inflight.executor.recurrent.gated_delta import DeltaInputs, DeltaMemory, delta_rule
from inflight.executor.recurrent.mixer import MixerWeights, StateSizes, StateStep
from inflight.executor.recurrent.short_conv import convolve


class Mamba2(nn.Module):
    """`Mixer` with the weights of a layer of Mamba 2 of transformers."""

    grid_tokens = DELTA_GRID

    def __init__(self, source: Any) -> None:
        super().__init__()
        if source.activation not in ("silu", "swish"):
            raise ModelError(f"the activation of its Mamba layers is {source.activation}, not silu")
        self.in_proj, self.out_proj, self.norm = source.in_proj, source.out_proj, source.norm
        weight: Tensor = source.conv1d.weight.detach()  # [channels, 1, width]
        self._taps = [tap.contiguous() for tap in weight[:, 0].float().unbind(1)]
        bias: Tensor | None = source.conv1d.bias
        self._conv_bias = torch.zeros_like(self._taps[0]) if bias is None else bias.detach().float()
        self._rates: Tensor = -source.A_log.detach().float().exp()
        self._step_bias: Tensor = source.dt_bias.detach().float()
        self._skips: Tensor = source.D.detach().float()
        self._least, self._most = map(float, source.time_step_limit)
        self._shape = MixerShape(
            len(self._taps),
            len(self._taps[0]),
            source.n_groups,
            source.num_heads,
            source.ssm_state_size,
            source.head_dim,
            corrects=False,
        )

    def allocate(self, sizes: StateSizes, dtype: torch.dtype, device: torch.device) -> DeltaMemory:
        return DeltaMemory.allocate(self._shape, sizes, dtype, device)

    def weights(self) -> MixerWeights:
        limits = torch.tensor((self._least, self._most))
        norm: Tensor = self.norm.weight.detach().float()
        vectors = (self._conv_bias, self._rates, self._step_bias, norm, self._skips, limits)
        return MixerWeights(self._shape, (self.in_proj,), self.out_proj, torch.stack(self._taps), vectors)

    def mix(self, inputs: Tensor, memory: DeltaMemory, step: StateStep) -> Tensor:
        shape = self._shape
        sizes = (shape.depth, shape.channels, shape.num_heads)
        z, mixed, steps = self.in_proj(inputs).split(sizes, -1)
        mixed = convolve(memory.conv.taps(mixed, step), self._taps) + self._conv_bias
        mixed = functional.silu(mixed).to(inputs.dtype).float()
        key_size = shape.num_key_heads * shape.key_dim
        values, keys, queries = mixed.split((shape.depth, key_size, key_size), -1)
        group = shape.num_heads // shape.num_key_heads
        keys, queries = (
            part.unflatten(-1, (shape.num_key_heads, shape.key_dim)).repeat_interleave(group, 1)
            for part in (keys, queries)
        )
        values = values.unflatten(-1, (shape.num_heads, shape.value_dim))
        steps = functional.softplus(steps.float() + self._step_bias).clamp(self._least, self._most)
        updates = values * steps[..., None]
        outputs = delta_rule(DeltaInputs(queries, keys, updates, self._rates * steps, None), memory, step)
        outputs = outputs + self._skips[:, None] * values
        result: Tensor = self.out_proj(self.norm(outputs.flatten(1), z).to(inputs.dtype))
        return result
