"""Items of stored responses: their input as it is listed, and what a response continues. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inflight.gateway.errors import ApiError, refused
from inflight.gateway.store.store import Record

MAX_CHAIN = 1000
REFERENCE = "item_reference"
DEFAULT_ITEMS = 20
MAX_ITEMS = 100


def not_found(response_id: str) -> ApiError:
    """Returns the error for a response that is not stored, or is another tenant's."""
    return ApiError(404, f"Response with id {response_id[:100]!r} not found.", code="not_found")


def no_previous(response_id: str) -> ApiError:
    """Returns the error for a response that cannot be continued because it, or one before it, is not stored."""
    text = f"is {response_id[:100]!r}, which is not stored, or continues a response that is not"
    return refused("previous_response_id", text, "previous_response_not_found")


def own_items(record: Record) -> list[dict[str, Any]]:
    """Returns the items of the input that the response's own body has. Those without an id get one."""
    given = json.loads(record.body)["input"]
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    name = record.response_id.partition("_")[2]
    items = []
    for number, item in enumerate(given):
        item = {"type": "message", **item}
        items.append({**item, "id": item.get("id") or f"in_{name}_{number}"})
    return items


def items_before(previous: str, chain: Sequence[Record | None], max_bytes: int) -> list[dict[str, Any]]:
    """Returns the items of a conversation up to and with the response `previous`, which is the last of the chain.

    Raises:
        ApiError: a response of the chain is missing or has not ended, or there are too many items.
    """
    if len(chain) > MAX_CHAIN:
        raise refused("previous_response_id", f"continues {len(chain)} responses; at most {MAX_CHAIN} are allowed")
    items: list[dict[str, Any]] = []
    num_bytes = 0
    for record in chain:
        if record is None:
            raise no_previous(previous)
        if not record.response:
            raise refused("previous_response_id", f"is {previous[:100]!r}, which has not ended", "response_not_ended")
        num_bytes += record.num_bytes
        if num_bytes > max_bytes:
            raise refused("previous_response_id", f"continues responses of more than {max_bytes} bytes")
        items += own_items(record)
        items += json.loads(record.response)["output"]
    return items


def referenced(body: Any) -> list[str]:
    """Returns the ids of the items that the input of an unchecked body refers to."""
    given = body.get("input") if isinstance(body, dict) else None
    ids = map(_id_referred_to, given if isinstance(given, list) else [])
    return [item_id for item_id in ids if item_id is not None]


def _id_referred_to(item: Any) -> str | None:
    """Returns the id that an unchecked item refers to; None if it is no reference, or has no id."""
    item_id = item.get("id") if isinstance(item, dict) and item.get("type") == REFERENCE else None
    return item_id if isinstance(item_id, str) else None


def response_of(item_id: str) -> str:
    """Returns the response that has an item: the ids of items contain its name."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


def with_items(body: dict[str, Any], records: Sequence[Record], max_bytes: int) -> bytes:
    """Returns a body with the items of these responses in place of the references to them.

    Raises:
        ApiError: an item is in none of them, or the body would be larger than `max_bytes`.
    """
    stored = {}
    for record in records:
        output = json.loads(record.response)["output"] if record.response else []
        stored.update({item["id"]: item for item in (*own_items(record), *output)})
    items = []
    for number, item in enumerate(body["input"]):
        item_id = _id_referred_to(item)
        if item_id is not None:
            if item_id not in stored:
                text = f"Item with id {item_id[:100]!r} not found. Only items of stored responses can be referred to."
                raise ApiError(404, text, param=f"input[{number}].id", code="not_found")
            item = stored[item_id]
        items.append(item)
    raw = json.dumps({**body, "input": items}, ensure_ascii=False, separators=(",", ":")).encode()
    if len(raw) > max_bytes:
        raise refused(
            "input", f"has {len(raw)} bytes with the items that it refers to; at most {max_bytes} are allowed"
        )
    return raw


def chain_of(record: Record) -> list[str]:
    """Returns the ids of the responses that a response continues, and its own."""
    return [*json.loads(record.chain), record.response_id]


def listed(items: list[dict[str, Any]], order: str, after: str | None, limit: str) -> dict[str, Any]:
    """Returns a page of items as OpenAI's API lists them. Raises `ApiError`."""
    if order not in ("asc", "desc"):
        raise refused("order", "must be asc or desc")
    if not (limit.isdecimal() and 1 <= int(limit) <= MAX_ITEMS):
        raise refused("limit", f"must be a number from 1 to {MAX_ITEMS}")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise refused("after", "is not the id of an item of this response")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }
