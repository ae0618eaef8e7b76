"""How far a model's predictions are from a reference's, in figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.measures import percentile


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over all positions of a text, each given the true tokens before it.

    `num_different` positions have another likeliest token than the reference. `gap_…` are the reference's own leads, in
    logits, of its first over its second token at those positions: small ones are near ties. `share_of_smaller_gaps` is
    the share of all positions where the reference leads by no more than `gap_max`. None where nothing differs.
    """

    num_positions: int
    perplexity: float
    num_different: int
    gap_p50: float | None
    gap_p99: float | None
    gap_max: float | None
    share_of_smaller_gaps: float | None

    @property
    def share_equal(self) -> float:
        """Share of positions with the reference's likeliest token."""
        return 1 - self.num_different / self.num_positions


def perplexity(log_probabilities: Sequence[float]) -> float:
    """e to the mean negative log probability of the tokens that do follow."""
    return math.exp(-math.fsum(log_probabilities) / len(log_probabilities))


def agreement(
    reference_ids: Sequence[int],
    reference_gaps: Sequence[float],
    top_ids: Sequence[int],
    log_probabilities: Sequence[float],
) -> Agreement:
    """Compares the likeliest tokens of a model with those of a reference, position by position."""
    assert len(reference_ids) == len(reference_gaps) == len(top_ids) == len(log_probabilities) > 0
    gaps = [
        gap
        for reference_id, gap, top_id in zip(reference_ids, reference_gaps, top_ids, strict=True)
        if reference_id != top_id
    ]
    largest = max(gaps, default=None)
    smaller = None if largest is None else sum(gap <= largest for gap in reference_gaps) / len(reference_gaps)
    return Agreement(
        num_positions=len(top_ids),
        perplexity=perplexity(log_probabilities),
        num_different=len(gaps),
        gap_p50=percentile(gaps, 0.5),
        gap_p99=percentile(gaps, 0.99),
        gap_max=largest,
        share_of_smaller_gaps=smaller,
    )


def cut(token_ids: Sequence[int], num_prompts: int) -> list[list[int]]:
    """The text as prompts of one length, without overlap; what is left over at the end is dropped."""
    length = len(token_ids) // num_prompts
    assert length >= 2, "a prompt needs a token and one that follows it"
    return [list(token_ids[i * length : (i + 1) * length]) for i in range(num_prompts)]
