"""The device that computes: its choice, its name, and its memory."""

from __future__ import annotations

import torch

from inflight.common.model_source import ModelError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device(name: str) -> torch.device:
    """Returns the named device; `auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' is requested, but torch finds no GPU")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU; on a CPU that of the interpreter of its kernels."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreted"


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the named dtype; `auto` is bfloat16 if the processor multiplies it, else float32, which is faster
    there."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ModelError(f"dtype {name!r} is unknown; use auto, {' or '.join(DTYPES)}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_instructions else torch.float32


def free_device_bytes(device: torch.device) -> int | None:
    """Returns the free memory of a GPU; None for a CPU, which has that of the host."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None
