"""BFCL's questions to the default model, with `tool_choice: required`: every call names a function and is valid."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from inflight.bench.bfcl.answers import answers
from inflight.bench.bfcl.cases import CATEGORIES, Case, NotFetchedError, fetched_cases
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.support.stack.gateways import run_gateway

MODEL = "SmolLM2-135M-Instruct"
# Of each category. `make bfcl` asks all.
NUM_CASES = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """With blocks for long descriptions of functions."""
    async with LocalStack(StackOptions(run_dir=tmp_path_factory.mktemp("bfcl") / "run")) as running:
        yield running


def some_cases(category: str) -> list[Case]:
    try:
        cases = fetched_cases(category)
    except NotFetchedError as error:
        pytest.skip(f"BFCL cannot be fetched: {error}")
    return cases[:: len(cases) // NUM_CASES][:NUM_CASES]


async def test_every_call_names_a_function_and_its_arguments_are_valid(stack: LocalStack) -> None:
    cases = [case for category in CATEGORIES for case in some_cases(category)]
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai(max_retries=2) as client:
        answered = [answer async for answer in answers(client, MODEL, cases, len(cases))]
    for answer in answered:
        assert not answer.invalid, answer
        assert not answer.problem, answer
    assert sum(answer.num_calls for answer in answered) >= len(cases) // 2
