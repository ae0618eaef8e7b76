"""The GPU's limits: copying memory and multiplying matrices."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

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
