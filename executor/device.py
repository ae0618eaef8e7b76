"""The device that computes: its choice, its name, its memory, and what the host exchanges with it without waiting.

A CPU computes at once, where a GPU is given work that it does later.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from inflight.common.model_source import ModelError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device(name: str) -> torch.device:
    """Returns the named device; `auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' is requested, but torch finds no GPU")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def is_gpu(device: torch.device) -> bool:
    """Returns whether a device is a GPU. Any other is a CPU."""
    return device.type == "cuda"


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU; on a CPU that of the interpreter of its kernels."""
    return torch.cuda.get_device_name(device) if is_gpu(device) else "interpreted"


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the named dtype; `auto` is bfloat16 if the processor multiplies it, else float32, which is faster
    there."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ModelError(f"dtype {name!r} is unknown; use auto, {' or '.join(DTYPES)}")
    if is_gpu(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_instructions else torch.float32


def free_device_bytes(device: torch.device) -> int | None:
    """Returns the free memory of a GPU; None for a CPU, which has that of the host."""
    return int(torch.cuda.mem_get_info(device)[0]) if is_gpu(device) else None


def gpu_bytes(device: torch.device) -> int:
    """Returns the whole memory of a GPU; 0 for a CPU."""
    return int(torch.cuda.mem_get_info(device)[1]) if is_gpu(device) else 0


def host_zeros(count: int, device: torch.device) -> Tensor:
    """Returns zeros `[count]` int32 on the host, which a device copies without making the host wait."""
    return torch.zeros(count, dtype=torch.int32, pin_memory=is_gpu(device))


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies from the host without waiting for the device. A copy from memory that is not pinned would wait for the
    steps launched."""
    return values.pin_memory().to(device, non_blocking=True) if is_gpu(device) else values.to(device)


def to_host(values: Tensor) -> Tensor:
    """Starts the copy to the host. It is complete once the device has reached this point of its stream."""
    if not is_gpu(values.device):
        return values
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return on_host.copy_(values, non_blocking=True)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event that a thread can wait for: that the device has reached this point of its stream. None on a CPU,
    which computes at once."""
    if not is_gpu(device):
        return None
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


def is_lost(error: Exception) -> bool:
    """Returns whether an error of a step shows that its device computes no more. CUDA keeps every error except a lack
    of memory: each later call on the device fails, too. Libraries report it in words of their own, as cuBLAS does
    (`CUBLAS_STATUS_EXECUTION_FAILED`), so after any other error the device is asked."""
    return _is_kept(error) or not _answers()


def _is_kept(error: Exception) -> bool:
    """Returns whether CUDA keeps an error. Triton reports those of its launches as RuntimeError."""
    comes_from_device = isinstance(error, torch.AcceleratorError) or str(error).startswith("Triton Error [CUDA]")
    return comes_from_device and "out of memory" not in str(error)


def _answers() -> bool:
    """Returns whether the GPU ends what was launched; true without one."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return not _is_kept(error)
    return True


class StepTimer:
    """Begin and end of a step on the GPU, by events in its stream; on a CPU by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.began_s = time.perf_counter()
        is_cuda = is_gpu(device)
        self._began = torch.cuda.Event(enable_timing=True) if is_cuda else None
        # Blocking: a waiting thread sleeps and leaves the core to others.
        self._ended = torch.cuda.Event(enable_timing=True, blocking=True) if is_cuda else None
        self._copied: torch.cuda.Event | None = None
        self._copied_s = self._ended_s = self.began_s
        if self._began is not None:
            self._began.record()

    def copied(self) -> None:
        """Marks the end of the copies between device and host memory."""
        self._copied_s = time.perf_counter()
        if self._began is not None:
            self._copied = torch.cuda.Event(enable_timing=True)
            self._copied.record()

    def copies_took_s(self) -> float:
        """Returns the seconds that the copies took, 0 without any. Must be called after `wait`."""
        if self._began is None:
            return self._copied_s - self.began_s
        return 0.0 if self._copied is None else self._began.elapsed_time(self._copied) / 1000

    def stop(self) -> None:
        """Marks the end of the launch."""
        self._ended_s = time.perf_counter()
        if self._ended is not None:
            self._ended.record()

    def wait(self, not_before_s: float) -> float:
        """Waits for the end and returns its time. The step cannot have begun before the previous one ended.

        If the step is over already, its end is computed from its duration.
        """
        if self._began is None or self._ended is None:
            return self._ended_s
        was_over = self._ended.query()
        self._ended.synchronize()
        if not was_over:
            return time.perf_counter()
        took_s: float = self._began.elapsed_time(self._ended) / 1000
        return min(time.perf_counter(), max(self.began_s, not_before_s) + took_s)
