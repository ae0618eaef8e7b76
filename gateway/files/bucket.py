"""Contents in a bucket of S3, or of a store with the same API.

A small content is written by one request, a larger one in parts that the store joins at the end. Requests are signed by
the client of `inflight fetch`, and run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import urllib.error
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from http.client import HTTPException
from typing import TypeVar

from inflight.gateway.files.contents import lost, unavailable
from inflight.tools.fetching.s3 import Bucket as S3Bucket

log = logging.getLogger(__name__)

# S3 takes parts of at least 5 MiB, and at most 10,000 of them.
PART_BYTES = 16 * 1024 * 1024
TRIES = 3
BACKOFF_S = 0.2
NOT_FOUND = 404

Result = TypeVar("Result")


class Bucket:
    """The `Contents` of a bucket, below a prefix."""

    def __init__(self, bucket: S3Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""

    async def write(self, name: str, parts: AsyncIterator[bytes]) -> int:
        """Writes a content."""
        key, waiting, num_bytes = self._prefix + name, bytearray(), 0
        upload, tags = "", list[str]()
        try:
            async for part in parts:
                num_bytes += len(part)
                waiting += part
                while len(waiting) >= PART_BYTES:
                    if not upload:
                        upload = await _done(lambda: self._bucket.begin_upload(key))
                    tags.append(await self._write_part(key, upload, len(tags) + 1, bytes(waiting[:PART_BYTES])))
                    del waiting[:PART_BYTES]
            if not upload:
                await _done(lambda: self._bucket.put(key, bytes(waiting)))
                return num_bytes
            if waiting:
                tags.append(await self._write_part(key, upload, len(tags) + 1, bytes(waiting)))
            await _done(lambda: self._bucket.end_upload(key, upload, tags))
        except BaseException:
            if upload:
                with contextlib.suppress(Exception):
                    await _done(lambda: self._bucket.abort_upload(key, upload))
            raise
        return num_bytes

    async def read(self, name: str, first: int, num_bytes: int) -> bytes:
        """Returns bytes of a content."""
        key = self._prefix + name
        # A range of no bytes cannot be asked for.
        content = await _done(lambda: self._bucket.get(key, first, max(1, num_bytes)))
        return content[:num_bytes]

    async def delete(self, name: str) -> None:
        """Deletes a content."""
        await _done(lambda: self._bucket.delete(self._prefix + name))

    async def delete_older(self, before_s: float) -> int:
        """Deletes contents by the times of their objects. Uploads that were interrupted are the bucket's lifecycle rule
        to delete."""
        before = datetime.fromtimestamp(before_s, UTC)

        def delete() -> int:
            old = [key for key, written in self._bucket.written(self._prefix) if written < before]
            for key in old:
                self._bucket.delete(key)
            return len(old)

        return await _done(delete)

    async def _write_part(self, key: str, upload: str, number: int, content: bytes) -> str:
        return await _done(lambda: self._bucket.put_part(key, upload, number, content))


async def _done(call: Callable[[], Result]) -> Result:
    """Makes a call in a thread, which may be repeated. It has ended when this returns, also if the caller is
    cancelled."""
    for number in range(1, TRIES + 1):
        calling = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            await asyncio.wait((calling,))
            raise
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == NOT_FOUND:
                raise lost() from None
            if error.code < 500 or number == TRIES:
                log.error("the bucket of files: status %d", error.code)
                raise unavailable() from error
        except (OSError, HTTPException) as error:
            if number == TRIES:
                log.error("the bucket of files: %s", error)
                raise unavailable() from error
        await asyncio.sleep(BACKOFF_S * 2**number)
    raise AssertionError("the last try returns or raises")
