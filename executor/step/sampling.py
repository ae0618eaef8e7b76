"""Sampling of the next token of every row that yields one.

The random number that decides on a token depends only on (seed, output index, vocabulary index): Philox gives one for
each vocabulary index, it becomes Gumbel noise, and the largest noisy logit wins (Gumbel-max: a draw from the softmax).
So a row's token does not depend on the other rows, their order, chunking, preemption or the executor.

    row with temperature 0     the largest logit, the lowest id among equals; no random number
                               (`inflight.executor.serving.submission` rounds a temperature near 0 to 0)
    otherwise                  logits / temperature, then those at least min_p times as likely as the likeliest, then
                               the top_k largest, then the fewest of those that hold top_p of their probability; at
                               least one token is always kept

The changes of executor/logits come first, for rows that have any.

A NaN is never chosen and has no weight. A row without a usable logit (every logit is NaN, -inf or banned) yields
`NO_TOKEN`, which ends its sequence.

Among equal logits at the edge of top_k or top_p the lowest ids are kept, so that the count is exact.

On a CPU the C++ code is ten to forty times faster (native/sampler.h). The torch code here runs on any device and is the
reference in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.common.parameters import NEUTRAL_SAMPLING
from inflight.executor.engine.runner import NO_TOKEN
from inflight.executor.logits.reference import process_row
from inflight.executor.logits.row import LogitsRow
from inflight.executor.scheduler.sequence import ALL_EXCLUDED, Sampling
from inflight.executor.step.philox import MASK, philox_words

# Candidates examined first for a row with top_p but no top_k. If they hold too little probability, all are sorted.
FIRST_CANDIDATES = 1024
# Noise for whole vocabularies is made about this many numbers at a time, so that they stay in a processor's cache.
NOISE_AT_ONCE = 200_000
# Uniform numbers are the words' middles, (word + 0.5) / 2**32, kept below 1 in float32.
LARGEST_UNIFORM = 1 - 2**-24


# What a row that draws from all tokens has. Other values keep some of the tokens only.
UNRESTRICTED = {
    one.name: NEUTRAL_SAMPLING[one.name] for one in fields(Sampling) if one.name not in ("temperature", "seed")
}


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row of logits is sampled; `banned_ids` are excluded. `processed` changes its logits first."""

    sampling: Sampling
    output_index: int
    banned_ids: frozenset[int]
    processed: LogitsRow | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Returns the token ids `[R]` int64 of `logits[R, vocabulary]`, which are not changed."""
    assert logits.shape[0] == len(rows)
    logits = _without_banned(_processed(numbers_of(logits), rows), rows)
    token_ids = logits.argmax(-1)
    is_empty = logits.gather(1, token_ids[:, None])[:, 0] == float("-inf")
    random = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    restricted = [i for i in random if _restricts(rows[i].sampling)]
    free = sorted(set(random) - set(restricted))
    if free:
        token_ids[free] = _draw_from_all(_scaled(logits, rows, free), [rows[i] for i in free])
    if restricted:
        # An empty row has no largest logits to keep; its drawn token is discarded.
        scaled = _scaled(logits.masked_fill(is_empty[:, None], 0.0), rows, restricted)
        token_ids[restricted] = _draw_from_top(scaled, [rows[i] for i in restricted])
    return token_ids.masked_fill(is_empty, NO_TOKEN)


def min_p_logs(min_p: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns the natural logarithms of `min_p`, -inf for 0. Every backend adds these float32 numbers to the largest
    logit, so that all keep the same tokens."""
    with np.errstate(divide="ignore"):
        return np.log(min_p.astype(np.float64)).astype(np.float32)


def name_excluded(token_ids: Tensor, logits: Tensor) -> Tensor:
    """Returns the token ids `[R]` with `ALL_EXCLUDED` in place of `NO_TOKEN` where the model's `logits[R, vocabulary]`
    have a usable number."""
    is_excluded = (token_ids == NO_TOKEN) & (numbers_of(logits) > float("-inf")).any(1)
    return token_ids.masked_fill(is_excluded, ALL_EXCLUDED)


def choose_greedily(logits: Tensor) -> Tensor:
    """Returns the ids `[R]` int64 of the largest of `logits[R, vocabulary]`, the lowest id among equals."""
    largest, token_ids = numbers_of(logits).max(-1)
    return token_ids.masked_fill(largest == float("-inf"), NO_TOKEN)


def numbers_of(logits: Tensor) -> Tensor:
    """Returns the logits with -inf in place of NaN, which torch would treat as the largest."""
    return logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))


