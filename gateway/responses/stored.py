"""The stored responses of a gateway: creating, continuing, retrieving, following, cancelling and deleting them.

A response is its tenant's: to any other caller it does not exist. Routers say whose a credential is.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json

from inflight import AsyncClient
from inflight.gateway.conversion import ApiRequest, Defaults, convert_chat
from inflight.gateway.errors import ApiError, refused
from inflight.gateway.metrics import Metrics
from inflight.gateway.responses.background import Background, replayed
from inflight.gateway.responses.bodies import ResponsesBody, chat_body, parse_responses
from inflight.gateway.responses.conversation import (
    DEFAULT_ITEMS,
    MAX_CHAIN,
    REFERENCE,
    chain_of,
    items_before,
    listed,
    not_found,
    own_items,
    referenced,
    response_of,
    with_items,
)
from inflight.gateway.responses.following import Following
from inflight.gateway.responses.form import ResponseForm
from inflight.gateway.responses.tools import set_inputs
from inflight.gateway.settings import GatewaySettings
from inflight.gateway.store.store import Limits, Record, ResponseStore
from inflight.gateway.store.tenants import tenant_of
from inflight.gateway.streaming import WriteTimeouts

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d{1,9}")


def converted(body: ResponsesBody, defaults: Defaults, key: str = "") -> tuple[ApiRequest, ResponseForm]:
    """Returns the chat that a response is, and the form of its answer. Raises `ApiError`."""
    chat, names = chat_body(body)
    form = ResponseForm(body, names)
    try:
        api_request = convert_chat(chat, defaults, key)
    except ApiError as error:
        raise form.refusal(error) from None
    set_inputs(api_request.requests[0].chat.functions, body.offered)
    return api_request, form


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a new response continues: the ids of the responses before it, and their items."""

    chain: list[str]
    items: list[dict[str, Any]]


