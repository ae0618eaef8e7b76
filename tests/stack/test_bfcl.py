"""BFCL's questions to the default model, with `tool_choice: required`: every call names a function and is valid."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import openai
import pytest

from inflight.local.stack import LocalStack
from tests.bfcl.cases import CATEGORIES, Case, NotFetchedError, fetched_cases
from tests.support.stack.gateways import run_gateway

MODEL = "SmolLM2-135M-Instruct"
# Of each category; None: all of them, which `make bfcl` takes. Half an hour on two cores.
NUM_CASES = None if os.environ.get("BFCL_ALL") else 6
NUM_CLIENTS = 32


def some_cases(category: str) -> list[Case]:
    try:
        cases = fetched_cases(category)
    except NotFetchedError as error:
        pytest.skip(f"BFCL cannot be fetched: {error}")
    return cases if NUM_CASES is None else cases[:: len(cases) // NUM_CASES][:NUM_CASES]


async def choice_of(client: openai.AsyncOpenAI, case: Case) -> Any:
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=case.messages,
        tools=case.tools,
        tool_choice="required",
        temperature=0.7,
        seed=case.seed,
        max_completion_tokens=160,
        timeout=600,
    )
    (choice,) = completion.choices
    return choice


def complete_calls(case: Case, choice: Any) -> int:
    """Checks the calls of an answer and returns their number, without one that the limit of tokens cuts off."""
    assert choice.finish_reason in ("tool_calls", "length"), case.name
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    if choice.finish_reason == "length":
        # What the limit cuts off may be the beginning of a tag that is not one token, and is then content.
        calls = calls[:-1]
    else:
        assert calls, case.name
        assert choice.message.content is None, case.name
    for name, arguments in calls:
        assert case.is_valid(name, json.loads(arguments)), (case.name, name, arguments)
    return len(calls)


async def test_every_call_names_a_function_and_its_arguments_are_valid(default_stack: LocalStack) -> None:
    cases = [case for category in CATEGORIES for case in some_cases(category)]
    limit = asyncio.Semaphore(NUM_CLIENTS)
    async with run_gateway(*default_stack.router_addresses) as gateway, gateway.openai(max_retries=5) as client:

        async def num_calls(case: Case) -> int:
            async with limit:
                return complete_calls(case, await choice_of(client, case))

        num_complete = await asyncio.gather(*map(num_calls, cases))
    assert sum(num_complete) >= len(cases) // 2
