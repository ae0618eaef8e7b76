"""Drafts that proposers make of a sequence's own tokens."""

from __future__ import annotations

from inflight.executor.speculation.proposer import NO_DRAFT, Draft, NgramProposer


def proposer(*ids: int, max_tokens: int = 100) -> NgramProposer:
    made = NgramProposer(max_tokens)
    made.extend(ids)
    return made


def test_ngram_proposer_drafts_what_followed_the_last_occurrence_of_the_longest_ngram() -> None:
    made = proposer(1, 2, 3, 4, 9, 2, 3, 5, 0, 2, 3)

    assert made.propose(2) == Draft((5, 0), 2)
    made.extend([4])
    assert made.propose(3) == Draft((9, 2, 3), 3)


def test_ngram_proposer_needs_two_tokens_that_occurred_before() -> None:
    assert proposer().propose(4) == NO_DRAFT
    assert proposer(1).propose(4) == NO_DRAFT
    assert proposer(1, 2, 3, 1).propose(4) == NO_DRAFT
    assert proposer(1, 2, 1, 2).propose(0) == NO_DRAFT


def test_draft_repeats_a_period_that_ends_at_the_newest_token() -> None:
    assert proposer(8, 1, 2, 3, 1, 2, 3).propose(7).ids == (1, 2, 3, 1, 2, 3, 1)


def test_extending_in_parts_proposes_the_same() -> None:
    ids = [1, 2, 3, 4, 1, 2, 5, 1, 2]
    parts = NgramProposer()
    for token_id in ids:
        parts.extend([token_id])

    assert parts.propose(5) == proposer(*ids).propose(5)


def test_ngram_proposer_forgets_the_older_half_of_many_tokens() -> None:
    made = proposer(*range(8), max_tokens=8)

    made.extend([0, 1])
    assert made.propose(4) == NO_DRAFT
    made.extend([6, 7])
    assert made.propose(4) == Draft((0, 1, 6, 7), 2)
