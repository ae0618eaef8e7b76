"""BFCL's questions to the default model, with `tool_choice: required`: every call names a function and is valid."""

from __future__ import annotations

import pytest

from inflight.bench.bfcl.answers import answers
from inflight.bench.bfcl.cases import CATEGORIES, Case, NotFetchedError, fetched_cases
from inflight.local.stack import LocalStack
from tests.support.stack.gateways import run_gateway

MODEL = "SmolLM2-135M-Instruct"
# Of each category. `make bfcl` asks all.
NUM_CASES = 6


def some_cases(category: str) -> list[Case]:
    try:
        cases = fetched_cases(category)
    except NotFetchedError as error:
        pytest.skip(f"BFCL cannot be fetched: {error}")
    return cases[:: len(cases) // NUM_CASES][:NUM_CASES]


async def test_every_call_names_a_function_and_its_arguments_are_valid(default_stack: LocalStack) -> None:
    cases = [case for category in CATEGORIES for case in some_cases(category)]
    async with run_gateway(*default_stack.router_addresses) as gateway, gateway.openai(max_retries=2) as client:
        answered = [answer async for answer in answers(client, MODEL, cases, len(cases))]
    for answer in answered:
        assert not answer.invalid, answer
        assert not answer.problem, answer
    assert sum(answer.num_calls for answer in answered) >= len(cases) // 2
