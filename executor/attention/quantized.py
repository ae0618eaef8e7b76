"""Types of the KV cache, and the rounding of keys and values to int8, with a scale for each token and KV head. FP8 is
rounded by `inflight.executor.kernels.fp8`.

The C++ kernels round the same way, bit by bit (`quantize` of native/attention.h), so the KV of a token is a function of
its key and value alone. A token's own KV is rounded before any query reads it, whichever step wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.common.model_source import ModelError
from inflight.executor.attention.backend import AttentionBackend
from inflight.executor.device import is_gpu

LARGEST = 127
# A smaller scale is 0: the kernels treat denormal numbers as zero.
MIN_SCALE = 1e-30
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
NAMES = ("auto", "bfloat16", "float32", *QUANTIZED)
# The first GPUs with conversions to and from e4m3.
MIN_FP8_CAPABILITY = (8, 9)


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
    if name not in ("auto", dtype_name, *QUANTIZED):
        raise ModelError(
            f"kv_cache_dtype {name!r} is not the model's dtype; use auto, {dtype_name}, {', '.join(QUANTIZED)}"
        )
    if skip_layers and name not in QUANTIZED:
        raise ModelError(f"kv_cache_dtype_skip_layers needs kv_cache_dtype {' or '.join(QUANTIZED)}")
    for layer in skip_layers:
        if not 0 <= layer < num_layers:
            raise ModelError(f"kv_cache_dtype_skip_layers: the model has layers 0 to {num_layers - 1}, not {layer}")
    if name not in QUANTIZED:
        return (dtype,) * num_layers
    return tuple(dtype if layer in skip_layers else QUANTIZED[name] for layer in range(num_layers))


def check_backend(layer_dtypes: Sequence[torch.dtype], backend: AttentionBackend, device: torch.device) -> None:
    """Raises `ModelError` if the backend cannot keep KV of the layers' types on the device."""
    needed = {"int8": "a CPU", "fp8": "the triton backend on a GPU"}
    for name, dtype in QUANTIZED.items():
        if dtype in layer_dtypes and dtype not in backend.quantized_kv_dtypes:
            raise ModelError(
                f"kv_cache_dtype {name} needs {needed[name]}, and the attention backend is {backend.name} on "
                f"{device.type}"
            )
    if torch.float8_e4m3fn in layer_dtypes:
        check_fp8_device("kv_cache_dtype", device)


def check_fp8_device(setting: str, device: torch.device) -> None:
    """Raises `ModelError` if the device is a GPU without conversions to and from e4m3."""
    if not is_gpu(device):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_FP8_CAPABILITY:
        least, found = (".".join(map(str, version)) for version in (MIN_FP8_CAPABILITY, capability))
        raise ModelError(f"{setting} fp8 needs a GPU of compute capability {least} or later, and this one has {found}")


def kv_dtype_name(layer_dtypes: Sequence[torch.dtype], dtype: torch.dtype) -> str:
    """Returns the type of the KV cache of a model in `dtype`, and which layers of a quantized one are excepted."""
    plain = str(dtype).removeprefix("torch.")
    excepted = ",".join(str(layer) for layer, kv_dtype in enumerate(layer_dtypes) if kv_dtype == dtype)
    for name, quantized in QUANTIZED.items():
        if quantized in layer_dtypes:
            return f"{name} except {plain} in layers {excepted}" if excepted else name
    return plain
