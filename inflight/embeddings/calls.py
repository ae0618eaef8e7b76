"""Embeddings and scores, as frozen values, and their request messages. Shared by both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from inflight.requests import PRIORITIES, Priority
from inflight.v1 import inference_pb2

Input = str | Sequence[int]


class EmbedOptions(TypedDict, total=False):
    """Keywords of `embed` and `score`; see the fields of the same meaning in `EmbedRequest` of `inference.proto`."""

    model: str
    tenant: str
    priority: Priority
    cache_salt: str
    cache_bypass: bool


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of an input. `cached_tokens` of its `prompt_tokens` came from the prefix cache."""

    values: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Score:
    """How relevant a document is, from 0 to 1. `cached_tokens` of the `prompt_tokens` came from the prefix cache."""

    value: float
    prompt_tokens: int
    cached_tokens: int


def embed_request(
    inputs: Input | Sequence[Input], dimensions: int | None, options: Mapping[str, Any]
) -> inference_pb2.EmbedRequest:
    """Returns the request for the embeddings of texts or of lists of token ids. Raises `ValueError`."""
    request = _request(options)
    is_one = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], int))
    for one in [inputs] if is_one else inputs:
        made = request.inputs.add()
        try:
            if isinstance(one, str):
                made.text = one
            else:
                made.token_ids.SetInParent()
                made.token_ids.ids.extend(one)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ValueError(f"inputs: {one!r:.80} is not allowed: {error}") from None
    if dimensions is not None:
        if not 1 <= dimensions < 2**32:
            raise ValueError(f"dimensions: {dimensions} is not allowed; must be at least 1")
        request.dimensions = dimensions
    return request


def score_request(
    query: str, documents: Sequence[str], instruction: str | None, options: Mapping[str, Any]
) -> inference_pb2.EmbedRequest:
    """Returns the request for the scores of documents."""
    request = _request(options)
    for document in (documents,) if isinstance(documents, str) else documents:
        request.inputs.add().pair.MergeFrom(
            inference_pb2.TextPair(query=query, document=document, instruction=instruction or "")
        )
    return request


def _request(options: Mapping[str, Any]) -> inference_pb2.EmbedRequest:
    given = {name: value for name, value in options.items() if value is not None}
    request = inference_pb2.EmbedRequest(model=given.pop("model", ""), tenant=given.pop("tenant", ""))
    priority = given.pop("priority", None)
    if priority is not None:
        if priority not in PRIORITIES:
            raise ValueError(f"priority: {priority!r} is not one of {', '.join(PRIORITIES)}")
        request.priority = PRIORITIES[priority]
    request.cache.salt = given.pop("cache_salt", "")
    request.cache.bypass = given.pop("cache_bypass", False)
    if given:
        raise TypeError(f"unknown keyword {next(iter(given))!r}")
    return request


def decode_embeddings(response: inference_pb2.EmbedResponse) -> tuple[Embedding, ...]:
    return tuple(Embedding(tuple(one.values), one.prompt_tokens, one.cached_tokens) for one in response.results)


def decode_scores(response: inference_pb2.EmbedResponse) -> tuple[Score, ...]:
    return tuple(Score(one.values[0], one.prompt_tokens, one.cached_tokens) for one in response.results)
