"""Proposers and budgets for tests: drafts that are all right, all wrong or random, and a budget that verifies all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.step_constraint import DraftTerms
from inflight.executor.speculation.budget import DraftBudget
from inflight.executor.speculation.forced import GrammarProposer
from inflight.executor.speculation.proposer import Draft, NgramProposer, Proposer
from tests.support.device.fake_device import VOCABULARY_SIZE, next_content

CHEAP = DraftTerms(lambda num_tokens: 1.0 + 1e-6 * num_tokens)


class EagerBudget(DraftBudget):
    """Verifies as much of the drafts as it may, the first ones first."""

    def choose(self, drafts: Sequence[Draft], rows: int, time_of_step: Callable[[int], float], limit: int) -> list[int]:
        chosen = []
        for draft in drafts:
            chosen.append(min(len(draft.ids), limit))
            limit -= chosen[-1]
        return chosen


class GuessingProposer:
    """Drafts ids by a function of all tokens before. It ignores outputs of earlier requests, which it gets first."""

    def __init__(self, guess: Callable[[Sequence[int]], int]) -> None:
        self._guess = guess
        self._ids: list[int] = []
        self._has_earlier = False

    def extend(self, ids: Sequence[int]) -> None:
        if self._has_earlier:
            self._ids += ids
        self._has_earlier = True

    def propose(self, limit: int) -> Draft:
        ids = list(self._ids)
        for _ in range(limit):
            ids.append(self._guess(ids))
        return Draft(tuple(ids[len(self._ids) :]), 3)


class AnyTokens:
    """A compiled grammar that forces no token and allows all, and its matcher."""

    @property
    def matcher(self) -> AnyTokens:
        return self

    def deep_copy(self) -> AnyTokens:
        return self

    def consume_tokens(self, tokens: list[int]) -> bool:
        return True

    def compute_ff_tokens(self) -> list[int]:
        return []

    def validate_tokens(self, tokens: list[int]) -> int:
        return len(tokens)


def token_of_fake_device(ids: Sequence[int], salt: bytes = b"") -> int:
    """What the fake device samples for a greedy request."""
    content = int.from_bytes(b"salt:" + salt, "little")
    for token_id in ids:
        content = next_content(content, token_id)
    return content % VOCABULARY_SIZE


def right(salt: bytes = b"") -> Proposer:
    """Drafts what the fake device samples."""
    return GuessingProposer(lambda ids: token_of_fake_device(ids, salt))


def wrong() -> Proposer:
    """Drafts what the fake device does not sample."""
    return GuessingProposer(lambda ids: (token_of_fake_device(ids) + 1) % VOCABULARY_SIZE)


def half_right() -> Proposer:
    """Drafts what the fake device samples, or something else, by chance."""
    return GuessingProposer(
        lambda ids: (token_of_fake_device(ids) + random.Random(sum(ids) + len(ids)).randrange(2)) % VOCABULARY_SIZE
    )


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "right": right,
    "wrong": wrong,
    "half": half_right,
    "ngram": NgramProposer,
}


def eager(
    make_proposer: Callable[[], Proposer], num_ahead_per_waiting: int = 0, *, checks_grammar: bool = True
) -> Drafting:
    """Drafts whose every token is verified, as far as the step allows; also those that a grammar refuses, unless
    `checks_grammar`."""
    within = GrammarProposer if checks_grammar else lambda proposer, matcher, output_ids: proposer
    return Drafting(make_proposer, EagerBudget(), num_ahead_per_waiting, within)
