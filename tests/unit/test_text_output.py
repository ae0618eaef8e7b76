"""The text of a choice: tokens in, cut text out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.text.output import OutputText, TextStep
from tests import text_models
from tests.text_models import text_model


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


def output_of(*words: str, stops: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0) -> OutputText:
    """An output whose token i is word i."""
    return OutputText(Spelled(words), stops=stops, include_stop=include_stop, min_tokens=min_tokens)


def test_stop_across_tokens_ends_with_the_token_that_completes_it() -> None:
    output = output_of("Paris", ".", "\n", "\nUser", ": hi", stops=["\n\nUser:"])
    assert output.feed(0, [0, 1, 2]) == TextStep("Paris.", 3, None)
    assert output.feed(3, [3]) == TextStep("", 1, None)
    assert output.feed(4, [4, 0, 0]) == TextStep("", 1, "\n\nUser:")
    assert output.feed(7, [1]) == TextStep("", 0, "\n\nUser:")
    assert output.finish() == TextStep("", 0, "\n\nUser:")
    assert output.num_tokens == 5
    assert output.matched == "\n\nUser:"


def test_included_stop_ends_the_text_with_itself() -> None:
    output = output_of("one", " ST", "OP two", stops=["STOP"], include_stop=True)
    assert output.feed(0, [0, 1, 2]) == TextStep("one STOP", 3, "STOP")


def test_held_text_comes_at_the_end() -> None:
    output = output_of("one", " ST", stops=["STOP"])
    assert output.feed(0, [0, 1]) == TextStep("one ", 2, None)
    assert output.finish() == TextStep("ST", 0, None)


def test_stop_before_min_tokens_is_not_honoured() -> None:
    output = output_of("a STOP", " b STOP", " c STOP", stops=["STOP"], min_tokens=2)
    assert output.feed(0, [0, 1, 2]) == TextStep("a STOP b STOP c ", 3, "STOP")


def test_stop_that_the_token_behind_min_tokens_completes_is_honoured() -> None:
    output = output_of("a ST", "OP b", stops=["STOP"], min_tokens=1)
    assert output.feed(0, [0, 1]) == TextStep("a ", 2, "STOP")


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


def test_incomplete_character_is_searched_for_stops_at_the_end() -> None:
    model = text_model(text_models.smollm2)
    output = OutputText(model.detokenizer(), stops=["\ufffd"])
    ids = model.encode("so 🦙")[:-1]
    assert output.feed(0, ids) == TextStep("so ", len(ids), None)
    assert output.finish() == TextStep("", 0, "\ufffd")


def test_resumed_output_cuts_a_stop_that_began_before() -> None:
    output = output_of("yes ST", "OP no", stops=["STOP"])
    output.feed(0, [0])  # earlier output: its text is dropped
    assert output.feed(1, [1]) == TextStep("", 1, "STOP")
