"""Proposer of constrained output: what a grammar forces, and another proposer's drafts within the grammar.

It has a matcher of its own, which consumes the output as it becomes known. Masks are computed elsewhere, by the
matchers of the steps' rows, so a wrong draft costs time only. A grammar forces a text; the drafted ids are those that
the tokenizer makes of it, and the model may choose others. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inflight.executor.speculation.proposer import Draft, Proposer

# Tokens that a matcher consumes at once. An output that was resumed is longer: its first drafts are not limited.
MAX_TOKENS_AT_ONCE = 64


class Matcher(Protocol):
    """The part of llguidance's matcher that is used."""

    def consume_tokens(self, tokens: list[int]) -> bool:
        """Appends tokens; false if one of them is not allowed, after which it is in an error."""

    def compute_ff_tokens(self) -> list[int]:
        """Returns the tokens whose text must follow."""

    def validate_tokens(self, tokens: list[int]) -> int:
        """Returns how many of the tokens may follow."""


class GrammarProposer:
    """Drafts within a grammar. A matcher that fails is dropped: then the other proposer's drafts are not limited."""

    def __init__(self, proposer: Proposer, matcher: Matcher, output_ids: Sequence[int]) -> None:
        """`proposer` has the tokens so far, `matcher` has consumed none of the output."""
        self._proposer = proposer
        self._matcher: Matcher | None = matcher
        self._to_consume = list(output_ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Appends accepted output."""
        self._proposer.extend(ids)
        if self._matcher is not None:
            self._to_consume += ids

    def propose(self, limit: int) -> Draft:
        """Returns what the grammar forces, or a draft of the other proposer that goes beyond that."""
        draft = self._proposer.propose(limit)
        if self._matcher is None or limit <= 0:
            return draft
        some, self._to_consume = self._to_consume[:MAX_TOKENS_AT_ONCE], self._to_consume[MAX_TOKENS_AT_ONCE:]
        if some and not self._matcher.consume_tokens(some):
            self._matcher = None
        if self._matcher is None or self._to_consume:
            return draft
        forced = tuple(self._matcher.compute_ff_tokens()[:limit])
        if draft.ids[: len(forced)] != forced:
            return Draft(forced, 0, len(forced))
        num_allowed = self._matcher.validate_tokens(list(draft.ids))
        if num_allowed <= len(forced):
            return Draft(forced, 0, len(forced))
        return Draft(draft.ids[:num_allowed], draft.match_length, len(forced))
