"""Rounding of keys and values to int8, with a scale for each token and KV head.

The C++ kernels round the same way, bit by bit (`quantize` of native/attention.h), so the KV of a token is a function of
its key and value alone. A token's own KV is rounded before any query reads it, whichever step wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.model_source import ModelError

LARGEST = 127
# A smaller scale is 0: the kernels treat denormal numbers as zero.
MIN_SCALE = 1e-30
NAMES = ("auto", "bfloat16", "float32", "int8")


def quantize(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `numbers[..., head_dim]` in int8 and their scales `[...]` in float32: the largest number is 127 times the
    scale.

    A NaN or an infinity makes the scale so, and the numbers 0.
    """
    numbers = numbers.float()
    scales = numbers.abs().amax(-1) / LARGEST
    scales = torch.where(scales < MIN_SCALE, 0.0, scales)
    is_usable = (scales > 0) & scales.isfinite()
    ratios = (numbers / scales[..., None]).round().clamp(-LARGEST, LARGEST)
    return torch.where(is_usable[..., None], ratios, 0.0).to(torch.int8), scales


def kv_dtypes(name: str, skip_layers: Sequence[int], dtype: torch.dtype, num_layers: int) -> tuple[torch.dtype, ...]:
    """Returns the type of the KV of each layer of a model in `dtype`. Raises `ModelError` for a setting that does not
    fit."""
    if name not in NAMES:
        raise ModelError(f"kv_cache_dtype {name!r} is unknown; use {', '.join(NAMES)}")
    dtype_name = str(dtype).removeprefix("torch.")
    if name not in ("auto", dtype_name, "int8"):
        raise ModelError(f"kv_cache_dtype {name!r} is not the model's dtype; use auto, {dtype_name} or int8")
    if skip_layers and name != "int8":
        raise ModelError("kv_cache_dtype_skip_layers needs kv_cache_dtype int8")
    for layer in skip_layers:
        if not 0 <= layer < num_layers:
            raise ModelError(f"kv_cache_dtype_skip_layers: the model has layers 0 to {num_layers - 1}, not {layer}")
    if name != "int8":
        return (dtype,) * num_layers
    return tuple(dtype if layer in skip_layers else torch.int8 for layer in range(num_layers))
