"""Objects of S3 and compatible stores: listed, read and written over HTTP with requests signed by AWS Signature
Version 4.

Credentials and place come from the variables of AWS's own tools. Without credentials requests are not signed, as public
buckets require.
"""

from __future__ import annotations

import hashlib
import hmac
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPResponse
from urllib.error import HTTPError
from xml.sax.saxutils import escape

TIMEOUT_S = 60.0
EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()
ALGORITHM = "AWS4-HMAC-SHA256"
DEFAULT_REGION = "us-east-1"
RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key, its secret, and the token of a temporary key."""

    key_id: str
    secret: str
    session_token: str = ""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket. `url` is its address without a slash at the end; without credentials requests are not signed."""

    url: str
    region: str
    credentials: Credentials | None

    @classmethod
    def of_environment(cls, name: str, environment: Mapping[str, str]) -> Bucket:
        """Returns the bucket with this name. `AWS_ENDPOINT_URL` names another store than AWS."""
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or DEFAULT_REGION
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        url = f"{endpoint.rstrip('/')}/{name}" if endpoint else f"https://{name}.s3.{region}.amazonaws.com"
        key_id, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
        if not key_id or not secret:
            return cls(url, region, None)
        return cls(url, region, Credentials(key_id, secret, environment.get("AWS_SESSION_TOKEN", "")))

    def objects(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yields key and size in bytes of every object whose key begins with `prefix`."""
        for text in self._listed(prefix):
            yield text("Key"), int(text("Size") or "0")

    def written(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """Yields key and time of the last write of every object whose key begins with `prefix`."""
        for text in self._listed(prefix):
            yield text("Key"), datetime.fromisoformat(text("LastModified"))

    def open(self, key: str, query: Mapping[str, str] | None = None) -> HTTPResponse:
        """Returns the response to a GET of an object, or of the bucket. Raises OSError where there is none."""
        return self._call("GET", key, query or {})

    def get(self, key: str, first: int, num_bytes: int) -> bytes:
        """Returns bytes `[first, first + num_bytes)` of an object, as far as there are. Raises OSError."""
        try:
            with self._call("GET", key, {}, headers={"range": f"bytes={first}-{first + num_bytes - 1}"}) as response:
                return response.read()
        except HTTPError as error:
            if error.code != RANGE_NOT_SATISFIABLE:
                raise
            error.close()
            return b""

    def put(self, key: str, content: bytes) -> None:
        """Writes an object. Raises OSError."""
        self._call("PUT", key, {}, content).close()

    def delete(self, key: str) -> None:
        """Deletes an object, if it is there. Raises OSError."""
        self._call("DELETE", key, {}).close()

    def begin_upload(self, key: str) -> str:
        """Begins an object that is written in parts. Returns the id of the upload. Raises OSError."""
        with self._call("POST", key, {"uploads": ""}) as response:
            return ET.parse(response).getroot().findtext("{*}UploadId", "")

    def put_part(self, key: str, upload: str, number: int, content: bytes) -> str:
        """Writes a part, of which the first has the number 1. Returns its tag. Raises OSError."""
        with self._call("PUT", key, {"partNumber": str(number), "uploadId": upload}, content) as response:
            return response.headers["ETag"] or ""

    def end_upload(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """Joins the parts, of which `tags` has the tags in order. Raises OSError."""
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        with self._call("POST", key, {"uploadId": upload}, body) as response:
            # S3 begins the response before it has joined them, so an error may have the status 200.
            if (root := ET.parse(response).getroot()).tag.rpartition("}")[2] == "Error":
                raise OSError(f"the parts were not joined: {root.findtext('{*}Code', '')}")

    def abort_upload(self, key: str, upload: str) -> None:
        """Deletes the parts of an upload. Raises OSError."""
        self._call("DELETE", key, {"uploadId": upload}).close()

    def _listed(self, prefix: str) -> Iterator[Callable[[str], str]]:
        """Yields of each object a function from the name of an element to its text."""
        query = {"list-type": "2", "prefix": prefix}
        while True:
            with self.open("", query) as response:
                page = ET.parse(response).getroot()
            for found in page.findall("{*}Contents"):
                yield lambda name, found=found: found.findtext(f"{{*}}{name}", "")  # type: ignore[misc]
            token = page.findtext("{*}NextContinuationToken")
            if not token:
                return
            query["continuation-token"] = token

    def _call(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HTTPResponse:
        text = canonical_query(query)
        url = f"{self.url}/{urllib.parse.quote(key, safe='/~')}" + (f"?{text}" if text else "")
        sent = dict(headers or {})
        if self.credentials is not None:
            digest = EMPTY_DIGEST if body is None else hashlib.sha256(body).hexdigest()
            sent |= signed(url, self.region, self.credentials, datetime.now(UTC), method, digest)
        if body is not None:
            sent["content-type"] = "application/octet-stream"
        request = urllib.request.Request(url, data=body, headers=sent, method=method)
        response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        return response


def canonical_query(query: Mapping[str, str]) -> str:
    """Returns a query in the order and encoding that the signature requires."""
    return "&".join(f"{key}={urllib.parse.quote(value, safe='~')}" for key, value in sorted(query.items()))


def signed(
    url: str, region: str, credentials: Credentials, now: datetime, method: str = "GET", digest: str = EMPTY_DIGEST
) -> dict[str, str]:
    """Returns the headers of a signed request of `url`, whose path and query are already encoded. `digest` is the
    SHA-256 of its body."""
    parts = urllib.parse.urlsplit(url)
    time = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": parts.netloc, "x-amz-content-sha256": digest, "x-amz-date": time}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = f"{method}\n{parts.path or '/'}\n{parts.query}\n{lines}\n{names}\n{digest}"
    scope = f"{time[:8]}/{region}/s3/aws4_request"
    text = f"{ALGORITHM}\n{time}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.digest(key, part.encode(), "sha256")
    authorization = f"{ALGORITHM} Credential={credentials.key_id}/{scope},SignedHeaders={names},Signature={key.hex()}"
    del headers["host"]  # urllib writes it
    return headers | {"authorization": authorization}
