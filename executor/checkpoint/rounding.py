"""Rounding of a model's matrices to 4 and 8 bits when it is loaded, for checkpoints that are not quantized.

Each group of a matrix's input columns is rounded to the nearest of evenly spaced numbers: 16 that cover the group and
contain 0, or 255 around 0. The network then computes with the rounded matrices, so it is the reference of every
other forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.quantized_linear import QuantizedLinear, is_quantized
from inflight.executor.checkpoint.quantized_weight import QuantizedWeight, pack_halves

# Of input columns, the first that divides a matrix's. Else the whole row is a group.
GROUP_SIZES = (32, 16)


def round_linears(network: PreTrainedModel) -> int:
    """Replaces the linear layers by layers with weights of 4 bits, and the output layer by one of 8 bits, one after the
    other. Returns their number. Experts, routers and embeddings stay as they are.

    Raises:
        ModelError: the checkpoint is quantized.
    """
    if is_quantized(network):
        raise ModelError("weight_dtype int4 is for models that are not quantized, and this checkpoint is")
    head = network.get_output_embeddings()
    layers = [(name, module) for name, module in network.named_modules() if type(module) is nn.Linear]
    rounded = [(name, module) for name, module in layers if module.in_features % 2 == 0]
    for name, linear in rounded:
        bits = 8 if linear is head else 4
        bias: Any = linear.bias
        network.set_submodule(name, QuantizedLinear(round_to(linear.weight.detach(), bits), bias))
    return len(rounded)


def round_to(weight: Tensor, bits: int, group_size: int | None = None) -> QuantizedWeight:
    """Rounds a matrix `[out, in]` to 4 bits with a scale and a zero, or to 8 bits with a scale, for each group of `in`.

    The zero is one of the 16 codes, so a number near 0 stays near 0. A grid that starts at the group's least number
    moves it by up to half a step, and perplexity suffers where its column meets large activations
    (docs/design/cpu-kernels.md).
    Numbers that are not finite are not supported.
    """
    num_rows, num_columns = weight.shape
    size = group_size or next((size for size in GROUP_SIZES if num_columns % size == 0), num_columns)
    groups = weight.float().view(num_rows, -1, size)
    if bits == 4:
        least, largest = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
        scale = (largest - least) / 15
        zero = _steps(-least[..., None], scale)[..., 0]
        offset = -zero * scale
        codes = (_steps(groups, scale) + zero[..., None]).clamp_(0, 15)
    else:
        scale = groups.abs().amax(-1) / 127
        offset = scale * -128
        codes = _steps(groups, scale).clamp_(-127, 127) + 128
    codes = codes.view(num_rows, num_columns).to(torch.uint8)
    return QuantizedWeight(pack_halves(codes) if bits == 4 else codes, scale, offset, bits, size)


def _steps(numbers: Tensor, scale: Tensor) -> Tensor:
    return (numbers / torch.where(scale == 0, 1.0, scale)[..., None]).round_()
