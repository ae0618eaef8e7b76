"""CUDA graphs of a step of decodes, one for each bucket of rows.

A replay costs the host one call, where launching the same kernels one by one would take longer than they run. The
graphs share one memory pool, for no two run at a time; the largest is captured first, so that the others fit into what
it left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch


def capture(compute: Callable[[int], None], buckets: Sequence[int]) -> Mapping[int, torch.cuda.CUDAGraph]:
    """Captures `compute(bucket)` for every bucket. What it reads and writes must stay where it is.

    It runs once before it is captured: that compiles kernels and lets cuBLAS take its workspace.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    for bucket in sorted(buckets, reverse=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute(bucket)
        torch.cuda.synchronize()
        graphs[bucket] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[bucket], pool=pool, stream=stream):
            compute(bucket)
    torch.cuda.synchronize()
    return graphs
