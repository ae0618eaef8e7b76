"""Log probabilities as the tensors of TensorRT-LLM's and vLLM's backends have them. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from inflight.v1 import types_pb2

# JSON has no infinity; this is OpenAI's and vLLM's word for it.
VERY_UNLIKELY = -9999.0


def logprob_of(position: types_pb2.PositionLogprobs) -> float:
    """That of the token produced; not a number where it is not known any more."""
    return position.chosen.logprob if position.HasField("chosen") else math.nan


def logprobs_json(positions: Iterable[types_pb2.PositionLogprobs]) -> bytes:
    """vLLM's text: an object for each position, its keys token ids; null where nothing is known any more."""
    return json.dumps([_by_token_id(position) for position in positions]).encode()


def _by_token_id(position: types_pb2.PositionLogprobs) -> dict[str, dict[str, Any]] | None:
    if not position.HasField("chosen"):
        return None
    told = {str(token.token_id): _told(token, rank) for rank, token in enumerate(position.top, start=1)}
    # An executor of an earlier version does not report the rank of a token that is not among these.
    told.setdefault(str(position.chosen.token_id), _told(position.chosen, position.chosen.rank or None))
    return told


def _told(token: types_pb2.TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {
        "logprob": max(VERY_UNLIKELY, token.logprob),
        "rank": rank,
        "decoded_token": token.text_bytes.decode(errors="replace"),
    }
