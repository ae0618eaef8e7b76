"""Agreement of every attention backend with the reference, plain attention, on any mixture of rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inflight.executor.attention.backend import AttentionBackend, KvShape, LayerKv, Scoring
from inflight.executor.attention.cpu import CpuAttention
from inflight.executor.attention.quantized import quantize
from inflight.executor.attention.reference import ReferenceAttention
from inflight.executor.native.library import NativeLibrary
from inflight.executor.native.pool import NativePool
from tests.support.device.native_builds import INSTRUCTION_SETS, emulation_of_amx, library_of
from tests.support.device.paged_cases import PagedCase, Spec, make_case
from tests.support.examples import examples

# The first test of a build may have to wait for the compiler.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("one_seed_and_thread")]

CPU = torch.device("cpu")
# bfloat16 has 8 bits; outputs are averages of values around 1. The rounding error of a logit is the relative error of
# its probability: heads of 256 values with a scale of 0.3 have logits around 20, and outputs that differ by 3e-5.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
# Of the values of a key, the first of which are far above the others in some models.
MAGNITUDES = (0.0, 1e-38, 1e-28, 1e-3, 1.0, 300.0)

# Hypothesis repeats a failed example: its tensors must be the same each time.
seeds = st.integers(0, 1000)
specs = st.builds(
    lambda num_new, num_before: Spec(num_new, num_new + num_before), st.integers(1, 70), st.integers(0, 150)
) | st.builds(lambda num_context: Spec(1, num_context), st.integers(1, 300))
scorings = st.builds(
    Scoring,
    scale=st.sampled_from([0.1, 0.3]),
    sliding_window=st.none() | st.integers(1, 90),
    softcap=st.none() | st.sampled_from([2.0, 30.0]),
    has_sinks=st.booleans(),
)
shapes = st.builds(KvShape, st.integers(1, 3), st.sampled_from([2, 10, 16, 64, 72, 80, 96, 128, 256]))


# On a processor without AMX its tiles are emulated.
EMULATION = "amx, emulated"
BUILDS = [*INSTRUCTION_SETS, pytest.param(EMULATION, marks=pytest.mark.slow if "amx" in INSTRUCTION_SETS else ())]


@pytest.fixture(scope="module", params=BUILDS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return emulation_of_amx() if request.param == EMULATION else library_of(request.param)


@pytest.fixture(scope="module")
def cpu_attention(library: NativeLibrary) -> CpuAttention:
    return CpuAttention(library, NativePool(library, 1))


def filled(
    backend: AttentionBackend,
    shape: KvShape,
    case: PagedCase,
    keys: Tensor,
    values: Tensor,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
) -> LayerKv:
    """The history of a case in a pool whose every number was NaN, as if a broken sequence had used it before."""
    kv = backend.allocate(shape, case.num_blocks + 1, block_size, kv_dtype or keys.dtype, CPU)
    num_slots = (case.num_blocks + 1) * block_size
    poison = torch.full((1, shape.num_kv_heads, shape.head_dim), float("nan"), dtype=keys.dtype)
    everywhere = replace(case.history, slot_mapping=torch.arange(num_slots))
    backend.write(kv, poison.expand(num_slots, -1, -1), poison.expand(num_slots, -1, -1), everywhere)
    backend.write(kv, keys, values, case.history)
    return kv


@pytest.mark.parametrize("is_int8", [False, True], ids=["as it is", "int8 KV"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=examples(25), deadline=None)
@given(
    several=st.lists(specs, min_size=1, max_size=5),
    shape=shapes,
    group=st.sampled_from([1, 2, 3, 7, 30]),
    scoring=scorings,
    block_size=st.sampled_from([16, 32, 48]),
    seed=seeds,
)
def test_cpu_kernels_equal_the_reference(
    cpu_attention: CpuAttention,
    dtype: torch.dtype,
    is_int8: bool,
    several: list[Spec],
    shape: KvShape,
    group: int,
    scoring: Scoring,
    block_size: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    case = make_case(several, block_size)
    size = (case.history.num_tokens, shape.num_kv_heads, shape.head_dim)
    keys, values = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    queries = torch.randn(case.batch.num_tokens, shape.num_kv_heads * group, shape.head_dim).to(dtype)

    kv_dtype = torch.int8 if is_int8 else dtype
    sinks = torch.linspace(-2, 3, queries.shape[1]) if scoring.has_sinks else None
    results = []
    for backend in (cpu_attention, ReferenceAttention()):
        kv = filled(backend, shape, case, keys, values, block_size, kv_dtype)
        results.append(backend.attend(queries, kv, case.batch, scoring, sinks))

    assert results[0].shape == queries.shape
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=TOLERANCE[dtype])


def unpacked(kv: LayerKv, block_size: int, pair: int) -> tuple[Tensor, ...]:
    """Keys, values `[num_slots, num_kv_heads, head_dim]` and their scales out of the layout of the C++ kernels."""
    dim = -(-kv.shape.head_dim // 16) * 16
    heads = kv.shape.num_kv_heads
    keys, values = (cache[..., : 16 * dim] for cache in (kv.keys, kv.values))
    scales = [cache[..., 16 * dim :].contiguous().view(torch.float32) for cache in (kv.keys, kv.values)]
    keys = keys.unflatten(2, (dim // pair, 16, pair)).permute(0, 3, 1, 2, 4)
    values = values.unflatten(2, (16 // pair, dim, pair)).permute(0, 2, 4, 1, 3)
    numbers = [cache.reshape(-1, heads, dim)[..., : kv.shape.head_dim] for cache in (keys, values)]
    return (*numbers, *(cache.transpose(1, 2).reshape(-1, heads) for cache in scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=examples(25), deadline=None)
@given(shape=shapes, num_tokens=st.integers(1, 40), seed=seeds)
def test_int8_kv_is_that_of_the_reference_bit_for_bit(
    cpu_attention: CpuAttention, dtype: torch.dtype, shape: KvShape, num_tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    case, size = make_case([Spec(num_tokens, num_tokens)], 16), (num_tokens, shape.num_kv_heads, shape.head_dim)
    magnitudes = torch.tensor(MAGNITUDES)[torch.randint(len(MAGNITUDES), (2, *size[:2], 1), generator=generator)]
    keys, values = (torch.randn(2, *size, generator=generator) * magnitudes).to(dtype)
    # Halves of the scale are rounded to even numbers, and numbers that are none stay none.
    keys[0, 0] = torch.arange(shape.head_dim) + 0.5
    keys[0, 0, 0] = 127.0
    values[-1, -1, -1] = torch.tensor([float("nan"), float("inf"), -float("inf")])[seed % 3]

    kernels, reference = (
        filled(backend, shape, case, keys, values, 16, torch.int8) for backend in (cpu_attention, ReferenceAttention())
    )

    written = case.history.slot_mapping
    found = unpacked(kernels, 16, pair=1 if dtype == torch.float32 else 2)
    wanted = (reference.keys, reference.values, *reference.scales)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours[written], theirs[written], rtol=0, atol=0, equal_nan=True)
    assert not found[3][written[-1], -1].isfinite()


def test_scale_of_int8_is_the_127th_part_of_the_largest_number() -> None:
    numbers, scales = quantize(torch.tensor([[0.0, 0.0], [-254.0, 3.0], [1.0, 0.5]]))
    assert numbers.tolist() == [[0, 0], [-127, 2], [127, 64]]
    assert scales.tolist() == [0.0, 2.0, pytest.approx(1 / 127)]


@pytest.mark.parametrize("is_int8", [False, True], ids=["as it is", "int8 KV"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=examples(20), deadline=None)
@given(
    num_context=st.integers(1, 400),
    cuts=st.sets(st.integers(1, 399), max_size=6),
    neighbours=st.integers(0, 9),
    group=st.sampled_from([1, 3, 7]),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    scoring=st.builds(
        Scoring,
        scale=st.just(0.2),
        sliding_window=st.none() | st.sampled_from([5, 100, 150, 260]),
        softcap=st.none() | st.just(30.0),
    ),
    block_size=st.sampled_from([16, 32]),
    seed=seeds,
)
def test_rows_do_not_depend_on_chunks_and_batch(
    cpu_attention: CpuAttention,
    dtype: torch.dtype,
    is_int8: bool,
    num_context: int,
    cuts: set[int],
    neighbours: int,
    group: int,
    head_dim: int,
    scoring: Scoring,
    block_size: int,
    seed: int,
) -> None:
    """A token's attention is the same bit by bit in one chunk, in any chunks, and beside other sequences."""
    torch.manual_seed(seed)
    shape, kv_dtype = KvShape(2, head_dim), torch.int8 if is_int8 else dtype
    keys, values = torch.randn(2, num_context, 2, head_dim).to(dtype)
    queries = torch.randn(num_context, 2 * group, head_dim).to(dtype)
    alone = make_case([Spec(num_context, num_context)], block_size)
    kv = filled(cpu_attention, shape, alone, keys, values, block_size, kv_dtype)
    expected = cpu_attention.attend(queries, kv, alone.batch, scoring)

    ends = [*sorted(cut for cut in cuts if cut < num_context), num_context]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        # Single tokens are decodes, which come before chunks.
        specs = [Spec(end - start, end), *[Spec(1, 1 + 37 * i) for i in range(neighbours)]]
        case = make_case(specs, block_size, seed=end)
        place = 0 if end - start == 1 else neighbours
        length = case.batch.query_starts.tolist()
        rows = slice(length[place], length[place + 1])
        history = case.history.query_starts.tolist()
        own = slice(history[place], history[place + 1])
        all_keys, all_values = torch.randn(2, case.history.num_tokens, 2, head_dim).to(dtype)
        all_keys[own], all_values[own] = keys[:end], values[:end]
        all_queries = torch.randn(case.batch.num_tokens, 2 * group, head_dim).to(dtype)
        all_queries[rows] = queries[start:end]
        kv = filled(cpu_attention, shape, case, all_keys, all_values, block_size, kv_dtype)
        found = cpu_attention.attend(all_queries, kv, case.batch, scoring)[rows]
        assert torch.equal(found, expected[start:end])


