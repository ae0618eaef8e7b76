"""The time of steps: decodes and prompts through the runner, and the attention of one layer alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as ReadOnlyList
from dataclasses import replace
from statistics import median

import torch

from inflight.bench.gpu.engine.device import elapsed_s
from inflight.executor.attention.backend import AttentionBackend, LayerKv, Scoring
from inflight.executor.attention.flashinfer import FlashInfer, Heads
from inflight.executor.engine.runner import PendingStep
from inflight.executor.gpu.idle import idle_batch
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.scheduler.sequence import (
    NO_PROCESSORS,
    PlanRow,
    Processors,
    Sampling,
    Sequence,
    StepPlan,
    Stopping,
)
from inflight.executor.step.batch import pack

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
WARM_UP_STEPS = 5


def seated(
    num_sequences: int, num_tokens: int, first_block: int, block_size: int, processors: Processors = NO_PROCESSORS
) -> list[Sequence]:
    """Sequences with so many tokens, each with a seat and, from `first_block` on, blocks of its own. Tokens that
    penalties count are different ones."""
    num_blocks = -(-num_tokens // block_size)
    sequences = []
    for seat in range(num_sequences):
        stopping = Stopping(max_tokens=num_tokens, min_tokens=0, stop_token_ids=frozenset())
        ids = [1] * num_tokens if processors == NO_PROCESSORS else list(range(num_tokens))
        sequence = Sequence(f"step-{seat}", 1, ids, num_tokens, GREEDY, stopping, num_blocks, None)
        sequence.processors, sequence.length_limit = processors, 2 * num_tokens
        start = first_block + seat * num_blocks
        sequence.block_table, sequence.seat = list(range(start, start + num_blocks)), seat
        sequences.append(sequence)
    return sequences


def first_logits(runner: GpuRunner, num_sequences: int, context: int, block_size: int) -> torch.Tensor:
    """The logits `[vocabulary]` of the first of so many decodes, each behind a prompt of its own."""
    sequences = seated(num_sequences, context + 1, 1, block_size)
    for number, sequence in enumerate(sequences):
        sequence.token_ids = [(11 * number + 7 * place + 1) % 5000 for place in range(context + 1)]
        plan = StepPlan.of([PlanRow(sequence, 0, context, True)])
        runner.launch(replace(plan, boarded=(sequence,))).result()
    runner.launch(StepPlan.of([PlanRow(sequence, context, 1, True) for sequence in sequences])).result()
    return runner.newest_logits[0].clone()


def decode_step_s(
    runner: GpuRunner,
    num_sequences: int,
    context: int,
    block_size: int,
    num_steps: int,
    processors: Processors = NO_PROCESSORS,
) -> float:
    """Seconds of a step of decodes that carry their tokens on, each launched before the one before is read. With
    `processors` the step before is read first."""
    # Contexts grow while this is measured; their middle is `context`.
    first = max(1, context - num_steps // 2)
    sequences = seated(num_sequences, first + num_steps + WARM_UP_STEPS, 1, block_size, processors)
    pending: deque[PendingStep] = deque()
    began_s = 0.0
    for step in range(num_steps + WARM_UP_STEPS):
        if step == WARM_UP_STEPS:
            while pending:
                pending.popleft().result()
            began_s = time.perf_counter()
        rows = [PlanRow(sequence, first + step, 1, True, carries=bool(pending)) for sequence in sequences]
        plan = StepPlan.of(rows)
        if step == 0:
            plan = replace(plan, boarded=tuple(sequences))
        newest = runner.launch(plan)
        pending.append(newest)
        num_left = int(newest.allows_next)
        while len(pending) > num_left:
            pending.popleft().result()
    while pending:
        pending.popleft().result()
    return (time.perf_counter() - began_s) / num_steps


def prefill_step_s(runner: GpuRunner, num_tokens: int, block_size: int, repetitions: int = 5) -> float:
    """Seconds of a step that computes one prompt, read at once."""
    return median([prefill(runner, num_tokens, block_size) for _ in range(repetitions + 1)][1:])


def prefill(runner: GpuRunner, num_tokens: int, block_size: int) -> float:
    """Computes one prompt in one step, reads its token, and returns the seconds."""
    (sequence,) = seated(1, num_tokens, 1, block_size)
    plan = replace(StepPlan.of([PlanRow(sequence, 0, num_tokens, True)]), boarded=(sequence,))
    began_s = time.perf_counter()
    runner.launch(plan).result()
    return time.perf_counter() - began_s


def attention_s(
    backend: AttentionBackend,
    kv: ReadOnlyList[LayerKv],
    num_heads: int,
    num_sequences: int,
    context: int,
    block_size: int,
) -> float:
    """Seconds of one layer's attention for decodes, on a CUDA device; every layer's KV is read in turn.

    One layer's KV would stay in the cache; and many launches in a graph cost what the kernels do.
    """
    device = kv[0].keys.device
    tables = torch.tensor([sequence.block_table for sequence in seated(num_sequences, context, 1, block_size)])
    batch = replace(
        idle_batch([1] * num_sequences, 0, block_size),
        context_lengths=torch.full((num_sequences,), context, dtype=torch.int32),
        block_tables=tables.to(torch.int32),
        table_rows=torch.arange(num_sequences, dtype=torch.int32),
    ).to(device)
    shape = (num_sequences, num_heads, kv[0].shape.head_dim)
    queries = torch.randn(shape, device=device).to(kv[0].keys.dtype)

    def every_layer() -> None:
        for layer_kv in kv:
            backend.attend(queries, layer_kv, batch, Scoring(kv[0].shape.head_dim ** -0.5))

    every_layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every_layer()
    return elapsed_s(graph.replay) / len(kv)


def chunk_attention_s(
    backend: AttentionBackend,
    flashinfer: FlashInfer | None,
    kv: ReadOnlyList[LayerKv],
    heads: Heads,
    num_tokens: int,
    context: int,
    block_size: int,
) -> float:
    """Seconds of one layer's attention for the last tokens of a context, on a CUDA device, by the backend or
    FlashInfer, whose plan is not in the time."""
    device, dtype = kv[0].keys.device, kv[0].keys.dtype
    (sequence,) = seated(1, context, 1, block_size)
    batch = pack(StepPlan.of([PlanRow(sequence, context - num_tokens, num_tokens, True)]), block_size)
    attention = backend if flashinfer is None else flashinfer.plan(batch)
    assert attention is not None
    on_device = batch.to(device)
    queries = torch.randn((num_tokens, heads.num_heads, heads.kv.head_dim), device=device).to(dtype)

    def every_layer() -> None:
        for layer_kv in kv:
            attention.attend(queries, layer_kv, on_device, heads.scorings[0])

    return elapsed_s(every_layer) / len(kv)
