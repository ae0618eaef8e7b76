"""The sampler's random numbers pass statistical tests, as words, as noise and as draws from distributions.

Words are taken along each of the three numbers that they depend on, because a request draws along the vocabulary and
the output indices, and the choices of a request have consecutive seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inflight.executor.scheduler.sequence import Sampling
from inflight.executor.step.philox import MASK, philox_words
from inflight.executor.step.sampling import SampleRow, gumbel_noise, sample

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


pytestmark = pytest.mark.slow

NUM_WORDS = 1 << 20
NUM_DRAWS = 2048
NUM_SAMPLES = 100
# Words are the same in every run, so a test passes always or never. The least of some hundred p-values of random words
# is below this in less than one of a hundred cases.
LEAST_P = 1e-5
ALONG = ("ids", "ids of a distant part", "output indices", "seeds", "high seeds", "distant seeds", "outputs of seeds")


def words_along(name: str, count: int = NUM_WORDS) -> Words:
    """Words with consecutive values of one of what they depend on, the others being constant."""
    numbers, few = torch.arange(count), torch.arange(count // 4)
    none = torch.zeros(1, dtype=torch.int64)
    # Neighbours in bits: seeds and indices of 1, 2, 4 and so on times a large odd number
    distant = numbers * 0x9E37_79B9_7F4A_7C15
    side, high = 1 << 10, torch.arange(count >> 10)
    counter, index, low, top = {
        "ids": (few, none, none, none),
        "ids of a distant part": (few + 30_000, none + 1000, none + 0xDEAD_BEEF, none + 77),
        "output indices": (none, numbers, none, none),
        "seeds": (none, none, numbers, none),
        "high seeds": (none, none, none, numbers),
        "distant seeds": (none, none, distant & MASK, distant >> 32 & MASK),
        "outputs of seeds": (none, torch.arange(side).repeat(count // side), high.repeat_interleave(side), none),
    }[name]
    words = philox_words((counter, index, none, none), (low, top))
    # Of one id the first word of each counter; along ids all four in the order of ids.
    chosen = torch.stack(words, -1).flatten() if name.startswith("ids") else words[0]
    return np.asarray(chosen).astype(np.uint32)


@pytest.mark.parametrize("name", ALONG)
def test_words_pass_statistical_tests(name: str) -> None:
    p_values = battery(words_along(name))
    assert min(p_values.values()) > LEAST_P, min(p_values.items(), key=lambda item: item[1])


def noise_of(seed: int, output_index: int, vocabulary_size: int) -> Floats:
    row = SampleRow(Sampling(1.0, 0, 1.0, seed), output_index, frozenset())
    return np.asarray(gumbel_noise([row], torch.arange(vocabulary_size)[None])[0].double())


def test_noise_has_the_distribution_of_gumbel() -> None:
    noise = np.concatenate([noise_of(seed, 7, NUM_WORDS // 8) for seed in range(8)])
    assert kolmogorov_smirnov(np.exp(-np.exp(-noise))) > LEAST_P
    # The largest of 4,096 numbers, which decide about draws, less its shift of log(4096), has the same distribution.
    largest = noise.reshape(-1, 4096).max(1) - np.log(4096)
    assert kolmogorov_smirnov(np.exp(-np.exp(-largest))) > LEAST_P


def draw_p_values(weights: Floats, num_samples: int, *, has_consecutive_seeds: bool) -> Floats:
    """P-values of samples of NUM_DRAWS draws: along the output indices of a seed, or by the choices of a request."""
    probabilities = weights / weights.sum()
    logits = torch.from_numpy(np.log(probabilities)).float().expand(NUM_DRAWS, -1)
    counts = []
    for i in range(num_samples):
        seeds = [i * NUM_DRAWS + k for k in range(NUM_DRAWS)] if has_consecutive_seeds else [i] * NUM_DRAWS
        rows = [
            SampleRow(Sampling(1.0, 0, 1.0, seed), 0 if has_consecutive_seeds else k, frozenset())
            for k, seed in enumerate(seeds)
        ]
        counts.append(np.bincount(np.asarray(sample(logits, rows)), minlength=len(weights)))
    return chi_squares(np.array(counts), NUM_DRAWS * probabilities)


@pytest.mark.parametrize("has_consecutive_seeds", [False, True], ids=["output indices", "consecutive seeds"])
@pytest.mark.parametrize("shape", ["equal", "unequal"])
def test_p_values_of_draws_are_uniform(shape: str, has_consecutive_seeds: bool) -> None:
    """2,048 draws have at least 10 expected in each place, so that the statistic has its distribution."""
    weights = np.ones(8) if shape == "equal" else np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
    p_values = draw_p_values(weights, NUM_SAMPLES, has_consecutive_seeds=has_consecutive_seeds)
    assert kolmogorov_smirnov(p_values) > LEAST_P
    # Their share below 0.1 is within four standard deviations.
    assert abs(np.mean(p_values < 0.1) - 0.1) < 4 * np.sqrt(0.1 * 0.9 / NUM_SAMPLES)
