"""Answers to BFCL's questions with `tool_choice: required`, and what is wrong with their calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from inflight.bench.bfcl.cases import Case

TEMPERATURE = 0.7
MAX_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Answer:
    """The calls of one answer. `invalid` are complete calls that name no function of the case or do not satisfy its
    schema; `problem` is another reason why the answer is wrong, empty if there is none."""

    case: str
    is_cut_off: bool
    num_calls: int
    invalid: Sequence[str]
    problem: str
    calls_right_functions: bool
    prompt_tokens: int
    output_tokens: int


async def answers(
    client: openai.AsyncOpenAI, model: str, cases: Sequence[Case], num_clients: int
) -> AsyncIterator[Answer]:
    """Asks all questions, so many at a time, and yields the answers as they come. A case's number is its seed."""
    limit = asyncio.Semaphore(num_clients)

    async def ask(seed: int, case: Case) -> Answer:
        async with limit:
            return judged(case, await _completion(client, model, case, seed))

    for answering in asyncio.as_completed([ask(case.seed, case) for case in cases]):
        yield await answering


async def _completion(client: openai.AsyncOpenAI, model: str, case: Case, seed: int) -> Any:
    return await client.chat.completions.create(
        model=model,
        messages=case.messages,
        tools=case.tools,
        tool_choice="required",
        temperature=TEMPERATURE,
        seed=seed,
        max_completion_tokens=MAX_TOKENS,
    )


def judged(case: Case, completion: Any) -> Answer:
    """Returns what is to be said of a completion."""
    (choice,) = completion.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    is_cut_off = choice.finish_reason == "length"
    complete = calls[:-1] if is_cut_off else calls
    return Answer(
        case.name,
        is_cut_off,
        len(complete),
        [f"{name} {arguments}" for name, arguments in complete if not _is_valid(case, name, arguments)],
        _problem(choice, len(complete)),
        sorted(name for name, _ in calls) == sorted(name for name, _ in case.calls),
        completion.usage.prompt_tokens,
        completion.usage.completion_tokens,
    )


def _is_valid(case: Case, name: str, arguments: str) -> bool:
    try:
        return case.is_valid(name, json.loads(arguments))
    except ValueError:
        return False


def _problem(choice: Any, num_complete: int) -> str:
    if choice.finish_reason not in ("tool_calls", "length"):
        return f"finish reason {choice.finish_reason}"
    if choice.finish_reason == "tool_calls" and not num_complete:
        return "no call"
    # What the limit cuts off may be the beginning of a tag that is not one token.
    if choice.message.content is not None and choice.finish_reason != "length":
        return "content beside calls"
    return ""
