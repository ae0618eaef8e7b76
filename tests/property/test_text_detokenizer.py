"""Streamed text is the text, whatever the tokens and however they are divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from inflight.router.text.detokenizer import WindowDetokenizer
from inflight.router.text.tokenizer import TextModel
from tests.support.examples import examples
from tests.support.text import text_models
from tests.support.text.text_models import BYTE_FALLBACK_OFFSET

SCRIPTS = st.sampled_from(
    [
        'The quick brown fox — “don\'t” … costs 5 €.\r\n\tfn main() { println!("{}", x); }',
        "Съешь же ещё этих мягких французских булок",
        "我能吞下玻璃而不伤身体。私はガラスを食べられます。나는 유리를 먹을 수 있어요",
        "أنا قادر على أكل الزجاج و هذا لا يؤلمني. אני יכול לאכול זכוכית",
        "मैं काँच खा सकता हूँ। ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ",
        "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 e\u0301 \u200b\ufeff\ufffd\ufffd a\ufffdb 𝔘𝔫𝔦 𓀀",
        "   leading and    inner spaces  \n\n\n",
        "\x00\x01\x7f\x80\xff",
    ]
)
TEXTS = st.one_of(SCRIPTS, st.text(max_size=60), st.lists(SCRIPTS, max_size=3).map(" ".join))
EXAMPLES = settings(max_examples=examples(200), deadline=None)


def streamed(model: TextModel, ids: Sequence[int], cuts: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of ids pushed in pieces that end at `cuts`."""
    detokenizer = model.detokenizer(skip_special_tokens=skip_special_tokens)
    ends = sorted(cut % (len(ids) + 1) for cut in cuts)
    parts = [detokenizer.push(ids[a:b]) for a, b in zip([0, *ends], [*ends, len(ids)], strict=True)]
    return "".join(parts) + detokenizer.flush()