class StoredResponses:
    """Every method raises `ApiError`. `metadata` is that of the caller's calls of routers."""

    def __init__(
        self, client: AsyncClient, store: ResponseStore, settings: GatewaySettings, defaults: Defaults, metrics: Metrics
    ) -> None:
        self._client = client
        self._store = store
        self._settings = settings
        self._defaults = defaults
        self._metrics = metrics
        self._timeouts = WriteTimeouts(settings.heartbeat_s, settings.write_timeout_s)
        self.background = Background(client, store, metrics, self._of_record, settings.max_requests)

    def parsed(self, raw: bytes) -> ResponsesBody:
        """Parses a body, with the operator's default for `store`."""
        body = parse_responses(raw, has_store=True)
        if body.store is None:
            body = body.model_copy(update={"store": body.background or self._settings.store_by_default})
        return body

    async def resolved(self, raw: bytes, metadata: Mapping[str, str]) -> bytes:
        """Returns a body with the items that it refers to in place of the references. The responses that have them are
        kept for as long as a new one."""
        if REFERENCE.encode() not in raw:
            return raw
        try:
            body = from_json(raw, allow_inf_nan=False)
        except ValueError:
            return raw  # refused when it is parsed
        names = list(dict.fromkeys(map(response_of, referenced(body))))
        if not names:
            return raw
        if len(names) > MAX_CHAIN:
            raise refused("input", f"refers to items of {len(names)} responses; at most {MAX_CHAIN} are allowed")
        tenant = await tenant_of(self._client, metadata, "input")
        found = await self._store.load(names)
        own = [record for record in found if record is not None and record.tenant == tenant]
        body_with_items = with_items(body, own, self._settings.max_body_bytes)
        await self._store.touch(tenant, [record.response_id for record in own])
        return body_with_items

    async def earlier(self, previous: str, metadata: Mapping[str, str]) -> Earlier:
        """Returns what a response with this `previous_response_id` continues."""
        tenant = await tenant_of(self._client, metadata, "input")
        (last,) = await self._store.load([previous])
        last = None if last is None or last.tenant != tenant else last
        chain = [previous] if last is None else chain_of(last)
        before = await self._store.load(chain[:-1])
        return Earlier(chain, items_before(previous, [*before, last], self._settings.max_body_bytes))

    async def keep(
        self, raw: bytes, response: dict[str, Any], earlier: Earlier | None, metadata: Mapping[str, str]
    ) -> bool:
        """Stores a response that has ended. Returns whether it is stored. The client gets its output in any case."""
        chain = earlier.chain if earlier else []
        try:
            record = Record(
                response["id"],
                await tenant_of(self._client, metadata, "input"),
                raw.decode(),
                json.dumps(chain),
                response["created_at"],
                response=json.dumps(response, ensure_ascii=False, separators=(",", ":")),
            )
            return await self._store.create(record, chain)
        except ApiError as error:
            log.warning("response %s is not stored: %s", response["id"], error)
            return False

    async def begin(
        self, raw: bytes, body: ResponsesBody, earlier: Earlier | None, metadata: Mapping[str, str]
    ) -> dict[str, Any] | Following:
        """Starts a response in the background. Returns it, or its stream."""
        self.background.leases.check_room()
        record = Record(
            f"resp_{secrets.token_hex(12)}",
            await tenant_of(self._client, metadata, "input"),
            raw.decode(),
            json.dumps(earlier.chain if earlier else []),
            int(time.time()),
            background=True,
            streams=bool(body.stream),
            earlier=json.dumps(earlier.items, ensure_ascii=False, separators=(",", ":")) if earlier else "",
            authorization=metadata.get("authorization", ""),
            owner=self.background.leases.new_owner(),
        )
        self._of_record(record)  # refused before anything is stored
        await self._store.create(record, earlier.chain if earlier else ())
        await self.background.begin(record)
        return self._follow(record, -1) if body.stream else await self._shown(record)

    async def retrieve(
        self, response_id: str, metadata: Mapping[str, str], query: Mapping[str, str]
    ) -> dict[str, Any] | Following:
        """Returns a response, or with `stream` its events after `starting_after`."""
        record = await self._own(response_id, metadata)
        after = query.get("starting_after")
        if query.get("stream", "false").lower() != "true":
            if after is not None:
                raise refused("starting_after", "is allowed only with stream")
            return await self._shown(record)
        if after is not None and not _NUMBER.fullmatch(after):
            raise refused("starting_after", "must be the sequence_number of an event")
        if not (record.background and record.streams):
            raise refused("stream", "is allowed only for a response that was created with background and stream")
        return self._follow(record, -1 if after is None else int(after))

    async def cancel(self, response_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Cancels a background response. Returns it; one that has ended is not changed."""
        record = await self._own(response_id, metadata)
        if not record.background:
            raise ApiError(400, "Cannot cancel a synchronous response.")
        owner = self.background.leases.new_owner()
        if await self._store.take(response_id, owner, cancels=True) == "taken":
            await self.background.end_cancelled(replace(record, owner=owner, cancelled=True))
        return await self._shown(await self._own(response_id, metadata))

    async def delete(self, response_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Deletes a response, and cancels it if it runs."""
        record = await self._own(response_id, metadata)
        running = bool(record.owner)
        place = (await replayed(self._store, record, self._of_record(record)[1])).place if running else None
        if not await self._store.delete(record):
            raise not_found(response_id)
        if place is not None:
            await self.background.cancel_request(record, place)
        return {"id": response_id, "object": "response", "deleted": True}

    async def input_items(
        self, response_id: str, metadata: Mapping[str, str], query: Mapping[str, str]
    ) -> dict[str, Any]:
        """Returns a page of the items of the input, without those of the responses that it continues."""
        record = await self._own(response_id, metadata)
        order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_ITEMS))
        return listed(own_items(record), order, query.get("after"), limit)

    def _follow(self, record: Record, after: int) -> Following:
        _, form = self._of_record(record)
        news = self.background.news
        return Following(record, form, after, self._store, news, self._timeouts, self._metrics)

    async def _shown(self, record: Record) -> dict[str, Any]:
        """Returns a response as it is now. One that runs has no output yet."""
        (now,) = await self._store.load([record.response_id])
        if now is None:
            raise not_found(record.response_id)
        if now.response:
            ended: dict[str, Any] = json.loads(now.response)
            return ended
        state = await replayed(self._store, now, self._of_record(now)[1])
        return {**state.form.response(), "output": []}

    async def _own(self, response_id: str, metadata: Mapping[str, str]) -> Record:
        tenant = await tenant_of(self._client, metadata, "input")
        (record,) = await self._store.load([response_id])
        if record is None or record.tenant != tenant:
            raise not_found(response_id)
        return record

    def _of_record(self, record: Record) -> tuple[ApiRequest, ResponseForm]:
        body = self.parsed(record.body.encode())
        if record.earlier:
            body = body.after(json.loads(record.earlier))
        api_request, form = converted(body, self._defaults)
        return replace(api_request, is_stream=True, include_usage=True), form


@asynccontextmanager
async def stored_responses(
    client: AsyncClient, settings: GatewaySettings, defaults: Defaults, metrics: Metrics
) -> AsyncGenerator[StoredResponses | None, None]:
    """The stored responses of a gateway during the block; None if there is no store."""
    if settings.store_url is None:
        yield None
        return
    limits = Limits(
        settings.store_ttl_s, settings.store_max_responses, settings.store_max_bytes, settings.store_max_running
    )
    secret = None if settings.store_secret is None else settings.store_secret.get_secret_value()
    store = ResponseStore(settings.store_url.get_secret_value(), limits, secret)
    try:
        stored = StoredResponses(client, store, settings, defaults, metrics)
        async with stored.background.running():
            yield stored
    finally:
        await store.close()
