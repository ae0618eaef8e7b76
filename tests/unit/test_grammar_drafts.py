"""Drafts within a grammar: what it forces, and lookups as far as it allows them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from llguidance import LLMatcher

from inflight.executor.speculation.budget import PRIOR, DraftBudget
from inflight.executor.speculation.forced import MAX_TOKENS_AT_ONCE, GrammarProposer
from inflight.executor.speculation.proposer import Draft, NgramProposer, Proposer
from tests.support.scheduler.drafting import GuessingProposer
from tests.support.text.small_vocabulary import TEXTS, compiled, regex_grammar, text_of


def ids_of(*texts: str) -> list[int]:
    return [TEXTS.index(text) for text in texts]


def proposer_of(pattern: str, guess: Proposer, output: Sequence[int] = ()) -> GrammarProposer:
    return GrammarProposer(guess, compiled(regex_grammar(pattern)).matcher.deep_copy(), output)


def guessing(*texts: str) -> Proposer:
    """Drafts these tokens, whatever came before."""
    ids = ids_of(*texts)
    guess = GuessingProposer(lambda before: ids[len(before) % len(ids)])
    guess.extend(())
    return guess


def test_forced_text_is_drafted_without_any_match() -> None:
    proposer = proposer_of("[0-9]xyzxyz", NgramProposer())
    assert proposer.propose(7).ids == ()
    proposer.extend(ids_of("1"))
    draft = proposer.propose(4)
    assert text_of(list(draft.ids)) == "xyzx"
    assert draft.num_forced == 4


def test_draft_is_cut_where_the_grammar_refuses_it() -> None:
    proposer = proposer_of("[0-9]{2}[a-c]", guessing("1", "2", "3"))
    assert proposer.propose(7) == Draft(tuple(ids_of("1", "2")), 3)


def test_draft_goes_beyond_what_is_forced_only_where_both_agree() -> None:
    assert proposer_of("xyz[0-9]*", guessing("x", "y", "z", "7")).propose(4) == Draft(
        tuple(ids_of("x", "y", "z", "7")), 3, 3
    )
    assert proposer_of("xyz[0-9]*", guessing("x", "y", "7")).propose(4) == Draft(tuple(ids_of("x", "y", "z")), 0, 3)


def test_resumed_output_is_consumed_in_parts() -> None:
    proposer = proposer_of("1*xyz", guessing("2"), ids_of(*["1"] * MAX_TOKENS_AT_ONCE, "x"))
    assert proposer.propose(3).num_forced == 0
    assert text_of(list(proposer.propose(3).ids)) == "yz"


def test_output_that_the_grammar_refuses_is_drafted_without_it() -> None:
    proposer = proposer_of("abc", guessing("2"))
    proposer.extend(ids_of("9"))
    assert proposer.propose(1) == Draft(tuple(ids_of("2")), 3)


def test_acceptance_of_forced_tokens_is_learned_apart() -> None:
    budget = DraftBudget()
    lookup, forced = Draft((1, 2), 3), Draft((1, 2), 3, 1)
    assert budget.survivals(forced)[0] > budget.survivals(lookup)[0] == PRIOR[3]
    before = budget.survivals(lookup)
    for _ in range(50):
        budget.observe(forced, 1, 0)
    assert budget.survivals(lookup) == before
    assert budget.survivals(forced)[0] < 0.2


@pytest.mark.parametrize("limit", [0, 1])
def test_limit_holds(limit: int) -> None:
    assert len(proposer_of("xyzxyz", guessing("x")).propose(limit).ids) == limit


def test_matcher_of_the_library_has_the_calls() -> None:
    assert all(hasattr(LLMatcher, name) for name in ("consume_tokens", "compute_ff_tokens", "validate_tokens"))
