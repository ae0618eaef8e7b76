"""Stored responses in Redis: what a gateway keeps of them, and which gateway drives one that runs in the background.

It owns the connection to Redis, the keys and the bounds. It never looks into bodies, log entries and ended responses,
which are JSON texts to it. All keys have the prefix `inflight:responses:{r}:`, so a user of Redis with the permissions
of a router may use them.

- `of:<id>` (hash): the record: tenant, body (as the client sent it), chain (ids of the responses that it continues, as
  JSON), earlier (their items, of a background response), created (seconds since 1970), background, streams (`1` or
  empty), response (JSON, once it has ended); while it
  runs besides: owner (of its lease), authorization (of its client, for calls to routers), times_taken, cancelled,
  log_bytes
- `log:<id>` (stream): the output of a background response, in entries that are JSON texts; kept after its end if it was
  asked for as a stream
- `index:<tenant>` (zset): response → when it expires; the longest unused one is first
- `sizes:<tenant>` (hash): response → its bytes, and under the empty name their sum
- `live:<tenant>` (zset): running response → when it expires
- `running` (zset): running response of any tenant → when its lease lapses
- `news` (stream): about 4,096 ids of responses that changed

Everything expires `ttl_s` after it was last written or continued. One gateway at a time owns a running response: it
writes as the owner of a lease, and a write of any other is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from inflight.gateway.errors import ApiError
from inflight.gateway.store.connection import RETRY_AFTER_S, Seal, StoreConnection, tenant_keys
from inflight.gateway.store.leases import LEASE_MS, Taken

PREFIX = "inflight:responses:{r}:"
BLOCK_MS = 5000
MAX_ENTRIES = 128

Written = Literal["written", "lost", "gone"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long responses are kept, and how much of each tenant."""

    ttl_s: float
    max_responses: int
    max_bytes: int
    max_running: int

    @property
    def ttl_ms(self) -> int:
        """The time in milliseconds."""
        return round(self.ttl_s * 1000)


@dataclass(frozen=True, slots=True)
class Record:
    """A stored response. `response` is empty while it runs."""

    response_id: str
    tenant: str
    body: str
    chain: str
    created: int
    background: bool = False
    streams: bool = False
    earlier: str = ""
    response: str = ""
    authorization: str = ""
    times_taken: int = 0
    cancelled: bool = False
    owner: str = ""

    @property
    def num_bytes(self) -> int:
        """The bytes that count for its tenant."""
        return sum(len(text.encode()) for text in (self.body, self.chain, self.earlier, self.response))


_TEXTS = ("tenant", "body", "chain", "earlier", "response", "authorization", "owner")
_FLAGS = ("background", "streams", "cancelled")
_NUMBERS = ("created", "times_taken")
_FIELDS = (*_TEXTS, *_FLAGS, *_NUMBERS)


