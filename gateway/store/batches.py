"""Files and batches in Redis: what a gateway knows of them, and which gateway runs a batch.

It owns the keys and the bounds. The contents of files are elsewhere. All keys have the prefix `inflight:batches:{b}:`,
so a user of Redis with the permissions of a router may use them.

- `file:<id>` (hash): tenant, filename, purpose, bytes, created and expires (seconds since 1970)
- `files:<tenant>`, `file-sizes:<tenant>`, `file-live:<tenant>`: index, sizes and live of files; none runs
- `batch:<id>` (hash): the fields of `Batch` that are not empty; while it runs besides: owner (of its lease),
  authorization (of its client, for calls to routers), times_taken, cancelled
- `segments:<id>` (hash): segment of results → its description, JSON; until the batch has ended
- `index:<tenant>`, `sizes:<tenant>`, `live:<tenant>`: index, sizes and live of batches
- `running` (zset): running batch of any tenant → when its lease lapses

One gateway at a time owns a running batch: it writes as the owner of a lease, and a write of any other is refused. A
result counts when its segment stands in `segments`, so a line has one result whichever gateways ran it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from inflight.gateway.errors import ApiError
from inflight.gateway.store.connection import RETRY_AFTER_S, Seal, StoreConnection, tenant_keys
from inflight.gateway.store.leases import LEASE_MS, Taken

PREFIX = "inflight:batches:{b}:"
# Ended batches of a tenant; the oldest leave for new ones.
MAX_BATCHES = 2000
# Of a batch that expires after 24 hours, with time to write its files.
LONGEST_RUN_MS = 2 * 86_400_000
# Records that one call of Redis loads.
LOADED_AT_ONCE = 128
UNBOUNDED = 2**50

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How long files and batches are kept, and how much of each tenant."""

    ttl_s: float
    max_files: int
    max_bytes: int
    max_open: int


@dataclass(frozen=True, slots=True)
class File:
    """A file. `expires` and `created` are seconds since 1970."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created: int
    expires: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. Times are seconds since 1970, 0 before they are reached. `metadata`, `errors` and `usage` are JSON.

    `outcome` is what it ends as, from `finalizing` on. `output_ttl_s` is how long its files are kept.
    """

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created: int
    expires: int
    status: Status = "validating"
    metadata: str = ""
    output_ttl_s: int = 0
    model: str = ""
    errors: str = ""
    usage: str = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    outcome: str = ""
    output_file_id: str = ""
    error_file_id: str = ""
    in_progress_at: int = 0
    finalizing_at: int = 0
    completed_at: int = 0
    failed_at: int = 0
    expired_at: int = 0
    cancelling_at: int = 0
    cancelled_at: int = 0
    authorization: str = ""
    owner: str = ""
    times_taken: int = 0
    cancelled: int = 0


Record = TypeVar("Record", File, Batch)