@pytest.mark.parametrize("growth", [-60.0, 60.0])
def test_scores_that_grow_or_fall_by_powers_of_two_beyond_any_bound(cpu_attention: CpuAttention, growth: float) -> None:
    """Later chunks of a row have scores far above, or far below, those before."""
    shape, case = KvShape(1, 64), make_case([Spec(300, 420), Spec(1, 390)], 16)
    size = (case.history.num_tokens, 1, 64)
    starts = case.history.query_starts.tolist()
    keys, values = 0.1 * torch.randn(size), torch.randn(size).bfloat16()
    for start, end in itertools.pairwise(starts):
        keys[start:end, 0, 0] += torch.linspace(0, growth, end - start)
    queries = torch.randn(case.batch.num_tokens, 3, 64)
    queries[..., 0] = 1.0

    found, wanted = (
        backend.attend(
            queries.bfloat16(), filled(backend, shape, case, keys.bfloat16(), values, 16), case.batch, scoring
        )
        for backend in (cpu_attention, ReferenceAttention())
        for scoring in [Scoring(1.0)]
    )

    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_cpu_kernels_take_strided_views(cpu_attention: CpuAttention) -> None:
    # Given views as a model makes them: head and token swapped, keys and values slices of one tensor
    shape, case = KvShape(2, 16), make_case([Spec(9, 30), Spec(1, 5)], 16)
    num_tokens = case.history.num_tokens
    packed = torch.randn(num_tokens, 2, 32)
    keys, values = packed[..., :16], packed[..., 16:]
    queries = torch.randn(4, case.batch.num_tokens, 16).transpose(0, 1)
    views = (queries, keys, values)
    copies = tuple(view.contiguous() for view in views)

    outputs = []
    for some_queries, some_keys, some_values in (views, copies):
        kv = cpu_attention.allocate(shape, case.num_blocks + 1, 16, torch.float32, CPU)
        cpu_attention.write(kv, some_keys, some_values, case.history)
        outputs.append(cpu_attention.attend(some_queries, kv, case.batch, Scoring(0.25)))

    assert torch.equal(outputs[0], outputs[1])


