"""The GPU's limits: copying memory and multiplying matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

COPY_BYTES = 2 << 30
MATRIX_SIZE = 8192
REPETITIONS = 10


def copy_bytes_per_s() -> float:
    """Bytes read and written by a copy of more than any cache holds."""
    num_bytes = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / elapsed_s(lambda: target.copy_(source))


def matrix_operations_per_s() -> float:
    """Operations of a product of large matrices of random bfloat16; zeros would be faster."""
    left, right = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * MATRIX_SIZE**3 / elapsed_s(lambda: left @ right)


def elapsed_s(work: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Returns the median of several times by the device's clock, after three warm-up runs."""
    for _ in range(3):
        work()
    times: list[float] = []
    for _ in range(repetitions):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1000)
    return float(median(times))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's launches within some work, and the device's time of all of them."""

    name: str
    num_launches: int
    total_s: float


def kernels_of(work: Callable[[], object], repetitions: int = REPETITIONS) -> list[Kernel]:
    """Returns the kernels and copies of some work by PyTorch's profiler, the longest first. Counts and times are those
    of one repetition."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repetitions):
            work()
        torch.cuda.synchronize()
    counts, times_us = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            counts[event.name] += 1
            times_us[event.name] += event.self_device_time_total
    return [
        Kernel(name, round(counts[name] / repetitions), time_us / 1e6 / repetitions)
        for name, time_us in times_us.most_common()
    ]
