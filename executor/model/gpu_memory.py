"""Measurement of the GPU memory that steps take besides weights and KV, before the KV pool is sized.

The largest steps are computed and the graphs are captured with a pool of one block, and the peak is kept free. The
graphs are captured again later, because a captured step contains the addresses of its pool.
"""

from __future__ import annotations

import gc

import torch

from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.model import PagedModel
from inflight.executor.parallel.device_messages import RunnerSizes
from inflight.executor.scheduler.limits import SchedulerLimits


def free_bytes_beside_steps(model: PagedModel, sizes: RunnerSizes) -> int:
    """Returns the bytes of a worker's CUDA device that are free beside steps of these sizes."""
    used = working_bytes(
        model,
        sizes.limits,
        sizes.block_size,
        uses_graphs=sizes.uses_graphs,
        max_graph_tokens=sizes.max_graph_tokens,
    )
    return int(torch.cuda.mem_get_info(model.device)[0]) - used


def working_bytes(
    model: PagedModel, limits: SchedulerLimits, block_size: int, *, uses_graphs: bool, max_graph_tokens: int
) -> int:
    """Returns the bytes of a CUDA device that steps within the limits take. Leaves the model without KV."""
    assert model.gpu_decoder is not None
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info(model.device)
    model.allocate_kv(1, block_size)
    runner = GpuRunner(
        model.gpu_decoder, model.kv, limits, block_size, uses_graphs=uses_graphs, max_graph_tokens=max_graph_tokens
    )
    runner.prepare()
    runner.close()
    # torch's reserve counts: it is the peak, because nothing was freed in between.
    free_at_peak, _ = torch.cuda.mem_get_info(model.device)
    del runner
    model.free_kv()
    gc.collect()
    torch.cuda.empty_cache()
    return max(0, free_before - free_at_peak)
