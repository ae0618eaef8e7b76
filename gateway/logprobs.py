"""Log probabilities in OpenAI's two forms: a list of tokens for chats, lists side by side for completions. Pure.

There is one entry for each token that was produced, also where its text is no part of the answer, as that of the token
which ended it. JSON has no infinity: what cannot come has OpenAI's word for "very unlikely".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from inflight.events import Logprob, PositionLogprobs

VERY_UNLIKELY = -9999.0


def of_chat(positions: Iterable[PositionLogprobs | None]) -> dict[str, Any]:
    """Of a chat's tokens."""
    return {"content": [_chat_position(one) for one in positions], "refusal": None}


def of_completion(positions: Sequence[PositionLogprobs | None], text_offset: int) -> dict[str, Any]:
    """Of a completion's tokens, the first of which begins at `text_offset`, in characters."""
    return {
        "tokens": ["" if one is None else _completion_token(one.chosen) for one in positions],
        "token_logprobs": [None if one is None else _value(one.chosen) for one in positions],
        "top_logprobs": [None if one is None else _likeliest(one) for one in positions],
        "text_offset": list(_offsets(positions, text_offset)),
    }


def num_characters(positions: Iterable[PositionLogprobs | None]) -> int:
    """Characters of text that begin in these tokens."""
    return sum(_num_begun(one) for one in positions)


def _chat_position(position: PositionLogprobs | None) -> dict[str, Any]:
    if position is None:
        # Not known any more; OpenAI's form has no null here.
        return {"token": "", "logprob": VERY_UNLIKELY, "bytes": None, "top_logprobs": []}
    return {**_chat_token(position.chosen), "top_logprobs": [_chat_token(one) for one in position.top]}


def _chat_token(one: Logprob) -> dict[str, Any]:
    return {"token": _escaped(one.text_bytes), "logprob": _value(one), "bytes": list(one.text_bytes)}


def _completion_token(one: Logprob) -> str:
    """A key, too: parts of characters must not all be the same U+FFFD."""
    text = _escaped(one.text_bytes)
    return text if text.encode() == one.text_bytes else f"bytes:{text}"


def _likeliest(position: PositionLogprobs) -> dict[str, float]:
    """By token, likeliest first; the one produced is always among them."""
    told: dict[str, float] = {}
    for one in (*position.top, position.chosen):
        told.setdefault(_completion_token(one), _value(one))
    return told


def _offsets(positions: Iterable[PositionLogprobs | None], text_offset: int) -> Iterable[int]:
    for one in positions:
        is_inside = one is not None and not one.chosen.is_special and _is_continuation(one.chosen.text_bytes[:1])
        yield max(0, text_offset - is_inside)
        text_offset += _num_begun(one)


def _num_begun(position: PositionLogprobs | None) -> int:
    if position is None or position.chosen.is_special:
        return 0
    text_bytes = position.chosen.text_bytes
    return sum(not _is_continuation(text_bytes[i : i + 1]) for i in range(len(text_bytes)))


def _is_continuation(byte: bytes) -> bool:
    """Whether it goes on with a character of UTF-8 that began before it."""
    return b"\x80" <= byte < b"\xc0"


def _escaped(text_bytes: bytes) -> str:
    """As text; bytes of incomplete characters as `\\xf0`."""
    return text_bytes.decode(errors="backslashreplace")


def _value(one: Logprob) -> float:
    return max(VERY_UNLIKELY, one.logprob)
