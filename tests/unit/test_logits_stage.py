"""The logits stage against transformers' processors in every combination, and the distribution of what is drawn."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inflight.executor.cpu.sampler import NativeSampler
from inflight.executor.logits.reference import banned_ids, process_row
from inflight.executor.logits.row import LogitsRow
from inflight.executor.scheduler.sequence import Processors, Sampling
from inflight.executor.step.sampling import SampleRow, keep_likeliest, sample
from inflight.executor.step.sampling_columns import SamplingBatch
from tests.support.device.native_builds import BEST_FIRST, library_of

# The first test of a build may have to wait for the compiler.
pytestmark = pytest.mark.timeout(600)

SIZE = 96
# The prompt has only lower ids, and bad words of several ids begin with a higher one.
LOWER = SIZE // 2
EOS = 7
BIAS = {3: 2.5, 50: -4.0, 95: 100.0, 0: -0.125}
BAD_WORDS = ((11,), (60, 12), (61, 62, 13), (62, 14))
MIN_TOKENS = 30
CHANGES = ("bias", "repetition", "frequency", "presence", "words", "ngrams", "min_tokens")
KEPT = ("temperature", "min_p", "top_k", "top_p")


@dataclass(frozen=True)
class Case:
    """Random logits of one row, and the features that it has."""

    features: frozenset[str]
    seed: int

    @property
    def processors(self) -> Processors:
        values: dict[str, Any] = {
            "bias": ("bias", tuple(BIAS.items())),
            "repetition": ("repetition_penalty", 1.3),
            "frequency": ("frequency_penalty", 0.7),
            "presence": ("presence_penalty", -0.4),
            "words": ("bad_words", BAD_WORDS),
            "ngrams": ("no_repeat_ngram_size", 3),
        }
        return Processors(**dict(values[feature] for feature in self.features & set(values)))

    @property
    def sampling(self) -> Sampling:
        values: Any = {"temperature": 0.6, "min_p": 0.05, "top_k": 9, "top_p": 0.8}
        return replace(Sampling(1.0, 0, 1.0, 0), **{name: values[name] for name in self.features & set(values)})

    def ids(self) -> tuple[list[int], list[int]]:
        """Prompt and output; the output repeats an n-gram of the prompt, or ends with the beginning of a bad word."""
        random = np.random.default_rng(self.seed)
        prompt = random.integers(0, LOWER, 12).tolist()
        ends = ([], prompt[4:6], [60], [61, 62], [*prompt[1:3], 60])[self.seed % 5]
        return prompt, [*random.integers(0, SIZE, 15).tolist(), *ends]

    def logits(self) -> Tensor:
        return torch.randn(SIZE, generator=torch.Generator().manual_seed(self.seed)) * 4


def theirs(case: Case) -> Tensor:
    """What transformers makes of the logits, in our order of the processors."""
    (prompt, output), processors, sampling = case.ids(), case.processors, case.sampling
    bias: Any = {(token_id,): value for token_id, value in BIAS.items()}
    chain: dict[str, LogitsProcessor] = {
        "bias": SequenceBiasLogitsProcessor(bias),
        "repetition": RepetitionPenaltyLogitsProcessor(1.3),
        "words": NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS], eos_token_id=torch.tensor([EOS])),
        "ngrams": NoRepeatNGramLogitsProcessor(3),
        "min_tokens": MinNewTokensLengthLogitsProcessor(len(prompt), MIN_TOKENS, EOS),
        "temperature": TemperatureLogitsWarper(sampling.temperature),
        "min_p": MinPLogitsWarper(0.05),
        "top_k": TopKLogitsWarper(9),
        "top_p": TopPLogitsWarper(0.8),
    }
    scores, input_ids = case.logits()[None], torch.tensor([[*prompt, *output]])
    for feature in (*CHANGES, *KEPT):
        if feature in ("frequency", "presence"):
            counts = torch.bincount(torch.tensor(output), minlength=SIZE)
            of_each = counts if feature == "frequency" else (counts > 0).float()
            penalty = {"frequency": processors.frequency_penalty, "presence": processors.presence_penalty}[feature]
            scores = scores - penalty * of_each
        elif feature in case.features:
            scores = chain[feature](input_ids, scores)
    return scores[0]


def ours(case: Case) -> Tensor:
    """What the reference makes of the logits."""
    prompt, output = case.ids()
    row = LogitsRow(case.processors, [*prompt, *output], len(prompt), 64, SIZE)
    logits = process_row(case.logits(), row)
    if "min_tokens" in case.features:
        logits[EOS] = -math.inf
    scaled = logits / torch.tensor(case.sampling.temperature)
    ids, is_kept = keep_likeliest(scaled[None], [case.sampling])
    result = torch.full_like(scaled, -math.inf)
    result[ids[is_kept]] = scaled[ids[is_kept]]
    return result


@pytest.mark.parametrize("num_changes", range(len(CHANGES) + 1))
def test_every_combination_equals_the_processors_of_transformers(num_changes: int) -> None:
    seeds = itertools.count()
    for changes in itertools.combinations(CHANGES, num_changes):
        for num_kept in range(len(KEPT) + 1):
            for kept in itertools.combinations(KEPT, num_kept):
                case = Case(frozenset((*changes, *kept)), next(seeds))
                found, expected = ours(case), theirs(case)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=str(case))
                assert found.argmax() == expected.argmax(), case


def test_bad_words_are_matched_in_the_output_alone() -> None:
    """As vLLM does; transformers also bans the end of a word that begins in the prompt."""
    for word, output, banned in (
        ((5, 6), [], set()),
        ((5, 6), [5], {6}),
        ((4, 5, 6), [5], set()),
        ((4, 5, 6), [4, 5], {6}),
        ((4, 5, 6), [4, 5, 9], set()),
        ((6,), [], {6}),
    ):
        row = LogitsRow(Processors(bad_words=(word,)), [4, 5, *output], 2, 9, SIZE)
        assert banned_ids(row) == banned


def expected_probabilities(
    logits: Tensor, prompt: list[int], output: list[int]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Bias, penalties, ban, temperature and min_p of the test below, in float64."""
    scores = logits.double().numpy().copy()
    scores[3] += 1.5
    for token_id in {*prompt, *output}:
        scores[token_id] = scores[token_id] / 1.2 if scores[token_id] > 0 else scores[token_id] * 1.2
    for token_id in set(output):
        scores[token_id] -= 0.3 * output.count(token_id) + 0.2
    scores[8] = -math.inf
    weights = np.exp((scores - scores.max()) / 0.8)
    weights[weights < 0.02] = 0
    probabilities: np.ndarray[tuple[int], np.dtype[np.float64]] = weights / weights.sum()
    return probabilities


