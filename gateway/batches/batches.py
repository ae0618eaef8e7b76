"""The batches of a gateway: creating, listing and cancelling them, and driving those that have a lease here.

A batch is its tenant's: to any other caller it does not exist.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from inflight import AsyncClient
from inflight.gateway.batches.bodies import COMPLETION_WINDOW_S, batch_object, parse_batch
from inflight.gateway.batches.driver import Driver, DriverLimits, NotOwnedError
from inflight.gateway.batches.running import RunningLines
from inflight.gateway.conversion import defaults_of
from inflight.gateway.errors import ApiError, refused
from inflight.gateway.files.bucket import Bucket
from inflight.gateway.files.contents import Contents
from inflight.gateway.files.files import PURPOSE, Files, page_of
from inflight.gateway.files.folder import Folder
from inflight.gateway.metrics import Metrics
from inflight.gateway.settings import FILES_BUCKET, GatewaySettings
from inflight.gateway.store.batches import Batch, BatchLimits, BatchStore
from inflight.gateway.store.leases import Leases
from inflight.gateway.store.tenants import tenant_of
from inflight.tools.fetching.s3 import Bucket as S3Bucket

log = logging.getLogger(__name__)

DEFAULT_LISTED = 20
MAX_LISTED = 100
MAX_BACKOFF_S = 10.0
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


class Batches:
    """Every method raises `ApiError`. `metadata` is that of the caller's calls of routers."""

    def __init__(
        self,
        client: AsyncClient,
        store: BatchStore,
        contents: Contents,
        settings: GatewaySettings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is the time of day in seconds."""
        self.files = Files(client, store, contents, settings.files_max_file_bytes, settings.files_ttl_s, clock)
        self.leases = Leases(store, self._run, settings.max_requests)
        self._client = client
        self._store = store
        self._contents = contents
        self._metrics = metrics
        self._limits = DriverLimits(settings.batch_max_lines, settings.max_body_bytes, clock)
        self._running = RunningLines(
            client, defaults_of(settings), metrics, settings.batch_max_running, settings.batch_max_running_each
        )

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Drives batches during the block. Those that have not ended then are given back."""
        sweeping = asyncio.create_task(self.files.sweep())
        try:
            async with self.leases.running():
                yield
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)

    async def create(self, raw: bytes, metadata: Mapping[str, str], key: str) -> dict[str, Any]:
        """Creates a batch. With an idempotency key a repeat returns the first one."""
        self.leases.check_room()
        body = parse_batch(raw)
        output_ttl_s = self.files.seconds_kept(body.output_ttl_s)
        file = await self.files.own(body.input_file_id, metadata, "input_file_id")
        if file.purpose != PURPOSE:
            raise refused("input_file_id", f"the file has the purpose {file.purpose}; it must have {PURPOSE}")
        name = hashlib.sha256(f"{file.tenant}\0{key}".encode()).hexdigest()[:24] if key else secrets.token_hex(12)
        created = self._limits.now()
        batch = Batch(
            batch_id=f"batch_{name}",
            tenant=file.tenant,
            endpoint=body.endpoint,
            input_file_id=file.file_id,
            created=created,
            expires=created + COMPLETION_WINDOW_S,
            metadata=json.dumps(body.metadata) if body.metadata else "",
            output_ttl_s=output_ttl_s,
            authorization=metadata.get("authorization", ""),
            owner=self.leases.new_owner(),
        )
        if await self._store.create_batch(batch):
            self.leases.drive(batch.batch_id, batch.owner, self._run(batch.batch_id, batch.owner))
            return batch_object(batch)
        earlier = await self._own(batch.batch_id, metadata)
        if (earlier.input_file_id, earlier.endpoint) != (batch.input_file_id, batch.endpoint):
            raise ApiError(422, "Idempotency-Key: is that of another batch", code="idempotency_key_reused")
        return batch_object(earlier)

    async def retrieve(self, batch_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Returns a batch as it is now."""
        return batch_object(await self._own(batch_id, metadata))

    async def page(self, query: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, Any]:
        """Returns a page of the caller's batches, the newest first."""
        found = await self._store.batches(await tenant_of(self._client, metadata, "after"))
        return page_of([batch_object(batch) for batch in found], query, DEFAULT_LISTED, MAX_LISTED)

    async def cancel(self, batch_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Cancels a batch. It is `cancelled` when its files have the results that it has."""
        batch = await self._own(batch_id, metadata)
        if batch.status == "cancelling":
            return batch_object(batch)
        if batch.status in ENDED or batch.outcome:
            text = f"the batch is {batch.status}; it cannot be cancelled any more"
            raise ApiError(409, text, code="batch_ended", may_retry=False)
        self.leases.check_room()
        owner = self.leases.new_owner()
        if await self._store.take(batch_id, owner, cancels=True) == "taken":
            fields = {"status": "cancelling", "cancelling_at": self._limits.now()}
            await self._store.advance(replace(batch, owner=owner), fields)
            self.leases.drive(batch_id, owner, self._run(batch_id, owner))
        return batch_object(await self._own(batch_id, metadata))

    async def _own(self, batch_id: str, metadata: Mapping[str, str]) -> Batch:
        tenant = await tenant_of(self._client, metadata, "batch_id")
        batch = await self._store.batch(batch_id)
        if batch is None or batch.tenant != tenant:
            raise ApiError(404, f"there is no batch {batch_id[:100]!r}", code="batch_not_found")
        return batch

    async def _run(self, batch_id: str, owner: str) -> None:
        """Drives a batch to its end. What goes wrong ends this task only; another gateway goes on then."""
        number = 0
        while True:
            try:
                batch = await self._store.batch(batch_id)
                if batch is None or batch.owner != owner:
                    return
                await self._driver(batch).run()
            except NotOwnedError:
                log.debug("%s was cancelled, or has another owner", batch_id)
                return
            except ApiError as error:
                number += 1
                log.info("%s: %s; again", batch_id, error)
                await asyncio.sleep(min(MAX_BACKOFF_S, 0.1 * 2 ** min(number, 7)))
            except Exception:
                log.exception("%s cannot be driven", batch_id)
                return
            else:
                log.info("%s has ended", batch_id)
                return

    def _driver(self, batch: Batch) -> Driver:
        return Driver(batch, self._client, self._store, self._contents, self._running, self._metrics, self._limits)


def open_contents(place: str) -> Contents:
    """Returns the contents of a setting: those of a folder, or of a bucket `s3://NAME/PREFIX`."""
    if (bucket := FILES_BUCKET.fullmatch(place)) is None:
        return Folder(Path(place))
    return Bucket(S3Bucket.of_environment(bucket[1], os.environ), bucket[2] or "")


@asynccontextmanager
async def open_batches(
    client: AsyncClient, settings: GatewaySettings, metrics: Metrics, clock: Callable[[], float] = time.time
) -> AsyncGenerator[Batches | None, None]:
    """The files and batches of a gateway during the block; None if it has no place for files."""
    if not settings.files:
        yield None
        return
    assert settings.store_url is not None  # the settings are validated
    limits = BatchLimits(
        settings.files_ttl_s, settings.files_max_files, settings.files_max_bytes, settings.batch_max_open
    )
    secret = None if settings.store_secret is None else settings.store_secret.get_secret_value()
    store = BatchStore(settings.store_url.get_secret_value(), limits, secret)
    try:
        batches = Batches(client, store, open_contents(settings.files), settings, metrics, clock)
        async with batches.running():
            yield batches
    finally:
        await store.close()