class BatchStore:
    """The store. Every method raises `ApiError` 503 if Redis does not answer."""

    def __init__(self, url: str, limits: BatchLimits, secret: str | None = None) -> None:
        """With a secret the authorization of clients is encrypted."""
        self._limits = limits
        self._seal = Seal(secret)
        self._redis = StoreConnection(url, "batches", ("advance", "load"))

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.close()

    async def create_file(self, file: File, *, is_result: bool = False) -> bool:
        """Stores a file. Returns whether it is new. Raises `ApiError` 429 if the tenant's limits do not allow it, to
        which files with results of batches are not subject."""
        limits = self._limits
        bounds = (UNBOUNDED, UNBOUNDED) if is_result else (limits.max_files, limits.max_bytes)
        ttl_ms = max(1, file.expires - file.created) * 1000
        arguments: list[str | int] = [file.file_id, ttl_ms, file.num_bytes, *bounds, 0, "", "", LEASE_MS]
        keys = [*_file_keys(file), PREFIX + "running"]
        outcome, *left = await self._redis.call("create", keys, *arguments, *_pairs(file))
        await self._forget([_file(old) for old in left])
        if outcome == "full":
            text = f"a tenant may have {limits.max_files} files of {limits.max_bytes} bytes together; delete some"
            raise ApiError(429, text, "rate_limit_error", code="storage_full", may_retry=False)
        return bool(outcome == "created")

    async def file(self, file_id: str) -> File | None:
        """Returns a file."""
        return (await self._load(File, "file_id", _file, [file_id]))[0]

    async def files(self, tenant: str) -> list[File]:
        """Returns the files of a tenant, the newest first."""
        ids = await self._redis.command("ZRANGE", tenant_keys(PREFIX, tenant, ["files"])[0], 0, -1)
        found = [file for file in await self._load(File, "file_id", _file, ids) if file is not None]
        return sorted(found, key=lambda file: (file.created, file.file_id), reverse=True)

    async def delete_file(self, file: File) -> bool:
        """Deletes a file. Returns whether there was one."""
        keys = [*_file_keys(file), PREFIX + "running"]
        return bool(await self._redis.call("delete", keys, file.file_id, 1000))

    async def create_batch(self, batch: Batch) -> bool:
        """Stores a batch, which runs from now on with its owner's lease. Returns whether it is new. Raises `ApiError`
        429 if the tenant has as many open ones as it may."""
        sealed = dataclasses.replace(batch, authorization=self._seal.close(batch.authorization), owner="")
        bounds = (MAX_BATCHES, UNBOUNDED, self._limits.max_open)
        arguments: list[str | int] = [batch.batch_id, self._running_ttl_ms, 0, *bounds, "1", batch.owner, LEASE_MS]
        outcome, *left = await self._redis.call("create", _batch_keys(batch), *arguments, *_pairs(sealed))
        await self._forget([key for old in left for key in (_batch(old), _segments(old))])
        if outcome != "created" and outcome != "exists":
            text = f"{self._limits.max_open} batches of this tenant are open, the most that may be"
            raise ApiError(429, text, "rate_limit_error", code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)
        return bool(outcome == "created")

    async def batch(self, batch_id: str) -> Batch | None:
        """Returns a batch."""
        return (await self._batches([batch_id]))[0]

    async def batches(self, tenant: str) -> list[Batch]:
        """Returns the batches of a tenant, the newest first."""
        return await self._of_tenant(tenant, "index")

    async def open_batches(self, tenant: str) -> list[Batch]:
        """Returns the batches of a tenant that have not ended, the newest first."""
        return await self._of_tenant(tenant, "live")

    async def segments(self, batch_id: str) -> dict[str, str]:
        """Returns the segments of a running batch."""
        found: dict[str, str] = {}
        cursor = "0"
        while True:
            cursor, rows = await self._redis.command("HSCAN", _segments(batch_id), cursor, "COUNT", 1000)
            found |= rows if isinstance(rows, dict) else dict(zip(rows[::2], rows[1::2], strict=True))
            if str(cursor) == "0":
                return found

    async def advance(
        self,
        batch: Batch,
        fields: Mapping[str, Any],
        segment: tuple[str, str] = ("", ""),
        num_segments: int = 0,
        *,
        has_ended: bool = False,
    ) -> bool:
        """Writes fields of a running batch, and a segment with its description, as the owner that the batch names,
        which knows of `num_segments` others. Returns False if that is not its owner any more, or there are more. If
        this raises, they may have been written, or may be later."""
        values = [str(part) for pair in fields.items() for part in pair]
        ttl_ms, ended = (self._ttl_ms, "1") if has_ended else (self._running_ttl_ms, "")
        arguments: list[str | int] = [batch.batch_id, ttl_ms, batch.owner, *segment, num_segments, ended, *values]
        return bool(await self._redis.call("advance", _batch_keys(batch), *arguments) == "written")

    async def owner(self, batch_id: str) -> str | None:
        """Returns the owner of a running batch."""
        (owner,) = await self._redis.command("HMGET", _batch(batch_id), "owner")
        return cast("str | None", owner)

    async def take(self, batch_id: str, owner: str, *, cancels: bool = False) -> Taken:
        """Becomes the owner of a running batch whose lease has lapsed, or with `cancels` of any."""
        keys = [_batch(batch_id), PREFIX + "running"]
        return cast(Taken, await self._redis.call("take", keys, batch_id, owner, LEASE_MS, "1" if cancels else ""))

    async def tend(self, owners: Mapping[str, str], *, gives_back: bool = False) -> tuple[list[str], list[str]]:
        """Renews the leases of running batches by their owners, or gives them back. Returns batches of anyone whose
        leases have lapsed, and those of `owners` that have another owner or none."""
        keys = [PREFIX + "running", *map(_batch, owners)]
        pairs = (part for pair in owners.items() for part in pair)
        found = await self._redis.call("tend", keys, 0 if gives_back else LEASE_MS, *pairs)
        middle = found.index("")
        return found[:middle], found[middle + 1 :]

    @property
    def _ttl_ms(self) -> int:
        return round(self._limits.ttl_s * 1000)

    @property
    def _running_ttl_ms(self) -> int:
        """A batch is there until it has expired, however long nothing is written of it."""
        return self._ttl_ms + LONGEST_RUN_MS

    async def _of_tenant(self, tenant: str, kind: str) -> list[Batch]:
        ids = await self._redis.command("ZRANGE", tenant_keys(PREFIX, tenant, [kind])[0], 0, -1)
        found = [batch for batch in await self._batches(ids) if batch is not None]
        return sorted(found, key=lambda batch: (batch.created, batch.batch_id), reverse=True)

    async def _batches(self, batch_ids: Sequence[str]) -> list[Batch | None]:
        found = await self._load(Batch, "batch_id", _batch, batch_ids)
        opened = (
            batch and dataclasses.replace(batch, authorization=self._seal.open(batch.authorization)) for batch in found
        )
        return list(opened)

    async def _load(self, kind: type[Record], id_name: str, key_of: Any, ids: Sequence[str]) -> list[Record | None]:
        fields = [field for field in dataclasses.fields(kind) if field.name != id_name]
        names = [field.name for field in fields]
        found: list[Record | None] = []
        for first in range(0, len(ids), LOADED_AT_ONCE):
            some = ids[first : first + LOADED_AT_ONCE]
            rows = await self._redis.call("load", [key_of(one) for one in some], *names)
            for record_id, row in zip(some, rows, strict=True):
                texts = dict(zip(names, row, strict=True))
                if texts["tenant"] is None:
                    found.append(None)
                    continue
                values: dict[str, Any] = {
                    field.name: int(text) if field.type == "int" else text
                    for field in fields
                    if (text := texts[field.name]) is not None
                }
                found.append(kind(**{id_name: record_id, **values}))
        return found

    async def _forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._redis.command("PEXPIRE", key, 0)


def _pairs(record: File | Batch) -> list[str]:
    """Returns the fields of a record that are not empty, and their values. Its id is in its key."""
    _, *fields = dataclasses.fields(record)
    values = {field.name: getattr(record, field.name) for field in fields}
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    return [str(part) for name, value in values.items() if value or name in required for part in (name, value)]


def _file(file_id: str) -> str:
    return f"{PREFIX}file:{file_id}"


def _batch(batch_id: str) -> str:
    return f"{PREFIX}batch:{batch_id}"


def _segments(batch_id: str) -> str:
    return f"{PREFIX}segments:{batch_id}"


def _file_keys(file: File) -> list[str]:
    """Returns record, log (a file has none), index, sizes and live."""
    own = [_file(file.file_id), f"{PREFIX}file-log:{file.file_id}"]
    return [*own, *tenant_keys(PREFIX, file.tenant, ("files", "file-sizes", "file-live"))]


def _batch_keys(batch: Batch) -> list[str]:
    """Returns record, segments, index, sizes, live and running."""
    own = [_batch(batch.batch_id), _segments(batch.batch_id)]
    return [*own, *tenant_keys(PREFIX, batch.tenant, ("index", "sizes", "live")), PREFIX + "running"]
