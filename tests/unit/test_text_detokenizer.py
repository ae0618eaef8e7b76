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


def test_incomplete_character_is_replaced_at_the_end() -> None:
    model = text_model(text_models.smollm2)
    ids = model.encode("hi 🦙")[:-1]
    detokenizer = model.detokenizer()
    text = detokenizer.push(ids)
    assert text == "hi "
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    model = text_model(text_models.smollm2)
    ids = model.encode("<|im_start|>user\nhi<|im_end|>")
    assert model.detokenizer().push(ids) == "user\nhi"
    assert model.detokenizer(skip_special_tokens=False).push(ids) == "<|im_start|>user\nhi<|im_end|>"
    assert model.decode(ids) == "user\nhi"
    assert model.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"


def test_added_token_that_is_not_special_stands_for_its_characters() -> None:
    model = text_model(text_models.byte_level)
    ids = model.encode("a 日本 <tool call> é")
    assert model.vocabulary_size - 1 in ids
    assert model.detokenizer().push(ids) == "a 日本 <tool call> é"


def test_special_token_inside_a_character_does_not_break_it() -> None:
    model = text_model(text_models.llama_like)
    first, *rest = byte_tokens("中".encode())
    assert model.detokenizer().push([first, 2, *rest]) == "中"


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


def test_complete_characters_of_a_broken_byte_run_stay() -> None:
    model = text_model(text_models.llama_like)
    detokenizer = model.detokenizer()
    assert detokenizer.push(byte_tokens("é".encode() + b"\xff" + b"ok" + b"\xe4\xb8")) == "é\ufffdok"
    assert detokenizer.flush() == "\ufffd\ufffd"


def test_only_the_first_space_of_the_text_is_stripped() -> None:
    tokenizer = text_models.llama_like()
    model = text_model(text_models.llama_like)
    space_hello = tokenizer.get_vocab()["▁hello"]
    detokenizer = model.detokenizer()
    assert [detokenizer.push([token_id]) for token_id in (1, space_hello, space_hello)] == ["", "hello", " hello"]


def test_leading_space_stays_where_the_tokenizer_keeps_it() -> None:
    tokenizer = text_models.gemma_like()
    space_hello = tokenizer.get_vocab()["▁hello"]
    assert text_model(text_models.gemma_like).detokenizer().push([space_hello]) == " hello"


def test_output_continues_behind_earlier_output() -> None:
    tokenizer = text_models.llama_like()
    model = text_model(text_models.llama_like)
    space_hello = tokenizer.get_vocab()["▁hello"]
    prior, following = [space_hello, *byte_tokens("é".encode()[:1])], [*byte_tokens("é".encode()[1:]), space_hello]
    detokenizer = model.detokenizer()
    assert detokenizer.push(prior) == "hello"
    assert detokenizer.push(following) == "é hello"


def test_spaces_before_punctuation_are_not_cleaned_up() -> None:
    model = text_model(text_models.wordpiece)
    ids = model.encode("hello , don't .")
    assert model.detokenizer().push(ids) == model.decode(ids)
    assert " ," in model.decode(ids)


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


def test_window_does_not_mistake_an_incomplete_character_behind_replacement_characters() -> None:
    detokenizer = WindowDetokenizer(text_of_bytes, frozenset())
    text = "\ufffd\ufffd🦙 and \ufffd\ufffd\ufffd\ufffdé"
    assert "".join(detokenizer.push([byte]) for byte in text.encode()) + detokenizer.flush() == text


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
