"""Which attention backend runs, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.model_source import ModelError
from executor.attention.backend import AttentionBackend, KvShape
from executor.attention.cpu import SUFFIXES, CpuAttention, load_kernels
from executor.attention.reference import ReferenceAttention
from executor.native.build import BuildFailure

BACKEND_NAMES = ("auto", "reference", "cpu")


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend and why it is the one, in a sentence. `is_fallback`: a faster one is for this device but cannot run."""

    backend: AttentionBackend
    reason: str
    is_fallback: bool = False


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, shapes: Sequence[KvShape] = ()
) -> BackendChoice:
    """The named backend, or with `auto` the fastest that can run; raises `ModelError` if the named one cannot."""
    if name == "reference":
        return BackendChoice(ReferenceAttention(), "reference: plain torch, as asked for")
    if name == "triton":
        raise ModelError("attention backend 'triton' is not built yet; use auto, reference or cpu")
    if name not in BACKEND_NAMES:
        raise ModelError(f"attention backend {name!r} is unknown; use one of {', '.join(BACKEND_NAMES)}")
    if name == "auto" and device.type != "cpu":
        return BackendChoice(ReferenceAttention(), f"reference: there is no other backend for {device.type} yet")
    found = _cpu_backend(device, dtype, shapes)
    if isinstance(found, BackendChoice):
        return found
    if name == "cpu":
        raise ModelError(f"attention backend 'cpu' cannot run: {found.reason}")
    return BackendChoice(ReferenceAttention(), f"reference (slow), because {found.reason}", is_fallback=True)


def _cpu_backend(device: torch.device, dtype: torch.dtype, shapes: Sequence[KvShape]) -> BackendChoice | BuildFailure:
    if device.type != "cpu":
        return BuildFailure(f"the device is {device.type}")
    if dtype not in SUFFIXES:
        return BuildFailure(f"it computes in {' and '.join(SUFFIXES.values())}, not {dtype}")
    kernels = load_kernels()
    if isinstance(kernels, BuildFailure):
        return kernels
    backend = CpuAttention(kernels)
    largest = max((shape.head_dim for shape in shapes), default=0)
    if largest > backend.max_head_dim:
        return BuildFailure(f"heads of {largest} numbers are larger than {backend.max_head_dim}")
    how = "with bfloat16 instructions" if backend.has_bfloat16_instructions else "without bfloat16 instructions"
    return BackendChoice(backend, f"cpu: C++ kernels built for this processor, {how}")
