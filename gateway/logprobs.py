"""Log probabilities in OpenAI's two forms: a list of tokens for chats, parallel lists for completions. Pure.

There is one entry per token, even if its text is not part of the answer, as for the token that ended it. JSON has no
infinity, so an impossible token has OpenAI's value for "very unlikely". The first token of a prompt has no value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from inflight.events import Logprob, PositionLogprobs, Prompt

VERY_UNLIKELY = -9999.0


def of_chat(positions: Iterable[PositionLogprobs | None]) -> dict[str, Any]:
    """Returns the form for a chat."""
    return {"content": [_chat_position(one) for one in positions], "refusal": None}


def of_completion(positions: Sequence[PositionLogprobs | None], text_offset: int) -> dict[str, Any]:
    """Returns the form for a completion. The first token begins at `text_offset`, in characters. A prompt's first token
    has the value null, as a position whose values are lost."""
    return {
        "tokens": ["" if one is None else _completion_token(one.chosen) for one in positions],
        "token_logprobs": [None if one is None or _is_first(one) else _value(one.chosen) for one in positions],
        "top_logprobs": [None if one is None or _is_first(one) else _likeliest(one) for one in positions],
        "text_offset": list(_offsets(positions, text_offset)),
    }


def of_prompt(positions: Iterable[PositionLogprobs | None], num_top: int) -> list[dict[str, Any] | None]:
    """Returns vLLM's form for the tokens of a prompt: values by token id, of the prompt's token and the likeliest."""
    return [None if one is None or _is_first(one) else _by_id((one.chosen, *one.top[:num_top])) for one in positions]


def _by_id(tokens: Iterable[Logprob]) -> dict[str, Any]:
    return {
        str(one.token_id): {"logprob": _value(one), "rank": one.rank, "decoded_token": _escaped(one.text_bytes)}
        for one in tokens
    }


def prompt_positions(event: Prompt) -> list[PositionLogprobs | None]:
    """Returns the positions of a part of a prompt. That of the prompt's first token has no number as its value."""
    positions = list(event.logprobs)
    if event.offset == 0:
        first = Logprob(event.token_ids[0], math.nan, event.first_text_bytes, event.first_is_special)
        positions[0] = PositionLogprobs(first, ())
    return positions


def _is_first(position: PositionLogprobs) -> bool:
    return math.isnan(position.chosen.logprob)


def num_characters(positions: Iterable[PositionLogprobs | None]) -> int:
    """Returns the number of characters of text that begin in these tokens."""
    return sum(_num_begun(one) for one in positions)


def _chat_position(position: PositionLogprobs | None) -> dict[str, Any]:
    if position is None:
        # No longer known; OpenAI's form has no null here.
        return {"token": "", "logprob": VERY_UNLIKELY, "bytes": None, "top_logprobs": []}
    return {**_chat_token(position.chosen), "top_logprobs": [_chat_token(one) for one in position.top]}


def _chat_token(one: Logprob) -> dict[str, Any]:
    return {"token": _escaped(one.text_bytes), "logprob": _value(one), "bytes": list(one.text_bytes)}


def _completion_token(one: Logprob) -> str:
    """Returns the text of a token. It is also a key, so parts of characters must not all be the same U+FFFD."""
    text = _escaped(one.text_bytes)
    return text if text.encode() == one.text_bytes else f"bytes:{text}"


def _likeliest(position: PositionLogprobs) -> dict[str, float]:
    """Returns values by token, likeliest first. The position's own token is always included."""
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
    """Returns whether the byte continues a UTF-8 character."""
    return b"\x80" <= byte < b"\xc0"


def _escaped(text_bytes: bytes) -> str:
    """Decodes text; bytes of incomplete characters become `\\xf0`."""
    return text_bytes.decode(errors="backslashreplace")


def _value(one: Logprob) -> float:
    return max(VERY_UNLIKELY, one.logprob)
