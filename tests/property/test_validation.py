"""Arbitrary requests: each is refused with the name of a field, or has a valid meaning."""

from __future__ import annotations

import math
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.common.errors import Reason, RequestError
from inflight.router.api.prepare import deadlines_s
from inflight.router.request.submit import ModelLimits, new_submit, resolve_sampling, router_context
from inflight.router.request.validation import fit_tokens, sampling_violations, validate_generate
from inflight.v1 import inference_pb2, types_pb2
from tests.support.examples import examples

FLOATS = st.one_of(st.floats(width=32), st.sampled_from([0.0, 0.5, 1.0]))
UINT32 = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1))
IDS = st.lists(st.one_of(st.integers(0, 70), st.just(2**32 - 1)), max_size=40)
TEXT = st.text(max_size=8)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these fields set, the others left out."""
    return st.fixed_dictionaries({}, optional=fields)


SAMPLING = some(
    temperature=FLOATS,
    top_k=st.integers(-(2**31), 2**31 - 1),
    top_p=FLOATS,
    seed=st.integers(0, 2**64 - 1),
    min_p=FLOATS,
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    repetition_penalty=FLOATS,
    logit_bias=st.dictionaries(UINT32, FLOATS, max_size=3),
    allowed_token_ids=IDS,
    bad_words=st.lists(TEXT, max_size=3),
    bad_word_ids=st.lists(some(ids=IDS), max_size=3),
    no_repeat_ngram_size=UINT32,
)
STOPPING = some(
    max_tokens=UINT32, min_tokens=UINT32, stop=st.lists(TEXT, max_size=3), stop_token_ids=IDS, ignore_eos=st.booleans()
)
DURATION = some(seconds=st.integers(-(2**63), 2**63 - 1), nanos=st.integers(-(2**31), 2**31 - 1))
PROMPT = st.one_of(
    some(text=TEXT),
    some(text_bytes=st.binary(max_size=8)),
    some(token_ids=some(ids=IDS)),
    some(chat=some(messages=st.lists(some(role=TEXT, content=st.lists(some(text=TEXT), max_size=2)), max_size=2))),
)
REST = some(
    request_id=TEXT,
    sampling=SAMPLING,
    stopping=STOPPING,
    n=st.integers(0, 2),
    priority=st.integers(-5, 5),
    deadlines=some(first_token=DURATION, total=DURATION),
    truncate_prompt_tokens=UINT32,
    metadata=st.dictionaries(TEXT, TEXT, max_size=3),
)


def check_refusal(error: RequestError) -> None:
    """It says that fields are wrong or not built, and which."""
    assert error.reason in (Reason.INVALID_FIELD, Reason.NOT_IMPLEMENTED)
    assert error.violations
    names = {"prompt", *(field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields)}
    for violation in error.violations:
        assert re.split(r"[.\[]", violation.field)[0] in names


@settings(max_examples=examples(500), deadline=None)
@given(prompt=PROMPT, rest=REST, prompt_ids=IDS, has_chat_template=st.booleans())
def test_request_is_refused_by_name_or_sound(
    prompt: dict[str, Any], rest: dict[str, Any], prompt_ids: list[int], has_chat_template: bool
) -> None:
    limits = ModelLimits(
        context_length=32,
        vocabulary_size=64,
        eos_token_ids=frozenset({2}),
        default_sampling=types_pb2.SamplingParams(temperature=0.5),
        has_chat_template=has_chat_template,
    )
    request = inference_pb2.GenerateRequest(**prompt, **rest)
    try:
        validate_generate(request, limits)
        submit = new_submit(request, router_context(request, 0.0), limits)
        fit_tokens(submit, prompt_ids, request, limits)
    except RequestError as error:
        check_refusal(error)
        return
    sent = submit.sampling
    assert 0 <= sent.temperature < math.inf
    assert 0 < sent.top_p <= 1
    assert sent.top_k >= 0
    assert next(sampling_violations(sent, limits.vocabulary_size), None) is None
    # The resolved parameters are those of the request: every value that it sets, and nothing else in its lists.
    asked = types_pb2.SamplingParams(**rest.get("sampling", {}))
    for field, value in asked.ListFields():
        assert getattr(sent, field.name) == value
    # A router that reads them back, such as one that takes the request over, gets the same again.
    assert resolve_sampling(sent, limits.default_sampling, lambda: 0) == sent
    assert all(deadline is None or 0 < deadline < math.inf for deadline in deadlines_s(request, None))
    assert 1 <= len(submit.prompt_ids) <= len(prompt_ids)
    assert submit.prompt_ids == prompt_ids[-len(submit.prompt_ids) :]
    assert all(token_id < limits.vocabulary_size for token_id in (*submit.prompt_ids, *submit.stopping.stop_token_ids))
    num_left = limits.context_length - len(submit.prompt_ids)
    assert max(1, submit.stopping.min_tokens) <= submit.stopping.max_tokens <= num_left