def whole(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """What `transformers` makes of all ids at once."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def random_ids(num_ids: int) -> st.SearchStrategy[list[int]]:
    """Ids, among them many low ones, where special tokens and single bytes are."""
    return st.lists(st.one_of(st.integers(0, num_ids - 1), st.integers(0, min(300, num_ids - 1))), max_size=40)


CUTS = st.lists(st.integers(0, 1000), max_size=12)


@EXAMPLES
@given(ids=random_ids(49152), cuts=CUTS, skip=st.booleans())
def test_byte_level_stream_of_any_ids_is_their_text(ids: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = text_models.smollm2()
    expected = whole(tokenizer, ids, skip_special_tokens=skip)
    model = text_models.text_model(text_models.smollm2)
    assert streamed(model, ids, cuts, skip_special_tokens=skip) == expected
    assert streamed(model, ids, range(len(ids)), skip_special_tokens=skip) == expected
    assert model.decode(ids, skip_special_tokens=skip) == expected


@EXAMPLES
@given(ids=random_ids(259), cuts=CUTS)
def test_byte_level_stream_of_any_bytes_is_their_text(ids: list[int], cuts: list[int]) -> None:
    model = text_models.text_model(text_models.byte_level)
    assert streamed(model, ids, cuts) == whole(text_models.byte_level(), ids)


@EXAMPLES
@given(text=TEXTS, cuts=CUTS)
def test_byte_level_stream_of_a_text_is_that_text(text: str, cuts: list[int]) -> None:
    tokenizer = text_models.smollm2()
    model = text_models.text_model(text_models.smollm2)
    ids = model.encode(text)
    assert streamed(model, ids, cuts) == whole(tokenizer, ids)


@EXAMPLES
@given(text=TEXTS, cuts=CUTS, build=st.sampled_from([text_models.llama_like, text_models.gemma_like]))
def test_byte_fallback_stream_of_a_text_is_that_text(
    text: str, cuts: list[int], build: Callable[[], PreTrainedTokenizerBase]
) -> None:
    model = text_models.text_model(build)
    ids = model.encode(text)
    assert streamed(model, ids, cuts) == whole(build(), ids)
    assert streamed(model, ids, range(len(ids))) == whole(build(), ids)


@EXAMPLES
@given(
    runs=st.lists(st.tuples(st.text(max_size=3), random_ids(3 + 256 + 30)), max_size=6),
    cuts=CUTS,
    build=st.sampled_from([text_models.llama_like, text_models.gemma_like]),
)
def test_byte_fallback_stream_of_any_ids_is_their_text(
    runs: list[tuple[str, list[int]]], cuts: list[int], build: Callable[[], PreTrainedTokenizerBase]
) -> None:
    ids = [i for text, extra in runs for i in (*(BYTE_FALLBACK_OFFSET + b for b in text.encode()), *extra)]
    tokenizer = build()
    expected = sentencepiece_text(tokenizer, ids)
    if not has_partly_valid_run(ids):
        assert expected == whole(tokenizer, ids)
    model = text_models.text_model(build)
    assert streamed(model, ids, cuts) == expected
    assert streamed(model, ids, range(len(ids))) == expected
    assert model.decode(ids) == expected


@EXAMPLES
@given(
    text=TEXTS, extra=random_ids(36), cuts=CUTS, build=st.sampled_from([text_models.metaspace, text_models.wordpiece])
)
def test_window_stream_of_any_ids_is_their_text(
    text: str, extra: list[int], cuts: list[int], build: Callable[[], PreTrainedTokenizerBase]
) -> None:
    model = text_models.text_model(build)
    ids = [*model.encode(text), *extra]
    assert streamed(model, ids, cuts) == whole(build(), ids)


@EXAMPLES
@given(text=st.one_of(TEXTS, st.text(alphabet="\ufffd🦙é a", max_size=40)))
def test_window_stream_over_single_bytes_is_the_text(text: str) -> None:
    detokenizer = WindowDetokenizer(lambda ids: bytes(ids).decode(errors="replace"), frozenset())
    assert "".join(detokenizer.push([byte]) for byte in text.encode()) + detokenizer.flush() == text


@EXAMPLES
@given(text=st.text(alphabet="中文é🦙 hello.", max_size=60))
def test_window_stream_over_byte_runs_is_the_text(text: str) -> None:
    # This decoder replaces a whole run of bytes where the window begins inside a character.
    tokenizer = text_models.llama_like()
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = WindowDetokenizer(lambda window: whole(tokenizer, window), frozenset())
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == whole(tokenizer, ids)


def byte_runs(ids: Sequence[int]) -> list[bytes | int]:
    """Ids without special ones, byte tokens in a row joined."""
    runs: list[bytes | int] = []
    for token_id in ids:
        if token_id < BYTE_FALLBACK_OFFSET:
            continue
        byte = token_id - BYTE_FALLBACK_OFFSET
        if byte > 255:
            runs.append(token_id)
        elif runs and isinstance(runs[-1], bytes):
            runs[-1] += bytes([byte])
        else:
            runs.append(bytes([byte]))
    return runs


def characters_of(run: bytes) -> list[str | None]:
    """The characters of a run and None for each byte that belongs to none, found by trying every length."""
    found: list[str | None] = []
    while run:
        for length in range(1, 5):
            try:
                character = run[:length].decode()
            except UnicodeDecodeError:
                continue
            found.append(character)
            run = run[length:]
            break
        else:
            found.append(None)
            run = run[1:]
    return found


def sentencepiece_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text by sentencepiece's rule: every byte that belongs to no character is one U+FFFD."""
    strips = tokenizer is text_models.llama_like()
    parts = [
        "".join(c if c is not None else "\ufffd" for c in characters_of(run))
        if isinstance(run, bytes)
        else str(tokenizer.convert_ids_to_tokens(run)).replace("▁", " ")
        for run in byte_runs(ids)
    ]
    text = "".join(parts)
    return text.removeprefix(" ") if strips else text


def has_partly_valid_run(ids: Sequence[int]) -> bool:
    """Whether some run mixes characters with stray bytes: there `tokenizers` drops the characters too."""
    runs = [characters_of(run) for run in byte_runs(ids) if isinstance(run, bytes)]
    return any(None in run and set(run) != {None} for run in runs)


@pytest.mark.parametrize("ids", [[3 + 0xC3, 3 + 0xA9, 3 + 0xFF]])
def test_oracle_knows_where_tokenizers_differs(ids: list[int]) -> None:
    assert has_partly_valid_run(ids)
    assert whole(text_models.llama_like(), ids) == "\ufffd\ufffd\ufffd"
    assert sentencepiece_text(text_models.llama_like(), ids) == "é\ufffd"
