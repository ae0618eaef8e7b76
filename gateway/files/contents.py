"""Contents of files: where they are kept, and how they are read in blocks and lines.

A content has a name, is written once as a whole, and is never changed. Every gateway of a store has the same contents.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from inflight.gateway.errors import ApiError

BLOCK_BYTES = 1024 * 1024
RETRY_AFTER_S = 1.0


class Contents(Protocol):
    """A place for contents. Names have parts of letters, digits, `_`, `-` and `.`, with `/` between them.

    Every method raises `ApiError` 503 if the place does not answer, or is full.
    """

    async def write(self, name: str, parts: AsyncIterator[bytes]) -> int:
        """Writes a content, in place of one with this name. It is there when this returns, and nothing is if this
        raises. Returns its bytes."""

    async def read(self, name: str, first: int, num_bytes: int) -> bytes:
        """Returns bytes `[first, first + num_bytes)`, as far as there are. Raises `ApiError` 410 if there is no such
        content."""

    async def delete(self, name: str) -> None:
        """Deletes a content, if it is there."""

    async def delete_older(self, before_s: float) -> int:
        """Deletes the contents, and what is left of interrupted writes, that were last written before a time in seconds
        since 1970. Returns their number."""


def file_name(file_id: str) -> str:
    """Returns the name of the content of a file."""
    return f"files/{file_id}"


def segment_name(batch_id: str, segment: str) -> str:
    """Returns the name of the content of a segment of a batch's results."""
    return f"segments/{batch_id}/{segment}"


async def blocks(contents: Contents, name: str, first: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
    """Yields bytes `[first, end)` of a content in blocks."""
    while end is None or first < end:
        block = await contents.read(name, first, BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - first))
        if not block:
            return
        yield block
        first += len(block)


async def lines(contents: Contents, name: str, max_bytes: int) -> AsyncGenerator[tuple[int, bytes | None], None]:
    """Yields the lines of a content that are not blank, each with its number from 1 on; None for a line of more than
    `max_bytes`. A byte order mark before the first one is skipped, as Windows' editors write it."""
    number, rest, is_too_long = 1, b"", False
    async for block in blocks(contents, name):
        *complete, last = block.split(b"\n")
        for part in complete:
            line = _without_mark(rest + part, number)
            if is_too_long or len(line) > max_bytes:
                yield number, None
            elif line.strip():
                yield number, line
            number, rest, is_too_long = number + 1, b"", False
        rest += last
        if len(rest) > max_bytes:
            rest, is_too_long = b"", True
    if is_too_long:
        yield number, None
    elif (line := _without_mark(rest, number)).strip():
        yield number, line


def _without_mark(line: bytes, number: int) -> bytes:
    return line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def lost() -> ApiError:
    """Returns the error for a content that is not there."""
    return ApiError(410, "the content of the file is lost", code="content_lost", may_retry=False)


def unavailable() -> ApiError:
    """Returns the error of a place that does not answer, or is full."""
    text = "the storage of files does not answer, or is full"
    return ApiError(503, text, "server_error", code="unavailable", retry_after_s=RETRY_AFTER_S)
