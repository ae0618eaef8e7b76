"""Whether a sampled id is right, to within what rounding to float32 can do to a score. Computed in float64.

A score is `logit / temperature + noise`. The division is exact to the last bit everywhere; noise is rounded. An
implementation that takes each logarithm right to one unit in the last place (torch's are) gives noise that is off by at
most one unit of its own and, through the inner logarithm, 2^-23; adding it to the logit rounds once more. Two tokens
whose scores are nearer than both errors together may win in either order.

Where tokens before the edge of top_p hold just about top_p, one more or one less may stay: the sum of 50,000 float32
exponentials, each right to some units of 2^-24, decides.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.executor.scheduler.sequence import Sampling
from inflight.executor.step.philox import philox_words
from inflight.executor.step.sampling import LARGEST_UNIFORM, SampleRow, keep_likeliest

TOP_P_TOLERANCE = 1e-6
# Counter, key and words: the known answers for 10 rounds that the authors ship with Random123 (kat_vectors).
PHILOX_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def is_right(logits: Tensor, row: SampleRow, token_id: int) -> bool:
    """Whether `token_id` is what sampling `logits[V]` gives, or nearer to it than rounding."""
    logits = logits.clone()
    logits[list(row.banned_ids)] = float("-inf")
    if row.sampling.temperature == 0:
        return token_id == int(logits.argmax())
    scaled = logits / torch.tensor(row.sampling.temperature)
    noise = _noise(row, logits.shape[0])
    scores = scaled.double().numpy() + noise
    errors = _spacing(noise) + 2.0**-23 + _spacing(scores)
    return any(
        token_id in kept and scores[token_id] + errors[token_id] >= (scores[kept] - errors[kept]).max()
        for kept in _kept(scaled, row)
    )


def _kept(scaled: Tensor, row: SampleRow) -> list[NDArray[np.int64]]:
    """The ids that stay, and those that stay where top_p is a little more or less."""
    top_p = row.sampling.top_p
    several = [top_p] if top_p >= 1 else [top_p, top_p - TOP_P_TOLERANCE, min(top_p + TOP_P_TOLERANCE, 1.0)]
    return [_keep_likeliest(scaled, replace(row.sampling, top_p=some)) for some in several]


def _keep_likeliest(scaled: Tensor, sampling: Sampling) -> NDArray[np.int64]:
    ids, is_kept = keep_likeliest(scaled[None], [sampling])
    return ids[is_kept].numpy()


def _noise(row: SampleRow, size: int) -> NDArray[np.float64]:
    counters = torch.arange(-(-size // 4))
    seed, mask = row.sampling.seed, 0xFFFF_FFFF
    index, zero = torch.tensor([row.output_index]), torch.tensor([0])
    words = torch.stack(
        philox_words((counters, index, zero, zero), (torch.tensor([seed & mask]), torch.tensor([seed >> 32]))), -1
    ).flatten()[:size]
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=LARGEST_UNIFORM).double().numpy()
    noise: NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    return noise


def _spacing(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A unit in the last place of the values as float32; that of an infinite one is 0."""
    finite = np.where(np.isfinite(values), values, 0.0)
    return np.spacing(np.abs(finite).astype(np.float32)).astype(np.float64)
