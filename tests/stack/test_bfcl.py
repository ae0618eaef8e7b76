"""BFCL's questions to the default model, with `tool_choice: required`: every call names a function and is valid."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.bfcl import CATEGORIES, TAKES_ALL, Case, NotFetchedError, fetched_cases
from tests.gateways import run_gateway

MODEL = "SmolLM2-135M-Instruct"
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
    return cases if TAKES_ALL else cases[:: len(cases) // NUM_CASES][:NUM_CASES]


async def answer(client: openai.AsyncOpenAI, case: Case, seed: int) -> Any:
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=case.messages,
        tools=case.tools,
        tool_choice="required",
        temperature=0.7,
        seed=seed,
        max_completion_tokens=100,
    )
    return completion.choices[0]


@pytest.mark.parametrize("category", CATEGORIES)
async def test_every_call_names_a_function_and_its_arguments_are_valid(stack: LocalStack, category: str) -> None:
    cases = some_cases(category)
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai(max_retries=2) as client:
        choices = await asyncio.gather(*(answer(client, case, seed) for seed, case in enumerate(cases)))
    num_valid = 0
    for case, choice in zip(cases, choices, strict=True):
        calls = choice.message.tool_calls or []
        assert choice.finish_reason in ("tool_calls", "length")
        # What the limit cuts off is a call that is not valid JSON yet, or the beginning of a tag that is not one token.
        assert choice.message.content is None or choice.finish_reason == "length"
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            assert case.is_valid(call.function.name, json.loads(call.function.arguments)), (case.name, call)
            num_valid += 1
    print(f"{category}: {num_valid} complete calls of {len(cases)} answers are valid")
    assert num_valid >= len(cases) // 2
