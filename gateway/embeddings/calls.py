"""Calls for embeddings and scores: the request to the router, and the answer. Pure."""

from __future__ import annotations

import base64
import re
import secrets
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inflight.errors import FieldError, InflightError
from inflight.gateway.bodies import read_fields, validated
from inflight.gateway.conversion import Defaults, priority_class
from inflight.gateway.embeddings.bodies import (
    ID_LISTS,
    UNSUPPORTED,
    CommonBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
)
from inflight.gateway.errors import ApiError, from_router, refused
from inflight.requests import PRIORITIES
from inflight.v1 import inference_pb2, types_pb2

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
# An input of the router's request, and a token in it.
_INPUT = re.compile(r"inputs\[(\d+)\](?:\.token_ids\.ids(\[\d+\])|\.\S*)?$")


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """A call. `param` names the parameter of the inputs, and `is_list` says whether it is a list. `answer` makes the
    body of the answer, which may take a while. `unused` are parameters without effect."""

    request: inference_pb2.EmbedRequest
    param: str
    is_list: bool
    answer: Callable[[inference_pb2.EmbedResponse], dict[str, Any]]
    unused: tuple[str, ...] = ()

    def error_of(self, error: InflightError) -> ApiError:
        """Converts an error of the router."""
        error.fields = tuple(FieldError(self._own(one.field), one.description) for one in error.fields)
        return from_router(error, self.param)

    def _own(self, field: str) -> str:
        if field == "inputs":
            return self.param
        found = _INPUT.match(field)
        if found is None:
            return field
        return self.param + (f"[{found[1]}]" if self.is_list else "") + (found[2] or "")


def parse_embeddings(raw: bytes, defaults: Defaults) -> EmbedCall:
    """Parses the body of `/v1/embeddings`. Raises `ApiError`."""
    body = validated(EmbeddingBody, read_fields(raw, UNSUPPORTED[EMBEDDINGS], ID_LISTS))
    request = _request(body, defaults)
    request.dimensions = body.dimensions or 0
    for one in body.inputs:
        made = request.inputs.add()
        if isinstance(one, str):
            made.text = one
        else:
            made.token_ids.SetInParent()
            made.token_ids.ids.extend(one)
    is_base64 = body.encoding_format == "base64"

    def answer(response: inference_pb2.EmbedResponse) -> dict[str, Any]:
        if response.pooling.kind == types_pb2.POOLING_KIND_SCORE:
            raise refused("model", f"{body.model!r} makes scores; use {RERANK} or {SCORE}")
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _numbers(one, is_base64=is_base64)}
                for index, one in enumerate(response.results)
            ],
            "model": body.model,
            "usage": _usage(response),
        }

    is_list = body.inputs is body.input
    return EmbedCall(request, "input", is_list, answer, body.unused)


def parse_rerank(raw: bytes, defaults: Defaults) -> EmbedCall:
    """Parses the body of `/v1/rerank`. Raises `ApiError`."""
    body = validated(RerankBody, read_fields(raw, UNSUPPORTED[RERANK]))
    request = _request(body, defaults)
    for text in body.texts:
        _add_pair(request, body.query, text, body.instruction)

    def answer(response: inference_pb2.EmbedResponse) -> dict[str, Any]:
        scores = [one.values[0] for one in response.results]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if body.return_documents:
            for one in results:
                one["document"] = {"text": body.texts[one["index"]]}
        return {
            "id": f"rerank-{secrets.token_hex(12)}",
            "object": "list",
            "model": body.model,
            "results": results,
            "usage": _usage(response),
        }

    return EmbedCall(request, "documents", True, answer, body.unused)


def parse_score(raw: bytes, defaults: Defaults) -> EmbedCall:
    """Parses the body of `/v1/score`. Raises `ApiError`."""
    body = validated(ScoreBody, read_fields(raw, UNSUPPORTED[SCORE]))
    request = _request(body, defaults)
    for query, text in body.pairs:
        _add_pair(request, query, text, body.instruction)

    def answer(response: inference_pb2.EmbedResponse) -> dict[str, Any]:
        return {
            "id": f"score-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model,
            "data": [
                {"object": "score", "index": index, "score": one.values[0]}
                for index, one in enumerate(response.results)
            ],
            "usage": _usage(response),
        }

    return EmbedCall(request, "text_2", isinstance(body.text_2, list), answer, body.unused)


def _request(body: CommonBody, defaults: Defaults) -> inference_pb2.EmbedRequest:
    request = inference_pb2.EmbedRequest(model=body.model)
    request.cache.salt = body.cache_salt or ""
    priority = priority_class(body.priority) or defaults.priority
    if priority is not None:
        request.priority = PRIORITIES[priority]
    return request


def _add_pair(request: inference_pb2.EmbedRequest, query: str, document: str, instruction: str | None) -> None:
    pair = request.inputs.add().pair
    pair.query, pair.document, pair.instruction = query, document, instruction or ""


def _numbers(result: inference_pb2.Pooled, *, is_base64: bool) -> list[float] | str:
    """Returns the numbers as a list, or as float32 in the order of bytes that OpenAI's clients expect."""
    if is_base64:
        return base64.b64encode(array("f", result.values).tobytes()).decode()
    return list(result.values)


def _usage(response: inference_pb2.EmbedResponse) -> dict[str, int]:
    num_tokens = sum(one.prompt_tokens for one in response.results)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
