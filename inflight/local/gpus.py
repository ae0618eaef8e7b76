"""The GPUs of this machine, and which executor of a local stack uses which."""

from __future__ import annotations

import ctypes

from inflight.common.settings import load
from inflight.executor.settings import ExecutorSettings
from inflight.local.options import StackOptions

CUDA_DRIVER = "libcuda.so.1"


def num_gpus() -> int:
    """Returns the GPUs that CUDA shows to this process and its children. It asks the driver, because torch takes
    seconds to load."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def default_routers(executors: int, num_gpus: int) -> int:
    """Returns one router, or one for each executor with a GPU: a router carries 50,000 tokens/s, which two executors
    with small or sparse models exceed (docs/sizing.md)."""
    return max(1, min(executors, num_gpus))


def devices_of(options: StackOptions, num_gpus: int) -> list[int | None]:
    """Returns each executor's `device_index`: the first of the GPUs of its own. It is None if the executor decides:
    there is one executor, or no GPU, or the user chose.

    Raises:
        SettingError: a setting of the executors is wrong.
        ValueError: there are too few GPUs.
    """
    undecided: list[int | None] = [None] * options.executors
    if options.executors == 1 or not num_gpus:
        return undecided
    settings = load(ExecutorSettings, "inflight executor", options.executor_args)
    if settings.device == "cpu" or "device_index" in settings.model_fields_set:
        return undecided
    size = settings.tensor_parallel_size
    if options.executors * size > num_gpus:
        of_ranks = f" with tensor_parallel_size={size}" if size > 1 else ""
        raise ValueError(
            f"{options.executors} executors{of_ranks} need {options.executors * size} GPUs, and CUDA shows {num_gpus}; "
            f"start {max(1, num_gpus // size)}, or give executors --device-index 0 to share the first GPU, or "
            "--device cpu"
        )
    return list(range(0, options.executors * size, size))
