"""Events of one prompt's choices, from the router through the client library, with repeats under further keys.

A client that repeats a request with its idempotency key may have abandoned the first one, which was then cancelled. The
key stays bound to that cancelled request, so the repeat is sent with the next key of a fixed sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from inflight import AsyncClient, AsyncStream
from inflight.events import (
    Accepted,
    Choice,
    Delta,
    Done,
    Event,
    Finished,
    FinishReason,
    PositionLogprobs,
    Prompt,
    Started,
    Usage,
)
from inflight.gateway.answers import FinishedChoice, shown_usage, whole_answer
from inflight.gateway.conversion import ApiRequest
from inflight.gateway.event_ids import AnswerId, Place
from inflight.gateway.logprobs import prompt_positions
from inflight.gateway.metrics import Metrics
from inflight.v1 import inference_pb2

MAX_KEYS = 4


@dataclass(frozen=True, slots=True)
class Collected:
    """The whole output of one prompt."""

    choices: list[FinishedChoice]
    usage: Usage
    accepted: Accepted | None


@dataclass(frozen=True, slots=True)
class Source:
    """Source of the events: the routers, the metadata of this client's calls, and where they are counted. `began` is
    called when a request has a seat, perhaps more than once."""

    client: AsyncClient
    metadata: Mapping[str, str]
    metrics: Metrics
    began: Callable[[], None] | None = None

    async def begun(self, request: inference_pb2.GenerateRequest, *, takes_back: bool) -> AsyncGenerator[Event, None]:
        """Yields the events of a new request. With `takes_back`, a further `Accepted` makes the events before it void.

        Raises:
            InflightError: the request was refused, or broke off and could not be continued.
        """
        for number in range(MAX_KEYS):
            is_last = number == MAX_KEYS - 1 or not request.idempotency_key
            stream = self.client.send(_with_key(request, number), metadata=self.metadata)
            has_output, was_cancelled = False, False
            async with aclosing(self._counted(stream)) as events:
                async for event in events:
                    has_output = has_output or isinstance(event, Delta | Prompt)
                    if not is_last and _is_cancelled(event) and (takes_back or not has_output):
                        was_cancelled = True
                        break
                    yield event
            if not was_cancelled:
                return

    async def resumed(self, places: Sequence[Place]) -> AsyncGenerator[Event, None]:
        """Yields the events of a request after the positions in its choices. Raises as `begun`."""
        stream: AsyncStream = self.client.resume(
            places[0].request_id,
            places[0].resume_token,
            offset=[place.num_tokens for place in places],
            text_bytes=[place.text_bytes for place in places],
            metadata=self.metadata,
        )
        async with aclosing(self._counted(stream)) as events:
            async for event in events:
                yield event

    async def attached(self, request: inference_pb2.GenerateRequest) -> AsyncGenerator[Event, None]:
        """Yields the events of a request with an idempotency key, which may run already, after its `prior_output`.
        Raises as `begun`."""
        async with aclosing(self._counted(self.client.send(request, metadata=self.metadata))) as events:
            async for event in events:
                yield event

    async def _counted(self, stream: AsyncStream) -> AsyncGenerator[Event, None]:
        with self.metrics.generating() as begin:
            async with aclosing(stream.events()) as events:
                async for event in events:
                    if isinstance(event, Delta | Prompt):
                        begin()
                    if self.began is not None and isinstance(event, Started | Delta | Prompt):
                        self.began()
                    yield event

    async def collected(self, api_request: ApiRequest) -> list[Collected]:
        """Returns the output of every prompt. Raises as `begun`, and cancels the others then."""
        try:
            async with asyncio.TaskGroup() as group:
                reading = [group.create_task(self._collect(api_request, request)) for request in api_request.requests]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [choices.result() for choices in reading]

    async def _collect(self, api_request: ApiRequest, request: inference_pb2.GenerateRequest) -> Collected:
        texts: list[list[str]] = [[] for _ in range(api_request.n)]
        parted = [Choice() for _ in range(api_request.n)]
        has_parts = False
        accepted: Accepted | None = None
        logprobs: list[list[PositionLogprobs | None]] = [[] for _ in range(api_request.n)]
        num_tokens = [0] * api_request.n
        prompt: list[PositionLogprobs | None] = []
        reasons = [FinishReason.UNKNOWN] * api_request.n
        are_cut = [False] * api_request.n
        stops: list[str | None] = [None] * api_request.n
        async with aclosing(self.begun(request, takes_back=True)) as events:
            async for event in events:
                match event:
                    case Accepted():
                        texts = [[] for _ in range(api_request.n)]
                        parted = [Choice() for _ in range(api_request.n)]
                        has_parts, accepted = event.has_parts, event
                        logprobs = [[] for _ in range(api_request.n)]
                        num_tokens = [0] * api_request.n
                        prompt.clear()
                    case Prompt():
                        prompt.extend(prompt_positions(event))
                    case Delta(choice=choice):
                        num_tokens[choice] += event.num_tokens
                        if not (api_request.drops_output and num_tokens[choice]):
                            texts[choice].append(event.text)
                            parted[choice].take_parts(event.parts)
                            logprobs[choice].extend(event.logprobs)
                    case Finished():
                        reasons[event.choice] = event.reason
                        are_cut[event.choice] = event.constraint_unfinished
                        stops[event.choice] = event.stop
                        parted[event.choice].take_parts(event.parts)
                    case Done():
                        parts = zip(map("".join, texts), reasons, logprobs, are_cut, stops, strict=True)
                        choices = [
                            FinishedChoice(text, reason, positions, prompt, is_cut=is_cut, stop=stop)
                            for text, reason, positions, is_cut, stop in parts
                        ]
                        if has_parts:
                            choices = [divided(choice, one) for choice, one in zip(choices, parted, strict=True)]
                        return Collected(choices, shown_usage(api_request, event.usage), accepted)
        raise AssertionError("a stream without an error ends with Done")


def whole_of(api_request: ApiRequest, answer: AnswerId, collected: Sequence[Collected]) -> dict[str, Any]:
    """Returns the whole answer with this output of its prompts. Raises `ApiError` if a choice ended for a reason that
    OpenAI's API does not have."""
    choices = [choice for one in collected for choice in one.choices]
    # Only a chat has tools, and it is one prompt.
    return whole_answer(api_request, answer, choices, [one.usage for one in collected], collected[0].accepted)


def divided(choice: FinishedChoice, parts: Choice) -> FinishedChoice:
    """Returns a choice with its text divided into reasoning, content and calls."""
    return replace(choice, text=parts.content, reasoning=parts.reasoning, tool_calls=parts.tool_calls)


def _with_key(request: inference_pb2.GenerateRequest, number: int) -> inference_pb2.GenerateRequest:
    if not number:
        return request
    again = inference_pb2.GenerateRequest()
    again.CopyFrom(request)
    again.idempotency_key = f"{request.idempotency_key}~{number}"
    return again


def _is_cancelled(event: Event) -> bool:
    return isinstance(event, Finished) and event.reason is FinishReason.CANCELLED
