"""The fewest tokens that a text can have: never more than it has, and enough to tell what cannot fit a context."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from inflight.router.text.tokenizer import TextModel
from tests.support.text.text_models import byte_level, gemma_like, llama_like, metaspace, smollm2, text_model, wordpiece

BOUNDED = [smollm2, byte_level, llama_like, gemma_like]
WORDS = ["hello", " world", "日本", "\n\n", " " * 70, "0123", "<end>", "<|im_end|>", "é", "="]
TEXTS = st.one_of(
    st.text(max_size=200),
    st.lists(
        st.sampled_from(["hello", " world", "日本", "\n\n", " " * 70, "0123", "<end>", "<|im_end|>", "é", "="])
    ).map("".join),
    st.text(st.sampled_from(" \t\n=-aé\u0301<|>1"), max_size=300),
)


@pytest.mark.parametrize("build", [*BOUNDED, metaspace, wordpiece])
@given(text=TEXTS)
@example("")
def test_no_text_has_fewer_tokens_than_the_bound(build: Callable[[], PreTrainedTokenizerBase], text: str) -> None:
    model = text_model(build)
    assert model.least_tokens(text) <= len(model.encode(text, add_special_tokens=False))


def test_digits_count_one_token_each_of_smollm2() -> None:
    assert text_model(smollm2).least_tokens("0123456789" * 10_000) >= 99_999


@pytest.mark.parametrize("build", BOUNDED)
def test_long_text_is_known_to_be_long(build: Callable[[], PreTrainedTokenizerBase]) -> None:
    assert text_model(build).least_tokens("hello, world 1 " * 10_000) > 2_000


@pytest.mark.parametrize("build", [metaspace, wordpiece])
def test_tokenizer_that_may_leave_text_out_has_no_bound(build: Callable[[], PreTrainedTokenizerBase]) -> None:
    assert text_model(build).least_tokens("hello" * 10_000) == 0


def byte_bpe(normalizer: normalizers.Normalizer | None = None, *added: AddedToken) -> TextModel:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    return TextModel(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_form_of_unicode_leaves_ascii_alone_and_nothing_else() -> None:
    model = byte_bpe(normalizers.NFC())
    assert model.least_tokens("ab" * 50) == 99
    assert model.least_tokens("e\u0301" * 50) == 0
    assert len(model.encode("e\u0301" * 50)) < 150


def test_normalizer_that_is_not_known_leaves_no_bound() -> None:
    assert byte_bpe(normalizers.Strip()).least_tokens("ab" * 50) == 0


def test_spaces_that_an_added_token_takes_with_it_do_not_count() -> None:
    model = byte_bpe(None, AddedToken("<x>", lstrip=True, special=False))
    assert len(model.encode(" " * 100 + "<x>")) == 1
    assert model.least_tokens(" " * 100 + "<x>") <= 1
