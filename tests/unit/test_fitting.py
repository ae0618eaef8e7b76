"""The fit of a request's tokens into its model, and the limits of tokenizing and detokenizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from inflight.common.errors import RequestError
from inflight.router.api.prepare import prior_output
from inflight.router.lifecycle.events import End
from inflight.router.request.submit import ModelLimits
from inflight.router.request.validation import fit_tokens, validate_detokenize, validate_tokenize
from inflight.v1 import executor_pb2, inference_pb2, types_pb2
from tests.support.text.validated import limits_of, requested, validated


def fitted(num_tokens: int, limits: ModelLimits | None = None, **fields: Any) -> executor_pb2.Submit:
    """What an executor is told of a request with a prompt of ids 10, 11, ..."""
    return fitted_ids([10 + i for i in range(num_tokens)], limits or limits_of(), **fields)


def fitted_ids(prompt_ids: list[int], limits: ModelLimits, **fields: Any) -> executor_pb2.Submit:
    submit = validated(limits, **fields)
    fit_tokens(submit, prompt_ids, requested(**fields), limits)
    return submit


def test_max_tokens_defaults_to_what_the_context_leaves() -> None:
    assert fitted(30).stopping.max_tokens == 70
    assert fitted(99).stopping.max_tokens == 1


def test_prompt_and_max_tokens_may_fill_the_context() -> None:
    assert fitted(30, stopping={"max_tokens": 70}).stopping.max_tokens == 70


def test_more_than_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match=r"stopping\.max_tokens: is 71, and the prompt has 30 tokens.*100") as caught:
        fitted(30, stopping={"max_tokens": 71})
    assert caught.value.violations[0].field == "stopping.max_tokens"


@pytest.mark.parametrize("max_tokens", [1_000_000, 2**32 - 1])
def test_absurd_max_tokens_are_refused_with_what_there_is(max_tokens: int) -> None:
    with pytest.raises(RequestError, match=rf"stopping\.max_tokens: is {max_tokens}, .* 30 tokens.*100"):
        fitted(30, stopping={"max_tokens": max_tokens})


def test_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(RequestError, match=r"text: has 100 tokens.*context is 100"):
        fitted(100)


def test_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt: is empty"):
        fitted(0)


def test_min_tokens_above_what_the_context_leaves_is_refused() -> None:
    with pytest.raises(RequestError, match=r"stopping\.min_tokens: is 71; must be at most max_tokens, which is 70"):
        fitted(30, stopping={"min_tokens": 71})


def test_long_prompt_is_cut_from_its_beginning_where_asked() -> None:
    submit = fitted(500, truncate_prompt_tokens=3)
    assert submit.prompt_ids == [507, 508, 509]
    assert submit.stopping.max_tokens == 97


def test_short_prompt_is_not_cut() -> None:
    assert fitted(2, truncate_prompt_tokens=3).prompt_ids == [10, 11]


def test_token_id_outside_the_vocabulary_is_refused_by_place() -> None:
    with pytest.raises(RequestError, match=r"token_ids\.ids\[1\]: token id 1000 is outside .* 1000 ids \(0 to 999\)"):
        fitted_ids([5, 1000], limits_of(), token_ids={"ids": [5, 1000]})


def test_token_that_the_model_lacks_is_refused_for_text_too() -> None:
    with pytest.raises(RequestError, match=r"text: token id 1000 is outside"):
        fitted_ids([5, 1000], limits_of())


@pytest.mark.parametrize(("ignore_eos", "ending_ids"), [(False, [2, 3, 7]), (True, [7])])
def test_ids_that_end_prior_output_are_the_requests_and_the_models(ignore_eos: bool, ending_ids: list[int]) -> None:
    stopping = {"stop_token_ids": [7], "ignore_eos": ignore_eos}
    ends = [known_output(stopping, [token_id])[1] for token_id in range(10)]
    assert [end.stop_token_id for end in ends if end is not None] == ending_ids


def test_stopping_on_the_wire_has_max_tokens_and_no_stop_strings() -> None:
    sent = fitted(30, stopping={"stop": ["x"], "include_stop": True, "min_tokens": 2}).stopping
    assert sent == types_pb2.StoppingParams(max_tokens=70, min_tokens=2)


def test_text_to_tokenize_may_be_empty() -> None:
    validate_tokenize(inference_pb2.TokenizeRequest(text=""), limits_of())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "input"),
        ({"text": "x" * 5_000_000}, "text"),
        ({"chat": {}}, "chat.messages"),
    ],
)
def test_nothing_to_tokenize_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate_tokenize(inference_pb2.TokenizeRequest(**fields), limits_of())
    assert [violation.field for violation in caught.value.violations] == [field]


def test_ids_to_detokenize_are_within_the_vocabulary() -> None:
    assert validate_detokenize(inference_pb2.DetokenizeRequest(token_ids=[0, 999]), limits_of()) == (0, 999)
    with pytest.raises(RequestError, match=r"token_ids\[1\]: token id 1000 is outside"):
        validate_detokenize(inference_pb2.DetokenizeRequest(token_ids=[0, 1000]), limits_of())
    with pytest.raises(RequestError, match="token_ids: has 17 ids; at most 16"):
        validate_detokenize(inference_pb2.DetokenizeRequest(token_ids=[0] * 17), limits_of(max_prompt_bytes=16))


def known_output(stopping: dict[str, Any], output_ids: list[int]) -> tuple[Sequence[int], End | None]:
    """The output that a client brings, and the end in it."""
    fields: dict[str, Any] = {"stopping": stopping, "prior_output": {"output_ids": output_ids}}
    return prior_output(requested(**fields), fitted(3, **fields), limits_of())


@pytest.mark.parametrize(("min_tokens", "num_kept"), [(0, 1), (1, 2), (2, 3)])
def test_prior_output_ends_at_the_first_ending_token_that_has_min_tokens_before_it(
    min_tokens: int, num_kept: int
) -> None:
    stopping = {"max_tokens": 9, "min_tokens": min_tokens, "stop_token_ids": [5]}
    prior_ids, end = known_output(stopping, [5, 5, 5, 7])
    assert prior_ids == (5,) * num_kept
    assert end is not None
    assert (end.reason, end.stop_token_id) == (types_pb2.FINISH_REASON_STOP_TOKEN, 5)
