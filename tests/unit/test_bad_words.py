"""Token sequences of bad words: every form in which a tokenizer family writes a word within a text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from inflight.common.errors import RequestError
from inflight.router.api.tokenizing import Tokenizing, add_bad_word_ids, bad_word_sequences
from inflight.router.text.tokenizer import TextModel
from inflight.v1 import types_pb2
from tests.support.examples import examples
from tests.support.text import text_models

NO_BOUND = 2**31
WITH_BYTES = (text_models.smollm2, text_models.byte_level, text_models.llama_like, text_models.gemma_like)


def sampling_of(*words: str, ids: tuple[tuple[int, ...], ...] = ()) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(bad_words=words, bad_word_ids=[types_pb2.TokenSequence(ids=one) for one in ids])


def bytes_of(text: TextModel, ids: tuple[int, ...]) -> bytes:
    return b"".join(map(text.token_bytes, ids))


@pytest.mark.parametrize("build", WITH_BYTES, ids=lambda build: str(build.__name__))
@settings(max_examples=examples(60), deadline=None)
@given(word=st.text("abehlo ,.日本語é\n\t", min_size=1, max_size=6))
def test_sequences_are_the_word_with_and_without_a_space(
    build: Callable[[], PreTrainedTokenizerBase], word: str
) -> None:
    text = text_models.text_model(build)
    bare = (word.lstrip(" ") or word).encode()
    sequences = bad_word_sequences(text, [word], NO_BOUND)
    # A word that begins with a line end may be one token with the line end before it; it then stands alone.
    assert {bytes_of(text, ids).lstrip(b" ") for ids in sequences} == {bare.lstrip(b" ")}
    if not word.startswith(("\n", "\t")):
        assert [bytes_of(text, ids) for ids in sequences] == [bare, b" " + bare]


def test_words_are_those_of_the_text_that_the_model_writes() -> None:
    text = text_models.text_model(text_models.smollm2)
    sequences = bad_word_sequences(text, ["hello"], NO_BOUND)
    assert sequences == [(28120,), (33662,)]
    whole = text.encode("Oh hello, (hello)")
    assert {28120, 33662} < set(whole)


@pytest.mark.parametrize("build", [text_models.metaspace, text_models.wordpiece], ids=lambda build: str(build.__name__))
def test_tokenizers_without_bytes_find_known_words(build: Callable[[], PreTrainedTokenizerBase]) -> None:
    text = text_models.text_model(build)
    for ids in bad_word_sequences(text, ["hello"], NO_BOUND):
        assert text.decode(ids).strip() == "hello"


def test_control_token_can_be_excluded_by_its_name() -> None:
    text = text_models.text_model(text_models.smollm2)
    assert (2,) in bad_word_sequences(text, ["<|im_end|>"], NO_BOUND)


def test_sequence_that_the_model_cannot_produce_is_left_out() -> None:
    text = text_models.text_model(text_models.smollm2)
    assert bad_word_sequences(text, ["hello"], 30_000) == [(28120,)]
    assert bad_word_sequences(text, ["hello"], 1000) == []


def test_word_without_tokens_is_refused() -> None:
    text = text_models.text_model(text_models.wordpiece)
    with pytest.raises(RequestError, match=r"sampling.bad_words\[1\]: has no tokens"):
        bad_word_sequences(text, ["hello", " "], NO_BOUND)


def test_sequences_of_words_are_added_to_those_of_the_request_once() -> None:
    sampling = sampling_of("x", ids=((1,), (2, 3)))
    add_bad_word_ids(sampling, [(2, 3), (4,)])
    assert sampling == sampling_of("x", ids=((1,), (2, 3), (4,)))


@pytest.mark.parametrize(
    ("given_ids", "of_words", "what"),
    [
        (((1,),), [(i,) for i in range(2, 258)], "has 257 token sequences together"),
        (((1,) * 1000,), [(2,) * 25], "has 1025 token ids together"),
    ],
)
def test_more_sequences_than_a_submit_may_hold_are_refused(
    given_ids: tuple[tuple[int, ...], ...], of_words: list[tuple[int, ...]], what: str
) -> None:
    with pytest.raises(RequestError, match=rf"sampling.bad_words: {what} with bad_word_ids; at most"):
        add_bad_word_ids(sampling_of("x", ids=given_ids), of_words)


@pytest.mark.parametrize(("num_words", "is_on_thread"), [(1, False), (128, True)])
async def test_many_words_are_tokenized_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, num_words: int, is_on_thread: bool
) -> None:
    text = text_models.text_model(text_models.byte_level)
    threads: set[int] = set()
    encode = TextModel.encode_inside

    def record(self: TextModel, word: str) -> list[int]:
        threads.add(threading.get_ident())
        return encode(self, word)

    monkeypatch.setattr(TextModel, "encode_inside", record)
    words = [chr(ord("A") + i % 26) + "a" * (i // 26) for i in range(num_words)]
    sampling = sampling_of(*words)
    await asyncio.create_task(Tokenizing().encode_bad_words(text, sampling, text.vocabulary_size, "default"))
    assert len(sampling.bad_word_ids) == 2 * num_words
    assert (threads != {threading.get_ident()}) is is_on_thread


async def test_request_without_bad_words_is_not_touched() -> None:
    text = text_models.text_model(text_models.byte_level)
    sampling = sampling_of(ids=((1,), (1,)))
    await Tokenizing().encode_bad_words(text, sampling, NO_BOUND, "default")
    assert sampling == sampling_of(ids=((1,), (1,)))
