"""Sampling does not depend on the other rows, and its filters keep what they promise."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inflight.executor.scheduler.sequence import Sampling
from inflight.executor.step.sampling import SampleRow, keep_top, sample

VOCABULARY_SIZE = 300

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 50, 299, 300, 5000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
rows = st.builds(
    SampleRow, samplings, st.integers(0, 2**31), st.frozensets(st.integers(0, VOCABULARY_SIZE - 1), max_size=3)
)
# Few distinct values, so that ties are common.
row_logits = st.integers(0, 2**32).map(
    lambda seed: (torch.randn(VOCABULARY_SIZE, generator=torch.Generator().manual_seed(seed)) * 8).round() / 4
)


pytestmark = pytest.mark.usefixtures("one_thread")


@settings(deadline=None)
@given(batch=st.lists(st.tuples(rows, row_logits), min_size=1, max_size=9), order=st.randoms(use_true_random=False))
def test_a_row_gives_the_same_token_alone_and_in_any_company(
    batch: list[tuple[SampleRow, Tensor]], order: random.Random
) -> None:
    shuffled = list(batch)
    order.shuffle(shuffled)
    together = sample(torch.stack([logits for _, logits in shuffled]), [row for row, _ in shuffled]).tolist()
    alone = [sample(logits[None], [row]).item() for row, logits in shuffled]
    assert together == alone


@settings(deadline=None)
@given(logits=row_logits, top_k=st.integers(0, 400), top_p=st.floats(1e-6, 1.0))
def test_filters_keep_the_likeliest_and_no_more_than_needed(logits: Tensor, top_k: int, top_p: float) -> None:
    ids, is_kept = keep_top(logits[None], torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64))
    kept = sorted(ids[is_kept].tolist())
    limit = min(top_k or VOCABULARY_SIZE, VOCABULARY_SIZE)

    # The likeliest first, lower ids first among equals: what is kept is the beginning of that.
    ranked = sorted(range(VOCABULARY_SIZE), key=lambda i: (-float(logits[i]), i))
    assert 1 <= len(kept) <= limit
    assert kept == sorted(ranked[: len(kept)])

    probabilities = logits.double()[ranked[:limit]].softmax(0).cumsum(0)
    count = len(kept)
    if top_p == 1:
        assert count == limit
    elif count < limit:
        assert probabilities[count - 1] >= top_p - 1e-9
    if count > 1 and top_p < 1:
        assert probabilities[count - 2] < top_p + 1e-9


@settings(deadline=None)
@given(row=rows, logits=row_logits)
def test_what_comes_out_was_kept_and_not_banned(row: SampleRow, logits: Tensor) -> None:
    token_id = int(sample(logits[None], [row]))
    assert token_id not in row.banned_ids
    if row.sampling.temperature == 0:
        allowed = [i for i in range(VOCABULARY_SIZE) if i not in row.banned_ids]
        assert token_id == max(allowed, key=lambda i: (float(logits[i]), -i))
    else:
        masked = logits.clone()
        masked[list(row.banned_ids)] = float("-inf")
        scaled = masked[None] / row.sampling.temperature
        ids, is_kept = keep_top(
            scaled, torch.tensor([row.sampling.top_k]), torch.tensor([row.sampling.top_p], dtype=torch.float64)
        )
        assert token_id in ids[is_kept].tolist()
