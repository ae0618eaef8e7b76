"""What steps take of the GPU's memory beside weights and KV: measured before the KV pool is sized.

The largest steps are computed and the graphs are captured with a pool of one block; what that took at most is kept
free. The graphs are captured again later, for a captured step knows the addresses of the pool it was captured with.
"""

from __future__ import annotations

import gc

import torch

from executor.gpu.runner import GpuRunner
from executor.model.model import PagedModel
from executor.scheduler.limits import SchedulerLimits


def working_bytes(model: PagedModel, limits: SchedulerLimits, block_size: int, *, uses_graphs: bool) -> int:
    """Bytes of a CUDA device that steps within the limits take. Leaves the model without KV."""
    assert model.gpu_decoder is not None
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info(model.device)
    model.allocate_kv(1, block_size)
    runner = GpuRunner(model.gpu_decoder, model.kv, limits, block_size, uses_graphs=uses_graphs)
    runner.prepare()
    runner.close()
    # What torch holds in reserve is counted: it is the peak, for nothing was given back meanwhile.
    free_at_peak, _ = torch.cuda.mem_get_info(model.device)
    del runner
    model.free_kv()
    gc.collect()
    torch.cuda.empty_cache()
    return max(0, free_before - free_at_peak)
