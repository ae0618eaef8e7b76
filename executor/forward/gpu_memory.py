"""Measurement of the GPU memory that steps take besides weights and KV, before the KV pool is sized.

The largest steps are computed and the graphs are captured with a pool of one block, and the peak is kept free. The
graphs are captured again later, because a captured step contains the addresses of its pool.
"""

from __future__ import annotations

import gc

import torch

from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.device import free_device_bytes
from inflight.executor.engine.runner import StepSizes
from inflight.executor.gpu.device_step import StepDecoder
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.recurrent.mixer import StateSizes


def free_beside_steps(decoder: StepDecoder, layout: KvLayout, sizes: StepSizes) -> int | None:
    """Returns the bytes of a GPU that steps of these sizes leave free; None on a CPU, as in the tests."""
    if free_device_bytes(layout.device) is None:
        return None
    used = working_bytes(decoder, layout, sizes)
    return (free_device_bytes(layout.device) or 0) - used


def working_bytes(decoder: StepDecoder, layout: KvLayout, sizes: StepSizes) -> int:
    """Returns the bytes of a CUDA device that steps of these sizes take."""
    torch.cuda.empty_cache()
    if decoder.recurrent_states is not None:
        # Slots are reserved once their number is known. The trial steps of one block have one sequence.
        decoder.recurrent_states.reserve(StateSizes(1, 0, sizes.limits.max_drafts))
    free_before, _ = torch.cuda.mem_get_info(layout.device)
    runner = GpuRunner(
        decoder,
        layout.allocate(1, sizes.block_size),
        sizes.limits,
        sizes.block_size,
        uses_graphs=sizes.uses_graphs,
        max_graph_tokens=sizes.max_graph_tokens,
    )
    runner.prepare()
    runner.close()
    # torch's reserve counts: it is the peak, because nothing was freed in between.
    free_at_peak, _ = torch.cuda.mem_get_info(layout.device)
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return max(0, free_before - free_at_peak)
