"""Sampling: known random numbers, the right distribution, and results that do not depend on the other rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from inflight.executor.engine.runner import NO_TOKEN
from inflight.executor.scheduler.sequence import Sampling
from inflight.executor.step.philox import philox_words
from inflight.executor.step.sampling import FIRST_CANDIDATES, SampleRow, choose_greedily, gumbel_noise, keep_top, sample
from tests.support.device.sampling_oracle import PHILOX_ANSWERS

VOCABULARY_SIZE = 1000


pytestmark = pytest.mark.usefixtures("one_thread")


def row(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    output_index: int = 0,
    banned_ids: frozenset[int] = frozenset(),
) -> SampleRow:
    return SampleRow(Sampling(temperature, top_k, top_p, seed), output_index, banned_ids)


def random_logits(num_rows: int, seed: int = 0, vocabulary_size: int = VOCABULARY_SIZE) -> Tensor:
    return torch.randn(num_rows, vocabulary_size, generator=torch.Generator().manual_seed(seed)) * 3


def kept_ids(logits: list[float], top_k: int = 0, top_p: float = 1.0) -> set[int]:
    ids, is_kept = keep_top(torch.tensor([logits]), torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))
    return set(ids[is_kept].tolist())


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_ANSWERS)
def test_philox_gives_the_published_numbers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    result = philox_words((c0, c1, c2, c3), (torch.tensor([key[0]]), torch.tensor([key[1]])))
    assert tuple(int(word) for word in result) == words


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    assert sample(logits, [row(temperature=0), row(temperature=0)]).tolist() == [1, 0]


def test_noise_of_an_id_is_the_same_computed_alone_and_over_the_vocabulary() -> None:
    rows = [row(seed=2**64 - 1, output_index=7), row(seed=3, output_index=0)]
    every_id = torch.arange(50).expand(2, -1)
    some_ids = torch.tensor([[49, 3, 17], [0, 1, 2]])
    assert torch.equal(gumbel_noise(rows, every_id).gather(1, some_ids), gumbel_noise(rows, some_ids))


def test_unrestricted_draw_uses_the_noise_of_the_restricted_one() -> None:
    # top_k of all tokens restricts nothing, but goes the other way through the code
    logits = random_logits(20)
    free = [row(seed=i, output_index=i) for i in range(20)]
    restricted = [row(seed=i, output_index=i, top_k=VOCABULARY_SIZE) for i in range(20)]
    assert torch.equal(sample(logits, free), sample(logits, restricted))


@pytest.mark.parametrize(("seed", "output_index"), [(2, 1), (1 + 2**40, 1), (1, 2)])
def test_seed_and_output_index_both_decide(seed: int, output_index: int) -> None:
    flat = torch.zeros(1, 50_000)
    first = sample(flat, [row(seed=1, output_index=1)])
    assert not torch.equal(first, sample(flat, [row(seed=seed, output_index=output_index)]))


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 8], ids=["free", "top_k"])
def test_draws_follow_the_softmax(temperature: float, top_k: int) -> None:
    # Given 12 tokens, one of them with a small probability, and 20,000 draws at different output indices
    logits = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, -0.5, 0.2, 0.7, -1.0, 1.2, 0.9, -2.0])
    num_draws = 20_000
    rows = [row(temperature=temperature, top_k=top_k, seed=99, output_index=i) for i in range(num_draws)]

    drawn = sample(logits.expand(num_draws, -1), rows)

    kept = logits.topk(top_k or 12).indices
    probabilities = (logits[kept] / temperature).softmax(0)
    counts = torch.bincount(drawn, minlength=12)
    assert counts.sum() == counts[kept].sum()
    # 99.9 % quantiles of chi-square with 11 and 7 degrees of freedom.
    assert chi_square(counts[kept], probabilities) < {12: 31.26, 8: 24.32}[len(kept)]


def test_banned_ids_never_come_out() -> None:
    logits = random_logits(3)
    best = logits.argmax(-1).tolist()
    banned = [frozenset({token_id}) for token_id in best]
    rows = [
        row(temperature=0, banned_ids=banned[0]),
        row(top_k=1, banned_ids=banned[1]),
        row(temperature=0),
    ]
    before = logits.clone()

    token_ids = sample(logits, rows).tolist()

    assert token_ids[:2] == [int(logits[i].topk(2).indices[1]) for i in range(2)]
    assert token_ids[2] == best[2]
    assert torch.equal(logits, before), "the caller's logits stay as they are"


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    assert kept_ids([1.0, 3.0, 2.0, 2.0, 2.0], top_k=2) == {1, 2}
    assert kept_ids([1.0] * 8, top_k=3) == {0, 1, 2}


def test_top_p_keeps_the_fewest_that_hold_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert kept_ids(logits, top_p=0.4) == {1}
    assert kept_ids(logits, top_p=0.6) == {1, 3}
    assert kept_ids(logits, top_p=0.8) == {1, 3, 2}
    assert kept_ids(logits, top_p=1e-9) == {1}


def test_top_p_is_taken_of_what_top_k_left() -> None:
    # 0.5 and 0.25 become 2/3 and 1/3 of the two that are left
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert kept_ids(logits, top_k=2, top_p=0.6) == {1}
    assert kept_ids(logits, top_k=2, top_p=0.7) == {1, 3}


def test_top_p_looks_beyond_the_first_candidates() -> None:
    # Given a flat distribution, more than half of which lies behind the first candidates
    size = 3 * FIRST_CANDIDATES
    logits = [1e-4 * i for i in range(size)]
    kept = kept_ids(logits, top_p=0.9)
    probabilities = torch.tensor(logits, dtype=torch.float64).softmax(0)
    lowest = min(kept)
    assert kept == set(range(lowest, size))
    assert probabilities[lowest:].sum() >= 0.9 > probabilities[lowest + 1 :].sum()


@pytest.mark.parametrize("nothing", [float("nan"), float("-inf")])
def test_row_with_nothing_to_choose_gives_no_token_and_the_others_theirs(nothing: float) -> None:
    rows = [row(temperature=0), row(), row(top_k=3, top_p=0.5), row(top_p=0.5), row(top_k=3)]
    assert sample(torch.full((5, 16), nothing), rows).tolist() == [NO_TOKEN] * 5
    logits = torch.full((10, 16), nothing)
    logits[5:, 9] = -4.0
    assert sample(logits, [*rows, *rows]).tolist() == [NO_TOKEN] * 5 + [9] * 5
    assert choose_greedily(logits).tolist() == [NO_TOKEN] * 5 + [9] * 5
    assert sample(torch.zeros(1, 2), [row(banned_ids=frozenset({0, 1}))]).tolist() == [NO_TOKEN]
