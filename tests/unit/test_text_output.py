"""The text of a choice: tokens in, cut text out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inflight.router.text.output import OutputText, TextStep
from inflight.router.text.stop_scope import StopScope
from inflight.router.tools.formats import CHANNELS, THINK, ReasoningFormat


class Spelled:
    """A detokenizer whose tokens are words of a list."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def push(self, token_ids: Sequence[int]) -> str:
        """The words."""
        return "".join(self._words[token_id] for token_id in token_ids)

    def flush(self) -> str:
        """Nothing is held back."""
        return ""


def output_of(
    *words: str,
    stops: Sequence[str] = (),
    stop_words: Sequence[str] = (),
    include_stop: bool = False,
    min_tokens: int = 0,
    scope: StopScope | None = None,
) -> OutputText:
    """An output whose token i is word i."""
    return OutputText(
        Spelled(words),
        stops=stops,
        include_stop=include_stop,
        min_tokens=min_tokens,
        stop_tokens={i: word.encode() for i, word in enumerate(words) if word in stop_words},
        scope=scope,
    )


def whole(output: OutputText, words: Sequence[str]) -> tuple[str, str | int | None]:
    """The text of all words, and what it was cut at."""
    step = output.feed(0, list(range(len(words))))
    return step.text + output.finish().text, output.matched


def test_stop_across_tokens_ends_with_the_token_that_completes_it() -> None:
    output = output_of("Paris", ".", "\n", "\nUser", ": hi", stops=["\n\nUser:"])
    assert output.feed(0, [0, 1, 2]) == TextStep("Paris.", 3, None)
    assert output.feed(3, [3]) == TextStep("", 1, None)
    assert output.feed(4, [4, 0, 0]) == TextStep("", 1, "\n\nUser:")
    assert output.feed(7, [1]) == TextStep("", 0, "\n\nUser:")
    assert output.finish() == TextStep("", 0, "\n\nUser:")
    assert output.num_tokens == 5
    assert output.matched == "\n\nUser:"


def test_text_of_an_ending_token_is_left_out() -> None:
    output = output_of("yes", "<over>", stops=["never"])
    assert output.feed(0, [0, 1], last_is_stop_token=True) == TextStep("yes", 2, None)
    assert output.finish() == TextStep("", 0, None)
    assert output.num_tokens == 2


def test_text_of_an_ending_token_stays_where_the_stop_is_included() -> None:
    output = output_of("yes", "<over>", include_stop=True)
    assert output.feed(0, [0, 1], last_is_stop_token=True) == TextStep("yes<over>", 2, None)


def test_stop_string_before_an_ending_token_wins() -> None:
    output = output_of("yes STOP", "<over>", stops=["STOP"])
    assert output.feed(0, [0, 1], last_is_stop_token=True) == TextStep("yes ", 1, "STOP")


def test_tokens_that_are_known_are_passed_over() -> None:
    output = output_of("a", "b", "c", "d")
    assert output.feed(0, [0, 1]) == TextStep("ab", 2, None)
    assert output.feed(0, [0, 1]) == TextStep("", 0, None)
    assert output.feed(1, [1, 2, 3]) == TextStep("cd", 2, None)


def test_missing_token_is_a_bug() -> None:
    output = output_of("a", "b")
    with pytest.raises(AssertionError, match="token 0 is missing before 1"):
        output.feed(1, [1])


def test_resumed_output_cuts_a_stop_that_began_before() -> None:
    output = output_of("yes ST", "OP no", stops=["STOP"])
    output.feed(0, [0])  # earlier output: its text is dropped
    assert output.feed(1, [1]) == TextStep("", 1, "STOP")


ANALYSIS, FINAL = CHANNELS.begin, CHANNELS.next_message + CHANNELS.content
# Whether the prompt opened the reasoning, a stop, the text before the match, and the text after it; None: no match.
STOPPED: list[tuple[ReasoningFormat, bool, str, str, str | None]] = [
    (THINK, True, "STOP", "a STOP b</think>c ", " d"),
    (THINK, False, "STOP", "<think>a STOP</think>c ", ""),
    (THINK, False, "\n\n", " \n<think>a\n\nb</think>\n\nc", "d"),
    (THINK, False, "STOP", "a ", "<think>b"),
    (THINK, False, "\n\n", "", "a"),
    (THINK, True, "<th", "a</think>", " b"),
    (THINK, True, "</think>", "a</think>b", "c"),
    (THINK, True, "STOP", "aST</think>OP", ""),
    (THINK, False, "<thi", "", ""),
    (THINK, True, "STOP", "a STOP", None),
    (THINK, True, "STOP", "aSTOP</thi", None),
    (THINK, True, "\n", "a</think>\n", None),
    (CHANNELS, False, "STOP", f"{ANALYSIS}a STOP{CHANNELS.end}{FINAL}b", "c"),
    (CHANNELS, False, "STOP", f"{CHANNELS.preamble}ST{CHANNELS.end}{CHANNELS.next_message}{ANALYSIS}OP STOP", None),
    (CHANNELS, False, "STOP", f"{ANALYSIS}STOP{CHANNELS.end}{FINAL}ST{CHANNELS.end}{FINAL}OP", ""),
    (CHANNELS, False, "<|start|>", f"{ANALYSIS}a{CHANNELS.end}{FINAL}b", None),
]


@pytest.mark.parametrize(("reasoning", "in_reasoning", "stop", "before", "after"), STOPPED)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_stop_applies_to_the_answer_and_not_to_the_reasoning(
    reasoning: ReasoningFormat, in_reasoning: bool, stop: str, before: str, after: str | None, size: int
) -> None:
    text = before if after is None else before + stop + after
    words = [text[start : start + size] for start in range(0, len(text), size)]
    output = output_of(*words, stops=[stop], scope=StopScope(reasoning, in_reasoning=in_reasoning))
    assert whole(output, words) == (before, None if after is None else stop)


@pytest.mark.parametrize(
    ("words", "text", "matched"),
    [
        (["a", "END", "</think>", "b", "END", "c"], "a|END|</think>|b", 4),
        (["a", "</think>", "END"], "a|</think>", 2),
        (["a", "</think>", "\n", "b", "\n"], "a|</think>|\n|b", 4),
        (["a", "END"], "a|END", None),
        (["a", "</think>", "b", "ST", "END"], "a|</think>|b|ST", 4),
    ],
)
def test_stop_token_applies_to_the_answer_and_not_to_the_reasoning(
    words: list[str], text: str, matched: int | None
) -> None:
    for include in (False, True):
        scope = StopScope(THINK, in_reasoning=True)
        output = output_of(*words, stops=["STOP"], stop_words=["END", "\n"], include_stop=include, scope=scope)
        left = text.replace("|", "") + (words[matched] if include and matched is not None else "")
        assert whole(output, words) == (left, matched)
        assert output.num_tokens == (len(words) if matched is None else matched + 1)


def test_stop_token_that_is_found_here_needs_min_tokens_before_it() -> None:
    words = ["END", "a", "END", "b"]
    output = output_of(*words, stop_words=["END"], min_tokens=1, scope=StopScope(THINK, in_reasoning=False))
    assert whole(output, words) == ("ENDa", 2)
