"""The text that a stop matcher sends, holds back and cuts."""

from __future__ import annotations

import pytest

from inflight.router.text.output import StopMatcher, StopStep


def pushed(matcher: StopMatcher, *texts: str) -> list[StopStep]:
    """The steps of texts pushed one after the other."""
    return [matcher.push(text) for text in texts]


def test_text_without_stops_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == StopStep("anything", None)
    assert matcher.flush() == ""


def test_stop_across_pushes_is_cut_and_nothing_follows() -> None:
    matcher = StopMatcher(["END"])
    assert pushed(matcher, "one E", "N", "D two", "three") == [
        StopStep("one ", None),
        StopStep("", None),
        StopStep("", "END"),
        StopStep("", "END"),
    ]
    assert matcher.flush() == ""


def test_only_a_possible_beginning_of_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["a very long stop"])
    assert matcher.push("text a").text == "text "
    assert matcher.push(" ve").text == ""
    assert matcher.push("ry x").text == "a very x"


def test_held_text_comes_when_the_output_ends() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == StopStep("the ", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_beginning_that_fails_leaves_a_shorter_beginning_held() -> None:
    matcher = StopMatcher(["aab"])
    assert pushed(matcher, "aa", "a", "b") == [StopStep("", None), StopStep("a", None), StopStep("", "aab")]


def test_match_that_ends_first_wins() -> None:
    assert StopMatcher(["bcde", "cd"]).push("abcdef") == StopStep("ab", "cd")


def test_longest_of_the_matches_that_end_together_wins() -> None:
    assert StopMatcher(["cd", "bcd", "d"]).push("abcdef") == StopStep("a", "bcd")


def test_included_stop_is_sent_and_nothing_is_held_back() -> None:
    matcher = StopMatcher(["END"], include_stop=True)
    assert pushed(matcher, "the EN", "D two") == [StopStep("the EN", None), StopStep("D", "END")]


def test_match_that_may_not_stop_yet_is_ordinary_text() -> None:
    matcher = StopMatcher(["ab", "abc"])
    assert matcher.push("ab", may_stop=False) == StopStep("", None)
    assert matcher.push("x", may_stop=False) == StopStep("abx", None)
    assert matcher.push("ab") == StopStep("", "ab")


def test_match_may_begin_in_text_that_could_not_stop() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", may_stop=False) == StopStep("a", None)
    assert matcher.push("a") == StopStep("", "aa")


def test_characters_outside_the_basic_plane_are_whole() -> None:
    matcher = StopMatcher(["🦙🦙"])
    assert pushed(matcher, "é🦙", "🦙é") == [StopStep("é", None), StopStep("", "🦙🦙")]


@pytest.mark.parametrize("num_pushes", [1, 100_000])
def test_many_long_stops_hold_no_more_than_a_stop(num_pushes: int) -> None:
    matcher = StopMatcher([f"{'a' * 1000}{i}" for i in range(64)])
    num_sent = sum(len(matcher.push("a" * (100_000 // num_pushes)).text) for _ in range(num_pushes))
    assert num_sent == 100_000 - 1000
    assert matcher.flush() == "a" * 1000
