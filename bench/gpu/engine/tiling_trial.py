"""Attention of one layer by a given tiling, on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from inflight.bench.gpu.engine.device import elapsed_s
from inflight.bench.gpu.engine.steps import seated
from inflight.executor.attention.backend import KvShape, LayerKv, Scoring
from inflight.executor.attention.triton import TritonAttention, is_hopper
from inflight.executor.kernels.tiling import AttentionWork, Tiling, chunk_tiling, decode_tiling
from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.step.batch import StepBatch, pack

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
# Keys and values of so many layers do not fit the cache together.
NUM_LAYERS = 8
NUM_WARM_UPS = 2
KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Case:
    """Heads, and sequences with `context` tokens each, of which the last is computed or, in a chunk, the last
    `num_chunk_tokens`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    num_sequences: int
    context: int
    num_chunk_tokens: int

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, {self.kv_dtype}"
        if self.num_chunk_tokens:
            return f"{heads}: chunk of {self.num_chunk_tokens} tokens, context {self.context}"
        return f"{heads}: {self.num_sequences} decodes, context {self.context}"


def default_tiling(case: Case) -> Tiling:
    """Returns the tiling that the executor uses."""
    num_tokens = case.num_chunk_tokens or case.num_sequences
    group = case.num_heads // case.num_kv_heads
    work = AttentionWork(
        num_tokens,
        case.num_sequences,
        case.num_kv_heads,
        group,
        case.head_dim,
        DTYPE.itemsize,
        KV_DTYPES[case.kv_dtype].itemsize,
        is_hopper(torch.device("cuda", 0)),
    )
    return chunk_tiling(work) if case.num_chunk_tokens else decode_tiling(work)


def try_once(case: Case, tiling: Tiling) -> bool:
    """Compiles and launches once; returns whether the GPU can."""
    try:
        _attend(case, tiling, num_layers=1)
        torch.cuda.synchronize()
    except Exception:  # Triton's errors are of many types
        return False
    return True


def time_s(case: Case, tiling: Tiling) -> float:
    """Returns the seconds of one layer: every layer's KV is read in turn, by one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UPS):
            _attend(case, tiling, NUM_LAYERS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _attend(case, tiling, NUM_LAYERS)
    return elapsed_s(graph.replay) / NUM_LAYERS


def _attend(case: Case, tiling: Tiling, num_layers: int) -> None:
    queries, layers, batch = _inputs(case, num_layers)
    backend = TritonAttention(lambda _: tiling, lambda _: tiling)
    with torch.inference_mode():
        for kv in layers:
            backend.attend(queries, kv, batch, Scoring(case.head_dim**-0.5))


@cache
def _inputs(case: Case, num_layers: int) -> tuple[Tensor, tuple[LayerKv, ...], StepBatch]:
    """Returns queries, keys and values of several layers, and the step, on the GPU."""
    _inputs.cache_clear()
    gpu = torch.device("cuda", 0)
    sequences = seated(case.num_sequences, case.context, 1, BLOCK_SIZE)
    num_new = case.num_chunk_tokens or 1
    plan = StepPlan.of([PlanRow(sequence, case.context - num_new, num_new, True) for sequence in sequences])
    num_blocks = case.num_sequences * -(-case.context // BLOCK_SIZE) + 1
    shape, dtype = KvShape(case.num_kv_heads, case.head_dim), KV_DTYPES[case.kv_dtype]
    layers = tuple(TritonAttention().allocate(shape, num_blocks, BLOCK_SIZE, dtype, gpu) for _ in range(num_layers))
    for kv in layers:
        for tensor in (kv.keys, kv.values):
            # Random numbers; zeros can be faster.
            tensor.copy_(torch.randn(tensor.shape, device=gpu, dtype=DTYPE))
        for scales in kv.scales:
            scales.fill_(1.0)
    queries = torch.randn((num_new * case.num_sequences, case.num_heads, case.head_dim), device=gpu, dtype=DTYPE)
    return queries, layers, pack(plan, BLOCK_SIZE).to(gpu)
