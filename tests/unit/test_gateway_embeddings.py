"""Bodies and answers of the endpoints for embeddings and scores."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

import grpc
import pytest

from inflight.errors import FieldError, InflightError
from inflight.gateway.conversion import Defaults
from inflight.gateway.embeddings.calls import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    EmbedCall,
    parse_embeddings,
    parse_rerank,
    parse_score,
)
from inflight.gateway.errors import ApiError
from inflight.v1 import inference_pb2, types_pb2

DEFAULTS = Defaults(max_choices=1)


def parsed(path: str, **fields: Any) -> EmbedCall:
    return {EMBEDDINGS: parse_embeddings, RERANK: parse_rerank, SCORE: parse_score}[path](
        json.dumps({"model": "m", **fields}).encode(), DEFAULTS
    )


def response(*results: list[float], is_score: bool = False) -> inference_pb2.EmbedResponse:
    kind = types_pb2.POOLING_KIND_SCORE if is_score else types_pb2.POOLING_KIND_LAST
    pooled = [inference_pb2.Pooled(values=values, prompt_tokens=3, cached_tokens=1) for values in results]
    return inference_pb2.EmbedResponse(model="m", pooling=types_pb2.Pooling(kind=kind), results=pooled)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2.0], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([], []),
    ],
    ids=str,
)
def test_inputs_in_all_of_openais_forms(given: Any, inputs: list[Any]) -> None:
    request = parsed(EMBEDDINGS, input=given).request

    assert [one.text if one.HasField("text") else list(one.token_ids.ids) for one in request.inputs] == inputs


def test_numbers_as_floats_and_as_base64() -> None:
    values = [0.5, -0.25, 1e-3]
    floats = parsed(EMBEDDINGS, input="x", encoding_format="float", dimensions=3).answer(response(values))
    packed = parsed(EMBEDDINGS, input="x", encoding_format="base64").answer(response(values))

    rounded = array("f", values)
    assert floats["data"] == [{"object": "embedding", "index": 0, "embedding": rounded.tolist()}]
    assert array("f", base64.b64decode(packed["data"][0]["embedding"])) == rounded
    assert floats["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_results_of_a_rerank_are_sorted_and_cut() -> None:
    documents = ["a", {"text": "b"}, "c"]
    call = parsed(RERANK, query="q", documents=documents, top_n=2, return_documents=True, instruction="i")
    pairs = [(one.pair.query, one.pair.document, one.pair.instruction) for one in call.request.inputs]
    results = call.answer(response([0.25], [0.75], [0.5], is_score=True))["results"]

    assert pairs == [("q", "a", "i"), ("q", "b", "i"), ("q", "c", "i")]
    assert results == [
        {"index": 1, "relevance_score": 0.75, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
    ]


def test_texts_of_a_score_are_paired() -> None:
    one, several = parsed(SCORE, text_1="q", text_2=["a", "b"]), parsed(SCORE, text_1=["p", "q"], text_2=["a", "b"])

    assert [(pair.pair.query, pair.pair.document) for pair in one.request.inputs] == [("q", "a"), ("q", "b")]
    assert [(pair.pair.query, pair.pair.document) for pair in several.request.inputs] == [("p", "a"), ("q", "b")]
    assert [entry["score"] for entry in one.answer(response([0.25], [0.5], is_score=True))["data"]] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": "x", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"input": "x", "temperature": 1}, "temperature"),
        (EMBEDDINGS, {"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (RERANK, {"query": "q"}, "documents"),
        (RERANK, {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(path, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("path", "fields", "field", "param"),
    [
        (EMBEDDINGS, {"input": "x"}, "inputs[0].text", "input"),
        (EMBEDDINGS, {"input": ["x", "y"]}, "inputs[1].text", "input[1]"),
        (EMBEDDINGS, {"input": [1, 2]}, "inputs[0].token_ids.ids[1]", "input[1]"),
        (EMBEDDINGS, {"input": [[1], [2]]}, "inputs[1].token_ids.ids[0]", "input[1][0]"),
        (EMBEDDINGS, {"input": "x"}, "dimensions", "dimensions"),
        (RERANK, {"query": "q", "documents": ["a"]}, "inputs[0].pair", "documents[0]"),
        (RERANK, {"query": "q", "documents": ["a"]}, "inputs", "documents"),
        (SCORE, {"text_1": "q", "text_2": "a"}, "inputs[0].pair.messages[1].content", "text_2"),
    ],
    ids=str,
)
def test_errors_of_the_router_name_parameters_of_the_body(
    path: str, fields: dict[str, Any], field: str, param: str
) -> None:
    error = InflightError(grpc.StatusCode.INVALID_ARGUMENT, "wrong", "INVALID_FIELD", (FieldError(field, "is wrong"),))

    refused = parsed(path, **fields).error_of(error)

    assert (refused.status, refused.param, refused.text) == (400, param, f"{param}: is wrong")


def test_a_model_for_scores_makes_no_embeddings() -> None:
    with pytest.raises(ApiError, match="makes scores"):
        parsed(EMBEDDINGS, input="x").answer(response([0.5], is_score=True))