class ResponseStore:
    """The store. Every method raises `ApiError` 503 if Redis does not answer."""

    def __init__(self, url: str, limits: Limits, secret: str | None = None) -> None:
        """With a secret the authorization of clients is encrypted."""
        self._limits = limits
        self._seal = Seal(secret)
        self._redis = StoreConnection(url, "responses", ("append", "touch"))
        self._reader = self._redis.reader(BLOCK_MS / 1000)

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.close()

    async def create(self, record: Record, ancestors: Sequence[str] = ()) -> bool:
        """Stores a new response, and the ones that it continues for as long. With an owner it runs from now on, with
        that owner's lease. Returns whether it is new. Raises `ApiError` 429 if the tenant's limits do not allow it."""
        limits = self._limits
        fields = _fields(replace(record, authorization=self._seal.close(record.authorization)))
        await self.touch(record.tenant, ancestors)
        bounds = (limits.max_responses, limits.max_bytes, limits.max_running)
        keys = self._keys(record)[:-1]
        outcome, *left = await self._redis.call(
            "create",
            keys,
            *(record.response_id, limits.ttl_ms, record.num_bytes, *bounds, "1", record.owner, LEASE_MS),
            *(part for pair in fields.items() for part in pair),
        )
        for old in left:
            for key in (_of(old), _log(old)):
                await self._redis.command("PEXPIRE", key, 0)
        if outcome == "busy":
            text = f"{limits.max_running} background responses of this tenant are under way, the most that may be"
            raise ApiError(429, text, "rate_limit_error", code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)
        if outcome == "full":
            text = (
                f"the responses of a tenant that are kept may have {limits.max_bytes} bytes, and this one is too much"
            )
            raise ApiError(429, text, "rate_limit_error", code="storage_full", may_retry=False)
        return bool(outcome == "created")

    async def touch(self, tenant: str, response_ids: Sequence[str]) -> None:
        """Keeps responses of a tenant for as long as a new one. Unknown ones are left out."""
        if response_ids:
            records = [_of(one) for one in response_ids]
            await self._redis.call("touch", [self._of_tenant(tenant)[0], *records], self._limits.ttl_ms, *response_ids)

    async def load(self, response_ids: Sequence[str]) -> list[Record | None]:
        """Returns responses, None for unknown ones."""
        found = []
        for response_id in response_ids:
            values = await self._redis.command("HMGET", _of(response_id), *_FIELDS)
            record = _record(response_id, dict(zip(_FIELDS, values, strict=True)))
            found.append(record and replace(record, authorization=self._seal.open(record.authorization)))
        return found

    async def owner(self, response_id: str) -> str | None:
        """Returns the owner of a running response."""
        (owner,) = await self._redis.command("HMGET", _of(response_id), "owner")
        return cast("str | None", owner)

    async def is_running(self, response_id: str) -> bool | None:
        """Returns whether a response runs; None if there is none."""
        created, owner = await self._redis.command("HMGET", _of(response_id), "created", "owner")
        return None if created is None else owner is not None

    async def entries(self, response_id: str, after: str) -> list[tuple[str, str]]:
        """Returns up to 128 entries of a log after the place `after`, each with its own; `0` is the beginning."""
        found = await self._redis.command("XREAD", "COUNT", MAX_ENTRIES, "STREAMS", _log(response_id), after)
        return [(place, fields["entry"]) for _, rows in found or () for place, fields in rows]

    async def append(self, record: Record, entry: str, ended: str = "") -> Written:
        """Adds an entry to the log, as the owner that the record names, and ends the response with `ended`. If this
        raises, the entry may have been written."""
        arguments = (record.response_id, self._limits.ttl_ms, record.owner, entry, ended, "1" if record.streams else "")
        return cast(Written, await self._redis.call("append", self._keys(record), *arguments))

    async def take(self, response_id: str, owner: str, *, cancels: bool = False) -> Taken:
        """Becomes the owner of a running response whose lease has lapsed, or with `cancels` of any."""
        keys = [_of(response_id), PREFIX + "running"]
        return cast(Taken, await self._redis.call("take", keys, response_id, owner, LEASE_MS, "1" if cancels else ""))

    async def tend(self, owners: Mapping[str, str], *, gives_back: bool = False) -> tuple[list[str], list[str]]:
        """Renews the leases of running responses by their owners, or gives them back. Returns responses of anyone
        whose leases have lapsed, and those of `owners` that have another owner or none."""
        keys = [PREFIX + "running", *map(_of, owners)]
        pairs = (part for pair in owners.items() for part in pair)
        found = await self._redis.call("tend", keys, 0 if gives_back else LEASE_MS, *pairs)
        middle = found.index("")
        return found[:middle], found[middle + 1 :]

    async def delete(self, record: Record) -> bool:
        """Deletes a response. Returns whether there was one."""
        return bool(await self._redis.call("delete", self._keys(record), record.response_id, self._limits.ttl_ms))

    async def newest(self) -> str:
        """Returns the place in the news from which `news` reads what comes next."""
        found = await self._redis.command("XREVRANGE", PREFIX + "news", "+", "-", "COUNT", 1)
        return str(found[0][0]) if found else "0"

    async def news(self, after: str) -> tuple[str, list[str]]:
        """Waits for changes for up to 5 s. Returns the place to read on from, and the responses that changed."""
        command = ("XREAD", "BLOCK", BLOCK_MS, "STREAMS", PREFIX + "news", after)
        found = await self._redis.read(self._reader, *command)
        rows = [row for _, rows in found or () for row in rows]
        return (rows[-1][0] if rows else after), [fields["id"] for _, fields in rows]

    def _of_tenant(self, tenant: str) -> list[str]:
        return tenant_keys(PREFIX, tenant, ("index", "sizes", "live"))

    def _keys(self, record: Record) -> list[str]:
        own = [_of(record.response_id), _log(record.response_id)]
        return [*own, *self._of_tenant(record.tenant), PREFIX + "running", PREFIX + "news"]


def _of(response_id: str) -> str:
    return f"{PREFIX}of:{response_id}"


def _log(response_id: str) -> str:
    return f"{PREFIX}log:{response_id}"


def _fields(record: Record) -> dict[str, str | int]:
    texts = {name: getattr(record, name) for name in _TEXTS if name != "owner" and getattr(record, name)}
    flags = {name: "1" for name in _FLAGS if getattr(record, name)}
    return {**texts, **flags, "created": record.created}


def _record(response_id: str, values: Mapping[str, str | None]) -> Record | None:
    if values["tenant"] is None:
        return None

    def of(names: Iterable[str], read: Any) -> dict[str, Any]:
        return {name: read(values[name] or "") for name in names}

    return Record(response_id, **of(_TEXTS, str), **of(_FLAGS, bool), **of(_NUMBERS, lambda text: int(text or 0)))