@pytest.mark.parametrize("instructions", [None, *BEST_FIRST])
def test_50_000_draws_follow_the_exact_distribution(instructions: str | None) -> None:
    num_draws, size = 50_000, 24
    logits = torch.randn(size, generator=torch.Generator().manual_seed(4)) * 1.5
    prompt, output = [1, 2, 3, 20], [5, 5, 6, 2, 9]
    processors = Processors(
        bias=((3, 1.5),),
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        bad_words=((9, 8),),
    )
    row = LogitsRow(processors, [*prompt, *output], len(prompt), 20, size)
    sampling = Sampling(0.8, 0, 1.0, seed=11, min_p=0.02)
    rows = [SampleRow(sampling, i, frozenset(), row) for i in range(num_draws)]

    if instructions is None:
        changed = process_row(logits, row).expand(num_draws, -1)
        token_ids = sample(changed, [replace(some, processed=None) for some in rows])
    else:
        repeated = logits.expand(num_draws, -1)
        token_ids = NativeSampler(library_of(instructions)).sample(repeated, SamplingBatch.of(rows))

    expected = expected_probabilities(logits, prompt, output) * num_draws
    counts = torch.bincount(token_ids, minlength=size).numpy()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert 8 < kept.sum() < size - 1
    # The 99.9 % quantile of chi-square, by Wilson and Hilferty's approximation.
    degrees = int(kept.sum()) - 1
    quantile = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()) < quantile
