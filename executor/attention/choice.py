"""Choice of the attention backend."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inflight.common.model_source import ModelError
from inflight.executor.attention.backend import AttentionBackend, KvShape
from inflight.executor.attention.cpu import SUFFIXES, CpuAttention, max_head_dim
from inflight.executor.attention.flashinfer import NAME as FLASHINFER
from inflight.executor.attention.flashinfer import import_wrapper
from inflight.executor.attention.reference import ReferenceAttention
from inflight.executor.device import is_gpu
from inflight.executor.native.build import BuildFailure
from inflight.executor.native.library import load_native
from inflight.executor.native.pool import NativePool

BACKEND_NAMES = ("auto", "reference", "cpu", "triton", FLASHINFER)
# The first GPUs with bfloat16 and with copies that run beside computation.
MIN_CAPABILITY = (8, 0)
MAX_TRITON_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend and the reason for it in one sentence. `is_fallback`: a faster one exists for this device but cannot
    run."""

    backend: AttentionBackend
    reason: str
    is_fallback: bool = False


def choose_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[KvShape] = (),
    instructions: str = "auto",
) -> BackendChoice:
    """Returns the named backend, or with `auto` the fastest that can run. Raises `ModelError` if the named one cannot.
    That of `flashinfer` is `triton`, whose place FlashInfer takes in some steps (`open_flashinfer`).

    `instructions` are what the `cpu` backend is built for; see `load_native`. It computes on as many threads as torch.
    """
    if name == "reference":
        return BackendChoice(ReferenceAttention(), "reference: plain torch, as requested")
    if name not in BACKEND_NAMES:
        raise ModelError(f"attention backend {name!r} is unknown; use one of {', '.join(BACKEND_NAMES)}")
    if name == FLASHINFER and isinstance(obstacle := import_wrapper(), str):
        raise ModelError(f"attention backend {name!r} cannot run: {obstacle}")
    wanted = name if name != "auto" else "triton" if is_gpu(device) else "cpu"
    found = _cpu_backend(device, dtype, shapes, instructions) if wanted == "cpu" else _triton_backend(device, shapes)
    if isinstance(found, BackendChoice):
        return found
    if name != "auto":
        raise ModelError(f"attention backend {name!r} cannot run: {found.reason}")
    return BackendChoice(ReferenceAttention(), f"reference (slow), because {found.reason}", is_fallback=True)


def _cpu_backend(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[KvShape], instructions: str
) -> BackendChoice | BuildFailure:
    if is_gpu(device):
        return BuildFailure(f"the device is {device.type}")
    if dtype not in SUFFIXES:
        return BuildFailure(f"it computes in {' and '.join(SUFFIXES.values())}, not {dtype}")
    library = load_native(instructions)
    if isinstance(library, BuildFailure):
        if instructions != "auto":
            raise ModelError(f"instruction set {instructions!r} cannot be used: {library.reason}")
        return library
    largest, limit = max((shape.head_dim for shape in shapes), default=0), max_head_dim(library)
    if largest > limit:
        return BuildFailure(f"heads of {largest} numbers are larger than {limit}")
    num_threads = torch.get_num_threads()
    backend = CpuAttention(library, NativePool(library, num_threads))
    how = f"built for {library.instructions}, on {num_threads} thread{'s' if num_threads > 1 else ''}"
    return BackendChoice(backend, f"cpu: C++ kernels {how}")


def _triton_backend(device: torch.device, shapes: Sequence[KvShape]) -> BackendChoice | BuildFailure:
    if importlib.util.find_spec("triton") is None:
        return BuildFailure("the package triton is not installed")
    largest = max((shape.head_dim for shape in shapes), default=0)
    if largest > MAX_TRITON_HEAD_DIM:
        return BuildFailure(f"heads of {largest} numbers are larger than {MAX_TRITON_HEAD_DIM}")
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    if not is_gpu(device):
        if not interprets:
            return BuildFailure(f"the device is {device.type}, and TRITON_INTERPRET=1 is not set")
        return BackendChoice(_triton_attention(), "triton: interpreted, very slowly, as TRITON_INTERPRET requests")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return BuildFailure(f"the GPU has compute capability {capability}, below {MIN_CAPABILITY}")
    return BackendChoice(_triton_attention(), "triton: kernels for this GPU")


def _triton_attention() -> AttentionBackend:
    from inflight.executor.attention.triton import TritonAttention  # imports triton, which a CPU does not need

    return TritonAttention()
