"""The files of a gateway: uploading, listing, reading and deleting them.

A file is its tenant's: to any other caller it does not exist. Its record is in Redis, its content elsewhere. A content
whose record is gone, or whose write was interrupted, is deleted when it is old enough.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from inflight import AsyncClient
from inflight.gateway.errors import ApiError, refused
from inflight.gateway.files.contents import Contents, blocks, file_name
from inflight.gateway.files.multipart import Form
from inflight.gateway.store.batches import BatchStore, File
from inflight.gateway.store.tenants import tenant_of

log = logging.getLogger(__name__)

PURPOSE = "batch"
RESULT_PURPOSE = "batch_output"
MAX_FILENAME_CHARACTERS = 255
# OpenAI's bounds of `expires_after`.
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 2_592_000
MAX_LISTED = 10_000
SWEEP_S = 3600.0
# Longer than a batch runs, whose segments no record names.
SWEPT_AFTER_S = 2 * 86_400
_NUMBER = re.compile(r"\d{1,9}")


class Files:
    """Every method raises `ApiError`. `metadata` is that of the caller's calls of routers."""

    def __init__(
        self,
        client: AsyncClient,
        store: BatchStore,
        contents: Contents,
        max_file_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Files are kept for `ttl_s` seconds. `clock` is the time of day in seconds."""
        self._client = client
        self._store = store
        self._contents = contents
        self._max_file_bytes = max_file_bytes
        self._ttl_s = ttl_s
        self._clock = clock

    async def upload(
        self, content_type: str, body: AsyncIterator[bytes], metadata: Mapping[str, str]
    ) -> dict[str, Any]:
        """Stores the file of a form."""
        tenant = await tenant_of(self._client, metadata, "file")
        form = Form(content_type, body)
        file_id = f"file-{secrets.token_hex(12)}"
        num_bytes = await self._contents.write(file_name(file_id), self._bounded(form.file()))
        try:
            created = int(self._clock())
            expires = created + self.seconds_kept(_expires_after(form.fields))
            purpose = _purpose(form.fields)
            filename = (form.filename or "")[:MAX_FILENAME_CHARACTERS]
            file = File(file_id, tenant, filename, purpose, num_bytes, created, expires)
            await self._store.create_file(file)
        except ApiError:
            await self._contents.delete(file_name(file_id))
            raise
        return file_object(file)

    async def page(self, query: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, Any]:
        """Returns a page of the caller's files."""
        found = await self._store.files(await tenant_of(self._client, metadata, "after"))
        purpose, order = query.get("purpose"), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise refused("order", "must be asc or desc")
        shown = [file_object(file) for file in found if purpose is None or file.purpose == purpose]
        return page_of(shown if order == "desc" else shown[::-1], query, MAX_LISTED, MAX_LISTED)

    async def own(self, file_id: str, metadata: Mapping[str, str], param: str | None = None) -> File:
        """Returns a file of the caller."""
        tenant = await tenant_of(self._client, metadata, param or "file_id")
        file = await self._store.file(file_id)
        if file is None or file.tenant != tenant:
            raise ApiError(404, f"there is no file {file_id[:100]!r}", param=param, code="file_not_found")
        return file

    async def retrieve(self, file_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Returns a file without its content."""
        return file_object(await self.own(file_id, metadata))

    async def content(self, file_id: str, metadata: Mapping[str, str]) -> tuple[int, AsyncIterator[bytes]]:
        """Returns the bytes of a file's content, and the content in blocks."""
        file = await self.own(file_id, metadata)
        name = file_name(file_id)
        await self._contents.read(name, 0, 0)  # raises before anything is sent
        return file.num_bytes, blocks(self._contents, name, 0, file.num_bytes)

    async def delete(self, file_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Deletes a file, unless a batch that has not ended reads it."""
        file = await self.own(file_id, metadata)
        for batch in await self._store.open_batches(file.tenant):
            if batch.input_file_id == file_id:
                text = f"{batch.batch_id} reads the file; cancel it, or wait for its end"
                raise ApiError(409, text, code="file_in_use", may_retry=False)
        await self._store.delete_file(file)
        await self._contents.delete(file_name(file_id))
        return {"id": file_id, "object": "file", "deleted": True}

    def seconds_kept(self, asked: int | None) -> int:
        """Returns how long a file is kept whose client asks for so many seconds."""
        return round(self._ttl_s if asked is None else min(asked, self._ttl_s))

    async def sweep(self) -> None:
        """Deletes contents that are old, now and once an hour, until it is cancelled."""
        while True:
            try:
                num_deleted = await self._contents.delete_older(self._clock() - self._ttl_s - SWEPT_AFTER_S)
            except ApiError as error:
                log.warning("old files were not deleted: %s", error)
            else:
                if num_deleted:
                    log.info("%d old files were deleted", num_deleted)
            await asyncio.sleep(SWEEP_S)

    async def _bounded(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in parts:
            num_bytes += len(part)
            if num_bytes > self._max_file_bytes:
                text = f"file: has more than {self._max_file_bytes} bytes"
                raise ApiError(413, text, param="file", code="file_too_large", may_retry=False)
            yield part


def file_object(file: File) -> dict[str, Any]:
    """Returns a file in OpenAI's form."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created,
        "expires_at": file.expires,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def page_of(shown: list[dict[str, Any]], query: Mapping[str, str], default: int, most: int) -> dict[str, Any]:
    """Returns the page of a list that `after` and `limit` select. Raises `ApiError`."""
    limit, after = query.get("limit", str(default)), query.get("after")
    if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= most:
        raise refused("limit", f"must be from 1 to {most}")
    if after is not None:
        place = next((number for number, one in enumerate(shown) if one["id"] == after), None)
        if place is None:
            raise refused("after", "must be the id of an element of the list")
        shown = shown[place + 1 :]
    page = shown[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(shown) > len(page)}


def check_expiry(anchor: object, seconds: int, param: str) -> int:
    """Returns the seconds of an `expires_after`. Raises `ApiError`."""
    if anchor != "created_at":
        raise refused(f"{param}.anchor", "must be created_at")
    if not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise refused(f"{param}.seconds", f"must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}")
    return seconds


def _purpose(fields: Mapping[str, str]) -> str:
    purpose = fields.get("purpose")
    if purpose is None:
        raise ApiError(400, "purpose: is required", param="purpose", code="missing_required_parameter")
    if purpose != PURPOSE:
        raise refused("purpose", f"must be {PURPOSE}, the only purpose that is served")
    if unknown := fields.keys() - {"purpose", "expires_after[anchor]", "expires_after[seconds]"}:
        name = min(unknown)[:100]
        raise refused(name, "is not a parameter of this route", "unknown_parameter")
    return purpose


def _expires_after(fields: Mapping[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if seconds is None or not _NUMBER.fullmatch(seconds):
        raise refused("expires_after.seconds", "must be a whole number")
    return check_expiry(anchor, int(seconds), "expires_after")
