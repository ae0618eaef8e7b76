"""Linear layers whose weights stay as their checkpoint has them: the reference forward pass of quantized models.

It takes little memory, and time to make the dense matrix at every call. The native forward pass packs the weights for
its own kernels instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.executor.checkpoint.expert_matrices import has_coded_experts
from inflight.executor.checkpoint.quantized_weight import PIECE_NUMBERS, Coded, FloatWeight, dense_matrix


class QuantizedLinear(nn.Module):
    """An `nn.Linear` with a matrix of codes."""

    def __init__(self, weight: Coded, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight: Coded = weight
        self.bias = bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes `inputs @ weight.T + bias` with the weight rounded to the type of `inputs`."""
        outputs = inputs.new_empty((*inputs.shape[:-1], self.out_features))
        num_rows = max(1, PIECE_NUMBERS // self.in_features)
        for start in range(0, self.out_features, num_rows):
            piece = self.weight.rows(start, start + num_rows).dequantized().to(inputs.dtype)
            outputs[..., start : start + num_rows] = functional.linear(inputs, piece)
        return outputs if self.bias is None else outputs.add_(self.bias)


def is_quantized(network: nn.Module) -> bool:
    """Returns whether a layer has a quantized weight, or experts with such."""
    return any(isinstance(module, QuantizedLinear) for module in network.modules()) or has_coded_experts(network)


def expand_fp8(network: nn.Module, dtype: torch.dtype) -> None:
    """Replaces layers in FP8 by dense ones."""
    make_dense(network, dtype, lambda layer: isinstance(layer.weight, FloatWeight) and layer.weight.bits == 8)


def make_dense(
    network: nn.Module, dtype: torch.dtype, is_chosen: Callable[[QuantizedLinear], bool] = lambda layer: True
) -> None:
    """Replaces the quantized layers that are chosen by dense ones, one after the other."""
    for name, module in [*network.named_modules()]:
        if isinstance(module, QuantizedLinear) and is_chosen(module):
            linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            linear.weight = nn.Parameter(dense_matrix(module.weight, dtype), requires_grad=False)
            linear.bias = module.bias  # type: ignore[assignment]
            network.set_submodule(name, linear)
