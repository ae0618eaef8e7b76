"""Endpoints that the lines of batches may call, an entry for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.errors import InflightError
from inflight.gateway.bodies import parse_chat, parse_completion
from inflight.gateway.choices import Source, whole_of
from inflight.gateway.conversion import ApiRequest, Defaults, convert_chat, convert_completion
from inflight.gateway.embeddings.calls import EMBEDDINGS, parse_embeddings
from inflight.gateway.errors import from_router, refused
from inflight.gateway.event_ids import AnswerId
from inflight.requests import PRIORITIES

# For how long a request runs on when its gateway is gone: longer than another one takes to find it by its key.
RESUME_TTL_S = 10

Convert = Callable[[bytes, Defaults, str], ApiRequest]


@dataclass(frozen=True, slots=True)
class Call:
    """What the call of a line has besides its body. `name` is the part of the answer's id after its prefix, `created`
    the answer's time in seconds since 1970. An endpoint calls `source.began` when its request waits no more."""

    key: str
    name: str
    created: int
    source: Source
    defaults: Defaults


# Answers the body of a line on class `batch`. Raises `ApiError`.
Endpoint = Callable[[bytes, Call], Awaitable[dict[str, Any]]]


def _generating(convert: Convert, prefix: str) -> Endpoint:
    async def answer(raw: bytes, call: Call) -> dict[str, Any]:
        api_request = convert(raw, call.defaults, call.key)
        if api_request.is_stream:
            raise refused("stream", "must be false in a batch")
        for request in api_request.requests:
            request.priority = PRIORITIES["batch"]
            request.resume_ttl.FromSeconds(RESUME_TTL_S)
            request.want_queue_events = True
        try:
            collected = await call.source.collected(api_request)
        except InflightError as error:
            raise from_router(error, api_request.prompt_param, api_request.renamed, api_request.num_joined) from None
        return whole_of(api_request, AnswerId(f"{prefix}-{call.name}", call.created), collected)

    return answer


async def _embedded(raw: bytes, call: Call) -> dict[str, Any]:
    asked = parse_embeddings(raw, call.defaults)
    asked.request.priority = PRIORITIES["batch"]
    if call.source.began is not None:
        call.source.began()  # a call without a seat of its own does not say when it waits no more
    try:
        response = await call.source.client.send_embed(asked.request, metadata=call.source.metadata)
    except InflightError as error:
        raise asked.error_of(error) from None
    return await asyncio.to_thread(asked.answer, response)


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": _generating(
        lambda raw, defaults, key: convert_chat(parse_chat(raw), defaults, key), "chatcmpl"
    ),
    "/v1/completions": _generating(
        lambda raw, defaults, key: convert_completion(parse_completion(raw), defaults, key), "cmpl"
    ),
    EMBEDDINGS: _embedded,
}
