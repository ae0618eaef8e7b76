"""Statistical tests of random words and of draws, as p-values: uniform between 0 and 1 if the numbers are random.

Equidistribution, serial, runs and birthday spacings as in Knuth, "The Art of Computer Programming", volume 2, section
3.3.2, and Marsaglia & Tsang, "Some difficult-to-pass tests of randomness", 2002.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]

DAYS_BITS, NUM_BIRTHDAYS = 24, 512  # 2 equal spacings a year are expected


def battery(words: Words) -> dict[str, float]:
    """P-values of the tests of words in their order."""
    return dict(_battery(words))


def _battery(words: Words) -> Iterator[tuple[str, float]]:
    for bits in (1, 4, 8, 12):
        yield f"first {bits} bits", equal_counts(words >> (32 - bits), 1 << bits)
        yield f"last {bits} bits", equal_counts(words & ((1 << bits) - 1), 1 << bits)
    for bit in range(32):
        yield f"bit {bit}", equal_counts(words >> bit & 1, 2)
    yield "Kolmogorov-Smirnov", kolmogorov_smirnov((words + 0.5) * 2.0**-32)
    # Words of one counter are 1 to 3 apart, those of neighbouring counters at the same place 4.
    for lag in (1, 2, 3, 4, 5, 64):
        yield f"pairs {lag} apart", equal_counts((words[:-lag] >> 26) * 64 + (words[lag:] >> 26), 1 << 12)
        yield f"correlation {lag} apart", correlation(words, lag)
    yield "runs about the median", runs(words)
    yield "birthday spacings, first bits", birthday_spacings(words >> (32 - DAYS_BITS))
    yield "birthday spacings, last bits", birthday_spacings(words & ((1 << DAYS_BITS) - 1))


def equal_counts(values: Integers, num_values: int) -> float:
    counts = np.bincount(values, minlength=num_values)
    return chi_square(counts, np.full(num_values, len(values) / num_values))


def chi_square(counts: Integers, expected: Floats) -> float:
    return float(chi_squares(counts[None], expected)[0])


def chi_squares(counts: Integers, expected: Floats) -> Floats:
    """The p-value of each row of `counts[N, K]`."""
    statistic = ((counts - expected) ** 2 / expected).sum(1)
    half = torch.full((len(counts),), (counts.shape[1] - 1) / 2, dtype=torch.float64)
    return np.asarray(torch.special.gammaincc(half, torch.from_numpy(statistic / 2)))


def kolmogorov_smirnov(uniform: Floats) -> float:
    """Whether numbers are uniform between 0 and 1, by the asymptotic distribution of the largest distance."""
    ordered, count = np.sort(uniform), len(uniform)
    places = np.arange(count + 1) / count
    distance = max(np.max(places[1:] - ordered), np.max(ordered - places[:-1]))
    scaled = (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * distance
    terms = [2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)]
    return float(np.clip(sum(terms), 0, 1))


def correlation(words: Words, lag: int) -> float:
    uniform = (words + 0.5) * 2.0**-32 - 0.5
    products = uniform[:-lag] * uniform[lag:]
    return two_sided(float(products.sum()) * 12 / math.sqrt(len(products)))


def runs(words: Words) -> float:
    """The number of runs of the first bit (Wald & Wolfowitz)."""
    above = words >> 31
    count, num_above = len(words), int(above.sum())
    mean = 2 * num_above * (count - num_above) / count + 1
    variance = (mean - 1) * (mean - 2) / (count - 1)
    return two_sided((1 + np.count_nonzero(np.diff(above)) - mean) / math.sqrt(variance))


def birthday_spacings(days: Integers) -> float:
    """The number of equal spacings in all years together, which is nearly a Poisson variable."""
    years = np.sort(days[: len(days) // NUM_BIRTHDAYS * NUM_BIRTHDAYS].reshape(-1, NUM_BIRTHDAYS).astype(np.int64), 1)
    spacings = np.sort(np.diff(years, axis=1, prepend=0), 1)
    equal = np.count_nonzero(np.diff(spacings, axis=1) == 0)
    mean = len(years) * NUM_BIRTHDAYS**3 / 2 ** (DAYS_BITS + 2)
    return two_sided((equal - mean) / math.sqrt(mean))


def two_sided(deviations: float) -> float:
    """The p-value of so many standard deviations of a normal variable."""
    return math.erfc(abs(deviations) / math.sqrt(2))