def keep_likeliest(scaled: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Returns the candidates of each row of `scaled[N, V]`, as `keep_top` does, by min_p, top_k and top_p."""
    top_k = torch.tensor([sampling.top_k for sampling in samplings], device=scaled.device)
    top_p = torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float64, device=scaled.device)
    least = min_p_logs(np.array([sampling.min_p for sampling in samplings], np.float32))
    edge = scaled.amax(1, keepdim=True) + torch.from_numpy(least).to(scaled.device)[:, None]
    likely = scaled.masked_fill(scaled < edge, float("-inf"))
    ids, is_kept = keep_top(likely, top_k, top_p)
    return ids, is_kept & (likely.gather(1, ids) > float("-inf"))


def keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the candidate token ids `[N, M]` of each row of `scaled[N, V]`, and a boolean `[N, M]` of those that are
    kept.

    `top_k[N]` 0 is all, `top_p[N]` 1 is all.
    """
    vocabulary_size = scaled.shape[1]
    limits = torch.where(top_k > 0, top_k.clamp(max=vocabulary_size), vocabulary_size)
    total = _log_sum(scaled)
    width = min(vocabulary_size, int(torch.where(top_k > 0, limits, FIRST_CANDIDATES).max()))
    top = scaled.topk(width)
    counts = _count_kept(top.values, total, limits, top_p)
    if counts is None:
        top = scaled.topk(vocabulary_size)
        counts = _count_kept(top.values, total, limits, top_p)
        assert counts is not None
    edge = top.values.gather(1, counts[:, None] - 1)  # the smallest value that is kept
    if bool(((scaled >= edge).sum(1) > counts).any()):
        return _lowest_ids_at_edge(scaled, edge, counts)
    ids = top.indices[:, : int(counts.max())]
    return ids, torch.arange(ids.shape[1], device=ids.device) < counts[:, None]


def _count_kept(top: Tensor, total: Tensor, limits: Tensor, top_p: Tensor) -> Tensor | None:
    """Returns how many of each row's largest values `top[N, M]` are kept; None if more than M may be."""
    width = top.shape[1]
    is_beyond = torch.arange(width, device=top.device) >= limits[:, None]
    # top_p is of the probability within top_k; where that is all, of the whole row.
    total = torch.where(limits <= width, _log_sum(top.masked_fill(is_beyond, float("-inf"))), total)
    mass = (top.double() - total[:, None]).exp().cumsum(1)
    # A token is kept while those before it hold less than top_p; the first always is.
    needed = torch.where(top_p < 1, 1 + (mass < top_p[:, None]).sum(1), limits)
    counts = torch.minimum(needed, limits)
    return None if bool((counts > width).any()) else counts


def _lowest_ids_at_edge(scaled: Tensor, edge: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps the lowest ids among equal values at the edge, as many as the count allows."""
    above, equal = scaled > edge, scaled == edge
    room = counts - above.sum(1)
    kept = above | (equal & (equal.cumsum(1) <= room[:, None]))
    order = kept.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    width = int(counts.max())
    return order.indices[:, :width], order.values[:, :width].bool()


def _log_sum(values: Tensor) -> Tensor:
    """Returns the log of the sum of exponentials, summed in float64, so that it does not depend on the order of
    summing."""
    largest = values.amax(1)
    return (values - largest[:, None]).exp().sum(1, dtype=torch.float64).log() + largest


def gumbel_noise(rows: Sequence[SampleRow], vocabulary_ids: Tensor) -> Tensor:
    """Returns the noise of `vocabulary_ids[N, M]` in each row, float32: word `id % 4` of counter `id // 4`."""
    words = torch.stack(_words(rows, vocabulary_ids >> 2), -1)
    return _gumbel(words.gather(-1, (vocabulary_ids & 3)[..., None]).squeeze(-1))


def _draw_from_all(scaled: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    vocabulary_size = scaled.shape[1]
    rows_at_once = max(1, NOISE_AT_ONCE // vocabulary_size)
    counters = torch.arange(-(-vocabulary_size // 4), device=scaled.device)
    winners = []
    for start in range(0, len(rows), rows_at_once):
        some = rows[start : start + rows_at_once]
        words = torch.stack(_words(some, counters.expand(len(some), -1)), -1).flatten(1)[:, :vocabulary_size]
        winners.append((scaled[start : start + rows_at_once] + _gumbel(words)).argmax(-1))
    return torch.cat(winners)


def _draw_from_top(scaled: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    ids, is_kept = keep_likeliest(scaled, [row.sampling for row in rows])
    ids, order = ids.sort(dim=1)  # so that the lowest id wins among equals
    noisy = (scaled.gather(1, ids) + gumbel_noise(rows, ids)).masked_fill(~is_kept.gather(1, order), float("-inf"))
    return ids.gather(1, noisy.argmax(1, keepdim=True)).squeeze(1)


def _words(rows: Sequence[SampleRow], counters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns Philox words with key = seed and counter = (`counters[N, M]`, output index, 0, 0)."""
    device = counters.device
    seeds = [row.sampling.seed for row in rows]
    low = torch.tensor([seed & MASK for seed in seeds], device=device)[:, None]
    high = torch.tensor([seed >> 32 & MASK for seed in seeds], device=device)[:, None]
    output_index = torch.tensor([row.output_index for row in rows], device=device)[:, None]
    zero = torch.zeros_like(low)
    return philox_words((counters, output_index, zero, zero), (low, high))


def _gumbel(words: Tensor) -> Tensor:
    """Returns -log(-log(1 - u)). Near u = 0, where the largest noise comes from, float32 is at its most precise."""
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return -torch.log(-torch.log1p(-uniform))


def _scaled(logits: Tensor, rows: Sequence[SampleRow], chosen: Sequence[int]) -> Tensor:
    temperatures = torch.tensor([rows[i].sampling.temperature for i in chosen], device=logits.device)
    return logits[list(chosen)].float() / temperatures[:, None]


def _restricts(sampling: Sampling) -> bool:
    return any(getattr(sampling, name) != neutral for name, neutral in UNRESTRICTED.items())


def _processed(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    changed = {i: row.processed for i, row in enumerate(rows) if row.processed is not None}
    if not changed:
        return logits
    logits = logits.float().clone()
    for i, row in changed.items():
        logits[i] = process_row(logits[i], row)
    return logits


def _without_banned(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    banned = [(i, token_id) for i, row in enumerate(rows) for token_id in row.banned_ids]
    if not banned:
        return logits
    index = torch.tensor(banned, device=logits.device)
    return logits.index_put((index[:, 0], index[:, 1]), torch.tensor(float("-inf"), device=logits.device))
