"""Drafts of the next tokens of a sequence, and the n-gram proposer. Pure.

A proposer looks up the newest tokens of its sequence among the older ones and drafts what followed there. A draft is a
guess: the step verifies it, so it affects speed and never a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# A proposer that reaches this number of tokens forgets the older half.
MAX_TOKENS = 32_768
# Lengths of the n-grams that are looked up, the longest first.
NGRAM_SIZES = (5, 4, 3, 2)


@dataclass(frozen=True, slots=True)
class Draft:
    """The ids that may follow, and how many of the newest tokens the match covers. Both are empty without a match.
    A grammar forces the text of the first `num_forced` ids."""

    ids: tuple[int, ...]
    match_length: int
    num_forced: int = 0


NO_DRAFT = Draft((), 0)


class Proposer(Protocol):
    """Drafts for one sequence."""

    def extend(self, ids: Sequence[int]) -> None:
        """Appends tokens: the prompt first, then the accepted output. Takes amortized constant time per token."""

    def propose(self, limit: int) -> Draft:
        """Returns at most `limit` ids that may follow the tokens so far."""


class NgramProposer:
    """Looks up the last 5, 4, 3 or 2 tokens where they occurred last. Takes at most about 500 bytes per token."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        assert max_tokens > 1
        self._max_tokens = max_tokens
        self._ids: list[int] = []
        # By the hash of an n-gram, the number of tokens up to its last end. The n-grams at the newest token are added
        # with the next one, so that a lookup finds an older end.
        self._ends: dict[int, int] = {}

    def extend(self, ids: Sequence[int]) -> None:
        """Appends tokens."""
        ids = ids[-self._max_tokens :]
        if len(self._ids) + len(ids) > self._max_tokens:
            ids = [*self._ids, *ids][-max(len(ids), self._max_tokens // 2) :]
            self._ids, self._ends = [], {}
        own, ends = self._ids, self._ends
        for token_id in ids:
            end = len(own)
            for size in NGRAM_SIZES:
                if size <= end:
                    ends[hash(tuple(own[end - size :]))] = end
            own.append(token_id)

    def propose(self, limit: int) -> Draft:
        """Returns what followed the last occurrence of the longest n-gram that occurred before."""
        end = len(self._ids)
        for size in NGRAM_SIZES:
            if size < end and limit > 0:
                newest = self._ids[end - size :]
                found = self._ends.get(hash(tuple(newest)))
                # Different n-grams may have the same hash.
                if found is not None and self._ids[found - size : found] == newest:
                    return Draft(following(self._ids, found, limit), size)
        return NO_DRAFT


def following(ids: Sequence[int], end: int, limit: int) -> tuple[int, ...]:
    """Returns `limit` ids from `end` on. After the last id the text since `end` repeats."""
    found = tuple(ids[end : end + limit])
    return (found * -(-limit // len(found)))[:limit]
