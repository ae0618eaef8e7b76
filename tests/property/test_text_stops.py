"""The stop matcher decides as a search of the whole text does, and holds back as little as can be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.router.text.output import StopMatcher
from tests.support.examples import examples

# Few letters, so that stops overlap, contain each other and nearly match.
LETTERS = st.one_of(st.text("ab", max_size=30), st.text("aé🦙", max_size=30))
STOPS = st.lists(st.one_of(st.text("ab", min_size=1, max_size=6), st.text("aé🦙", min_size=1, max_size=4)), max_size=5)
PIECES = st.lists(st.tuples(LETTERS, st.booleans()), max_size=10)


def earliest_match(text: str, may_stop_at: Sequence[bool], stops: Sequence[str]) -> tuple[int, str] | None:
    """End and text of the match that ends first and, of those, is longest. `may_stop_at[i]` is of character i."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and may_stop_at[end - 1]:
            return end, max(found, key=len)
    return None


def longest_beginning(text: str, stops: Sequence[str]) -> str:
    """The longest end of text that is a proper prefix of some stop."""
    beginnings = [text[i:] for i in range(len(text)) if any(s.startswith(text[i:]) and s != text[i:] for s in stops)]
    return max(beginnings, key=len, default="")


@settings(max_examples=examples(500), deadline=None)
@given(stops=STOPS, pieces=PIECES, include_stop=st.booleans())
def test_text_is_cut_where_a_search_of_the_whole_cuts_it(
    stops: list[str], pieces: list[tuple[str, bool]], include_stop: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include_stop)
    whole = "".join(text for text, _ in pieces)
    may_stop_at = [may_stop for text, may_stop in pieces for _ in text]
    steps = [matcher.push(text, may_stop=may_stop) for text, may_stop in pieces]
    sent = "".join(step.text for step in steps) + matcher.flush()
    match = earliest_match(whole, may_stop_at, stops)
    if match is None:
        assert sent == whole
        assert all(step.matched is None for step in steps)
    else:
        end, stop = match
        assert sent == whole[: end if include_stop else end - len(stop)]
        assert steps[-1].matched == stop


@settings(max_examples=examples(500), deadline=None)
@given(stops=STOPS, texts=st.lists(LETTERS, max_size=8))
def test_exactly_a_possible_beginning_is_held_back(stops: list[str], texts: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = sent = ""
    for text in texts:
        seen += text
        step = matcher.push(text)
        sent += step.text
        if step.matched is not None:
            return
        assert sent + longest_beginning(seen, stops) == seen


@pytest.mark.parametrize("num_pushes", [1, 100_000])
def test_many_long_stops_hold_no_more_than_a_stop(num_pushes: int) -> None:
    matcher = StopMatcher([f"{'a' * 1000}{i}" for i in range(64)])
    num_sent = sum(len(matcher.push("a" * (100_000 // num_pushes)).text) for _ in range(num_pushes))
    assert num_sent == 100_000 - 1000
    assert matcher.flush() == "a" * 1000
