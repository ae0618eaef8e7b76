"""Attention by our kernels against the reference backend, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inflight.executor.attention.backend import AttentionBackend, KvShape, LayerKv, Scoring
from inflight.executor.attention.reference import ReferenceAttention
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.step.batch import StepBatch
from tests.support.device.paged_cases import PagedCase, Spec, make_case

CPU = torch.device("cpu")
# Outputs are averages of values around 1; float16 has 11 bits and bfloat16 8.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# Tokens of a history that the kernel writes in the interpreter, which takes a millisecond for each. Longer histories
# are stored by torch.
MOST_INTERPRETED = 256


def filled(
    backend: AttentionBackend, shape: KvShape, case: PagedCase, keys: Tensor, values: Tensor, block_size: int
) -> LayerKv:
    """The history of a case in a pool whose every number was NaN, as if a broken sequence had used it before."""
    kv = backend.allocate(shape, case.num_blocks + 1, block_size, keys.dtype, keys.device)
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    if isinstance(backend, TritonAttention) and keys.device == CPU and len(keys) > MOST_INTERPRETED:
        slots = case.history.slot_mapping
        places = slots // block_size, slice(None), slots % block_size
        kv.keys[places], kv.values[places] = keys, values
    else:
        backend.write(kv, keys, values, case.history.to(keys.device))
    return kv


def assert_attends_as_the_reference(
    specs: tuple[Spec, ...],
    shape: KvShape,
    group: int,
    *,
    scoring: Scoring = Scoring(0.2),  # noqa: B008 - immutable
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> None:
    """Attention by our kernels against the reference's."""
    case = make_case(specs, block_size)
    size = (case.history.num_tokens, shape.num_kv_heads, shape.head_dim)
    keys, values = torch.randn(2, *size).to(device, dtype)
    queries = torch.randn(case.batch.num_tokens, shape.num_kv_heads * group, shape.head_dim).to(device, dtype)
    batch = case.batch.to(device)
    sinks = sinks_of(queries, scoring)
    results = [
        backend.attend(queries, filled(backend, shape, case, keys, values, block_size), batch, scoring, sinks)
        for backend in (TritonAttention(), ReferenceAttention())
    ]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=TOLERANCE[dtype])


def assert_padding_changes_nothing(
    specs: tuple[Spec, ...],
    num_tokens: int,
    num_sequences: int,
    scoring: Scoring,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> None:
    """Attention of a step has the same results, bit for bit, with the padding of a captured step to so many tokens and
    sequences. The results of the padding are zero."""
    backend, shape, case = TritonAttention(), KvShape(1, 64), make_case(specs, 16)
    keys, values = torch.randn(2, case.history.num_tokens, 1, 64).to(device, dtype)
    queries = torch.randn(num_tokens, 4, 64).to(device, dtype)
    kv = filled(backend, shape, case, keys, values, 16)
    count = case.batch.num_tokens
    sinks = sinks_of(queries, scoring)
    expected = backend.attend(queries[:count], kv, case.batch.to(device), scoring, sinks)
    outputs = backend.attend(queries, kv, padded(case.batch, num_tokens, num_sequences).to(device), scoring, sinks)
    assert torch.equal(outputs[:count], expected)
    assert not outputs[count:].any()


def sinks_of(queries: Tensor, scoring: Scoring) -> Tensor | None:
    """Scores that belong to no key, of about the size of others, if attention has them."""
    return torch.linspace(-2, 3, queries.shape[1], device=queries.device) if scoring.has_sinks else None


def padded(batch: StepBatch, num_tokens: int, num_sequences: int) -> StepBatch:
    """A batch with padding behind its tokens and sequences."""
    missing = num_sequences - batch.num_sequences
    return replace(
        batch,
        token_ids=torch.cat([batch.token_ids, batch.token_ids.new_zeros(num_tokens - batch.num_tokens)]),
        query_starts=torch.cat([batch.query_starts, batch.query_starts[-1:].expand(missing)]),
        context_lengths=torch.cat([batch.context_lengths, batch.context_lengths.new_ones(missing)]),
        table_rows=torch.cat([batch.table_rows, batch.table_rows.new_zeros(missing)]),
        num_decodes=num_sequences,
        is_padded=True,
    )


def assert_rows_are_independent(
    contexts: tuple[int, ...],
    num_alone: int,
    num_together: int,
    scoring: Scoring,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> None:
    """The last `num_alone` tokens of every sequence have the same results, bit for bit, alone and as the last of
    `num_together` in one batch with the others."""
    backend, shape, group = TritonAttention(), KvShape(1, 64), 4
    sinks = sinks_of(torch.zeros(1, group, device=device), scoring)
    sequences = [[torch.randn(context, heads, 64).to(device, dtype) for heads in (group, 1, 1)] for context in contexts]

    def attend(indices: list[int], num_new: int) -> list[Tensor]:
        case = make_case([Spec(num_new, contexts[index]) for index in indices], 16)
        keys, values = (torch.cat([sequences[index][part] for index in indices]) for part in (1, 2))
        queries = torch.cat([sequences[index][0][-num_new:] for index in indices])
        kv = filled(backend, shape, case, keys, values, 16)
        outputs = backend.attend(queries, kv, case.batch.to(device), scoring, sinks)
        return [output[-num_alone:] for output in outputs.split(num_new)]

    beside = attend(list(range(len(contexts))), num_together)
    for index, expected in enumerate(beside):
        assert torch.equal(attend([index], num_alone)[0], expected)
