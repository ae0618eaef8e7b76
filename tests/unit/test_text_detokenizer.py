"""The text that a detokenizer holds back, and the text that it does not."""

from __future__ import annotations

import pytest

from inflight.router.text.detokenizer import MAX_WINDOW_TOKENS, WindowDetokenizer
from tests.support.text import text_models
from tests.support.text.text_models import BYTE_FALLBACK_OFFSET, text_model


def byte_tokens(text: bytes) -> list[int]:
    """Ids of the byte tokens in a vocabulary with byte fallback."""
    return [BYTE_FALLBACK_OFFSET + byte for byte in text]


def test_character_split_over_tokens_comes_with_its_last_token() -> None:
    model = text_model(text_models.smollm2)
    ids = model.encode("🦙")
    assert len(ids) > 1
    detokenizer = model.detokenizer()
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🦙"]


def test_replacement_character_that_was_produced_passes_at_once() -> None:
    model = text_model(text_models.smollm2)
    ids = model.encode("\ufffd" * 20)
    detokenizer = model.detokenizer()
    # Each is produced as three bytes: with the last of them it is there.
    parts = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(parts) == "\ufffd" * 20
    assert parts[-1] != ""
    assert detokenizer.flush() == ""


def test_id_without_a_token_has_no_text() -> None:
    model = text_model(text_models.smollm2)
    (hi,) = model.encode("hi")
    assert model.detokenizer().push([hi, 10**9, hi]) == "hihi"


def text_of_bytes(ids: list[int]) -> str:
    """A tokenizer of which nothing is known but `decode`, with one byte per token."""
    return bytes(ids).decode(errors="replace")


def test_byte_token_of_a_line_break_comes_at_once() -> None:
    model = text_model(text_models.llama_like)
    detokenizer = model.detokenizer()
    assert detokenizer.push(byte_tokens(b"\n")) == "\n"


def test_character_of_byte_tokens_comes_with_its_last_byte() -> None:
    model = text_model(text_models.llama_like)
    detokenizer = model.detokenizer()
    assert [detokenizer.push([token_id]) for token_id in byte_tokens("é中".encode())] == ["", "é", "", "", "中"]


@pytest.mark.parametrize("build", [text_models.metaspace, text_models.wordpiece])
def test_window_never_grows_with_the_output(build: object) -> None:
    assert callable(build)
    tokenizer = build()
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    replacement = tokenizer.convert_tokens_to_ids("\ufffd")
    detokenizer = WindowDetokenizer(decode, frozenset())
    num_tokens = 1000
    text = "".join(detokenizer.push([replacement]) for _ in range(num_tokens))
    assert text.count("\ufffd") >= num_tokens - 3, "a produced U+FFFD must not stall the stream"
    assert max(sizes) <= MAX_WINDOW_TOKENS
    assert len(sizes) <= 6 * num_tokens
    assert (text + detokenizer.flush()).count("\ufffd") == num_tokens


def test_window_gives_a_character_time_to_complete() -> None:
    detokenizer = WindowDetokenizer(text_of_bytes, frozenset())
    text = [detokenizer.push([byte]) for byte in "a🦙é".encode()]
    assert text == ["a", "", "", "", "🦙", "", "é"]
    assert detokenizer.flush() == ""


def test_window_is_cut_between_characters_of_a_long_byte_run() -> None:
    # This decoder replaces a whole run of bytes where the window begins inside a character.
    tokenizer = text_models.llama_like()
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    detokenizer = WindowDetokenizer(decode, frozenset())
    parts = [detokenizer.push([token_id]) for token_id in byte_tokens(("中" * 60).encode())]
    assert parts == ["", "", "中"] * 60
    assert max(sizes) < MAX_WINDOW_TOKENS
