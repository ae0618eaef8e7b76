"""Bodies of `multipart/form-data` (RFC 7578), read as they arrive: a form's fields, and the bytes of its one file.

No more of a body is held than a part's headers, a field, or what may be the beginning of a boundary.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from email.message import Message

from inflight.gateway.errors import ApiError

MAX_BOUNDARY_CHARACTERS = 70
MAX_HEADER_BYTES = 8192
MAX_FIELD_BYTES = 4096
MAX_FIELDS = 32


class Form:
    """A form that is being read. `fields` has those that have come, `filename` the name of the file when it has."""

    def __init__(self, content_type: str, body: AsyncIterator[bytes]) -> None:
        """Raises `ApiError` if the body is of another type."""
        self._delimiter = b"\r\n--" + _boundary(content_type)
        self._body = body
        # The first boundary follows no line end.
        self._rest = b"\r\n"
        self.fields: dict[str, str] = {}
        self.filename: str | None = None

    async def file(self) -> AsyncIterator[bytes]:
        """Yields the bytes of the part `file`, and reads the fields before and after it. Raises `ApiError` for a body
        that is no form with one file."""
        async for _ in self._until(self._delimiter):
            pass  # a preamble has no meaning
        while True:
            name, filename = await self._headers()
            if name is None:
                break
            if name == "file":
                if self.filename is not None:
                    raise _malformed("has several files")
                self.filename = filename or "file"
                async for data in self._until(self._delimiter):
                    yield data
            else:
                value = b""
                async for data in self._until(self._delimiter):
                    value += data
                    if len(value) > MAX_FIELD_BYTES:
                        raise _malformed(f"has a field of more than {MAX_FIELD_BYTES} bytes")
                if len(self.fields) >= MAX_FIELDS:
                    raise _malformed(f"has more than {MAX_FIELDS} fields")
                self.fields[name] = value.decode(errors="replace")
        if self.filename is None:
            text = "file: is required"
            raise ApiError(400, text, param="file", code="missing_required_parameter")

    async def _until(self, delimiter: bytes) -> AsyncIterator[bytes]:
        """Yields the bytes before a delimiter, and leaves what follows it to be read."""
        while (place := self._rest.find(delimiter)) < 0:
            safe = len(self._rest) - len(delimiter) + 1
            if safe > 0:
                yield self._rest[:safe]
                self._rest = self._rest[safe:]
            await self._more()
        if place:
            yield self._rest[:place]
        self._rest = self._rest[place + len(delimiter) :]

    async def _headers(self) -> tuple[str | None, str | None]:
        """Returns name and filename of the next part; None after the last one."""
        while len(self._rest) < 2:
            await self._more()
        if self._rest.startswith(b"--"):
            async for _ in self._body:
                pass  # what follows the form has no meaning
            return None, None
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            if len(self._rest) > MAX_HEADER_BYTES:
                raise _malformed("has a part without an end of its headers")
            await self._more()
        headers, self._rest = self._rest[:end], self._rest[end + 4 :]
        for line in headers.decode(errors="replace").split("\r\n"):
            key, _, value = line.partition(":")
            if key.strip().lower() == "content-disposition":
                return _named(value)
        raise _malformed("has a part without Content-Disposition")

    async def _more(self) -> None:
        try:
            self._rest += await anext(self._body)
        except StopAsyncIteration:
            raise _malformed("ends early") from None


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["content-type"] = content_type
    try:
        boundary = message.get_boundary()
    except ValueError:  # a parameter in an encoding that cannot be read
        raise _malformed("has a boundary that cannot be read") from None
    if message.get_content_type() != "multipart/form-data" or not boundary:
        raise ApiError(415, "the body must be multipart/form-data with a file", code="unsupported_media_type")
    if len(boundary) > MAX_BOUNDARY_CHARACTERS:
        raise _malformed(f"has a boundary of more than {MAX_BOUNDARY_CHARACTERS} characters")
    return boundary.encode()


def _named(disposition: str) -> tuple[str, str | None]:
    message = Message()
    message["content-disposition"] = disposition.strip()
    name = message.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise _malformed("has a part without a name")
    try:
        return name, message.get_filename()
    except ValueError:  # as a boundary
        raise _malformed("has a filename that cannot be read") from None


def _malformed(text: str) -> ApiError:
    return ApiError(400, f"the form {text}", code="invalid_form")
