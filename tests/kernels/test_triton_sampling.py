"""Drawing by the Triton kernels, under the interpreter: the torch sampler's random words, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from inflight.executor.engine.runner import NO_TOKEN
from inflight.executor.gpu.sampling import CHUNK, DrawRows, draw, restrict
from inflight.executor.scheduler.sequence import Sampling
from inflight.executor.step.philox import MASK
from inflight.executor.step.philox import philox_words as torch_philox
from inflight.executor.step.sampling import LARGEST_UNIFORM, SampleRow, keep_likeliest, min_p_logs, sample
from inflight.executor.step.sampling_columns import SamplingBatch
from tests.kernels.probes import noise_kernel, words_kernel

VOCABULARY_SIZE = CHUNK + 37


def signed(words: Sequence[int]) -> Tensor:
    """32-bit words as int32 tensors hold them."""
    return torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def draw_rows(rows: Sequence[SampleRow]) -> DrawRows:
    batch = SamplingBatch.of(rows)
    return DrawRows(
        temperatures=torch.tensor([row.sampling.temperature for row in rows]),
        top_ks=torch.tensor([row.sampling.top_k for row in rows], dtype=torch.int32),
        top_ps=torch.tensor([row.sampling.top_p for row in rows]),
        min_p_logs=torch.from_numpy(min_p_logs(batch.numbers["min_p"])),
        seeds_low=signed([row.sampling.seed & MASK for row in rows]),
        seeds_high=signed([row.sampling.seed >> 32 for row in rows]),
        output_indices=torch.tensor([row.output_index for row in rows], dtype=torch.int32),
        banned_ids=torch.from_numpy(batch.banned_ids),
        banned_starts=torch.from_numpy(batch.banned_starts),
    )


def drawn(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    token_ids = torch.full((len(rows),), 999_999, dtype=torch.int32)
    draw(logits, draw_rows(rows), token_ids)
    return token_ids.tolist()


def row(
    temperature: float,
    seed: int = 0,
    output_index: int = 0,
    banned: Sequence[int] = (),
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SampleRow:
    return SampleRow(Sampling(temperature, top_k, top_p, seed, min_p), output_index, frozenset(banned))


def test_words_are_bit_for_bit_those_of_the_torch_generator() -> None:
    # Given keys and counters with every bit in use
    counters = torch.randint(2**32, (256,), generator=torch.Generator().manual_seed(0))
    seed, output_index = 0xFEDC_BA98_7654_3210, 77
    words = torch.empty(4, 256, dtype=torch.int32)
    keys = signed([seed & MASK, seed >> 32]).tolist()
    words_kernel[(1,)](signed(counters.tolist()), words, output_index, *keys, COUNT=256)

    zero = torch.zeros(1, dtype=torch.int64)
    key = (zero + (seed & MASK), zero + (seed >> 32))
    expected = torch.stack(torch_philox((counters, zero + output_index, zero, zero), key))
    assert torch.equal(words.long() & MASK, expected)


def test_noise_is_exact_to_the_last_bits_also_at_both_ends() -> None:
    ends = [*range(28), *(2**32 - 2**i for i in range(32)), *(2**i for i in range(5, 32))]
    words = torch.tensor(ends + [0] * (128 - len(ends)))
    noise = torch.empty(128)
    noise_kernel[(1,)](signed(words.tolist()), noise, COUNT=128)

    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=LARGEST_UNIFORM).double()
    torch.testing.assert_close(noise.double(), -torch.log(-torch.log1p(-uniform)), rtol=1e-6, atol=1e-6)


def test_tokens_are_those_of_the_torch_sampler() -> None:
    # Given greedy and random rows, seeds of 64 bits, and ids that are banned
    logits = torch.randn(8, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    top = logits.topk(3).indices.tolist()
    rows = [
        row(0.0),
        row(0.0, banned=top[1]),
        *(row(temperature, seed=2**64 - 1 - i, output_index=i) for i, temperature in enumerate((0.1, 0.7, 1.0, 2.0))),
        row(0.3, seed=5, banned=top[6]),
        row(1.5, seed=2**40, output_index=100_000),
    ]
    assert drawn(logits, rows) == sample(logits, rows).tolist()


def test_equal_logits_go_to_the_lowest_id_across_chunks() -> None:
    logits = torch.zeros(2, VOCABULARY_SIZE)
    logits[0, [CHUNK + 5, CHUNK - 1, 70]] = 4.0
    assert drawn(logits, [row(0.0), row(0.0)]) == [70, 0]


def test_logits_of_half_precision_are_drawn_from_as_float32() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    rows = [row(0.0), row(1.0, seed=1), row(0.5, seed=2)]
    assert drawn(logits, rows) == sample(logits, rows).tolist()


@pytest.mark.parametrize("nothing", [float("nan"), float("-inf")])
def test_row_with_nothing_to_choose_gives_no_token_and_the_others_theirs(nothing: float) -> None:
    rows = [row(0.0), row(1.0), row(1.0, top_k=3), row(1.0, top_p=0.5), row(0.7, seed=3, top_k=3, top_p=0.5)]
    logits = torch.full((10, 500), nothing)
    logits[5:, [9, 300]] = torch.tensor([-4.0, -90.0])
    assert drawn(logits, [*rows, *rows]) == sample(logits, [*rows, *rows]).tolist() == [NO_TOKEN] * 5 + [9] * 5


def test_row_that_bans_everything_gives_no_token() -> None:
    logits = torch.zeros(2, 30)
    rows = [row(0.0, banned=range(30)), row(1.0, banned=range(1, 30))]
    assert drawn(logits, rows) == sample(logits, rows).tolist() == [NO_TOKEN, 0]


@pytest.mark.parametrize("top_k", [0, 40])
def test_restricted_tokens_are_those_of_the_torch_sampler(top_k: int) -> None:
    # Given rows of several temperatures, so that top_p keeps few tokens or many, one of them with banned ids
    logits = torch.randn(6, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(3)) * 3
    top = logits[5].topk(2).indices.tolist()
    several = ((0.3, 0.5), (1.0, 0.9), (2.0, 0.95), (5.0, 0.999), (0.0, 0.1))
    rows = [row(temperature, seed=i, top_k=top_k, top_p=top_p) for i, (temperature, top_p) in enumerate(several)]
    rows.append(row(0.7, seed=9, top_k=top_k, top_p=0.6, banned=top))
    assert drawn(logits, rows) == sample(logits, rows).tolist()


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_min_p_keeps_the_tokens_of_the_torch_sampler(top_k: int, top_p: float) -> None:
    # Given rows in which min_p keeps fewer tokens than top_k, more, only the largest, or all
    logits = torch.randn(6, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(4)) * 3
    several = ((1.0, 0.1), (2.0, 0.02), (5.0, 1e-3), (0.7, 1.0), (1.0, 1e-30), (0.0, 0.5))
    rows = [
        row(temperature, seed=i, top_k=top_k, top_p=top_p, min_p=min_p)
        for i, (temperature, min_p) in enumerate(several)
    ]
    logits = torch.cat((logits, torch.full((1, VOCABULARY_SIZE), float("nan"))))
    rows.append(row(1.0, top_k=top_k, top_p=top_p, min_p=0.3))
    assert drawn(logits, rows) == sample(logits, rows).tolist()


@pytest.mark.parametrize(
    ("spread", "step"), [(0.3, None), (3.0, 0.5), (0.3, 8.0)], ids=["distinct", "some equal", "all equal"]
)
def test_thresholds_in_a_row_of_many_chunks_are_those_of_the_torch_sampler(
    monkeypatch: pytest.MonkeyPatch, spread: float, step: float | None
) -> None:
    # Given rows whose thresholds are among the tokens that are listed first, far below, and at the end
    monkeypatch.setattr("inflight.executor.gpu.sampling.RESTRICTION_CHUNK", 64)
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(5)) * spread
    if step is not None:
        logits = (logits / step).round() * step
    restrictions = [
        *((k, 1.0, 0.0) for k in (40, 300, 999)),
        *((0, p, 0.0) for p in (0.01, 0.5, 0.9999)),
        *((k, p, 0.0) for k in (40, 300) for p in (0.113, 0.9003)),
        *((0, 1.0, 0.2), (500, 0.7003, 1e-6)),
    ]
    rows = [row(1.0, top_k=k, top_p=p, min_p=m, banned=range(7)) for k, p, m in restrictions]
    logits = logits.repeat(len(rows), 1)
    logits[0, 11] = float("nan")
    edges, last_ids = restrict(logits, draw_rows(rows))

    logits[:, :7], logits[0, 11] = float("-inf"), float("-inf")
    ids, is_kept = keep_likeliest(logits, [row.sampling for row in rows])
    expected = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, is_kept)
    is_lowest = torch.arange(1000) <= last_ids[:, None]
    kept = (logits > edges[:, None]) | ((logits == edges[:, None]) & is_lowest)
    assert torch.equal(kept & (logits > float("-inf")), expected)


def kept_ids(logits: list[float], top_k: int, top_p: float, min_p: float = 0.0) -> set[int]:
    """What the thresholds leave of a few tokens."""
    values = torch.tensor([logits])
    edges, last_ids = restrict(values, draw_rows([row(1.0, top_k=top_k, top_p=top_p, min_p=min_p)]))
    edge, last_id = float(edges[0]), int(last_ids[0])
    return {i for i, value in enumerate(logits) if value > edge or (value == edge and i <= last_id)}


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, {0, 1}),  # of four equal tokens the lowest ids
        (0, 0.5, {0, 1}),
        (0, 0.51, {0, 1, 2}),
        (3, 0.5, {0, 1}),  # half of the probability of three is less than two of them
        (0, 1e-6, {0}),
    ],
)
def test_equal_tokens_at_the_edge_are_kept_by_their_ids(top_k: int, top_p: float, kept: set[int]) -> None:
    assert kept_ids([1.0, 1.0, 1.0, 1.0, -80.0], top_k, top_p) == kept


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.3, {0, 1, 2}),  # of probabilities relative to the largest: 1, 1, 0.37, 0.14, 0.05
        (0, 1.0, 0.1, {0, 1, 2, 3}),
        (1, 1.0, 0.1, {0}),
        (3, 1.0, 0.3, {0, 1, 2}),
        (4, 1.0, 1.0, {0, 1}),
        (0, 0.5, 0.3, {0, 1}),
        (0, 0.8, 1e-9, {0, 1, 2}),  # the first two hold 0.781 of all five,
        (0, 0.8, 0.3, {0, 1}),  # and 0.845 of the three that are likely enough
    ],
)
def test_min_p_comes_before_top_k_and_top_p(top_k: int, top_p: float, min_p: float, kept: set[int]) -> None:
    assert kept_ids([1.0, 1.0, 0.0, -1.0, -2.0], top_k, top_p, min_p) == kept


def test_zero_and_minus_zero_are_equal_at_the_edge() -> None:
    assert kept_ids([-0.0, 0.0, -0.0, -90.0], 2, 1.0) == {0, 1}