def test_number_of_threads_does_not_change_the_result(library: NativeLibrary) -> None:
    shape, case = KvShape(3, 64), make_case([Spec(200, 333), *(Spec(1, 100 + i) for i in range(20))], 16)
    keys, values = torch.randn(2, case.history.num_tokens, 3, 64)
    queries = torch.randn(case.batch.num_tokens, 9, 64)
    outputs = []
    for count in (1, 3):
        backend = CpuAttention(library, NativePool(library, count))
        kv = filled(backend, shape, case, keys, values, 16)
        outputs.append(backend.attend(queries, kv, case.batch, Scoring(0.125)))
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("window", [None, 5])
def test_reference_is_plain_attention(window: int | None) -> None:
    # Given 40 tokens, of which the last 7 are new
    num_context, num_new, block_size = 40, 7, 16
    case = make_case([Spec(num_new, num_context)], block_size)
    keys, values = torch.randn(2, num_context, 2, 8)
    queries = torch.randn(num_new, 6, 8)
    backend = ReferenceAttention()
    kv = backend.allocate(KvShape(2, 8), case.num_blocks + 1, block_size, torch.float32, CPU)
    backend.write(kv, keys, values, case.history)

    distance = torch.arange(num_context - num_new, num_context)[:, None] - torch.arange(num_context)
    visible = (distance >= 0) & (distance < (window or num_context))
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.repeat_interleave(3, dim=1).transpose(0, 1),
        values.repeat_interleave(3, dim=1).transpose(0, 1),
        attn_mask=visible,
        scale=0.2,
    ).transpose(0, 1)

    torch.testing.assert_close(backend.attend(queries, kv, case.batch, Scoring(0.2, window)), expected)
