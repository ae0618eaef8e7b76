"""Objects of S3 and compatible stores: listed, and read over HTTP with requests signed by AWS Signature Version 4.

Credentials and place come from the variables of AWS's own tools. Without credentials requests are not signed, as public
buckets require.
"""

from __future__ import annotations

import hashlib
import hmac
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPResponse

TIMEOUT_S = 60.0
EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()
ALGORITHM = "AWS4-HMAC-SHA256"
DEFAULT_REGION = "us-east-1"


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
        query = {"list-type": "2", "prefix": prefix}
        while True:
            with self.open("", query) as response:
                page = ET.parse(response).getroot()
            space = page.tag.removesuffix("ListBucketResult")
            for found in page.findall(f"{space}Contents"):
                yield found.findtext(f"{space}Key", ""), int(found.findtext(f"{space}Size", "0"))
            token = page.findtext(f"{space}NextContinuationToken")
            if not token:
                return
            query["continuation-token"] = token

    def open(self, key: str, query: Mapping[str, str] | None = None) -> HTTPResponse:
        """Returns the response to a GET of an object, or of the bucket. Raises OSError where there is none."""
        text = canonical_query(query or {})
        url = f"{self.url}/{urllib.parse.quote(key, safe='/~')}" + (f"?{text}" if text else "")
        headers = {} if self.credentials is None else signed(url, self.region, self.credentials, datetime.now(UTC))
        response: HTTPResponse = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
        return response


def canonical_query(query: Mapping[str, str]) -> str:
    """Returns a query in the order and encoding that the signature requires."""
    return "&".join(f"{key}={urllib.parse.quote(value, safe='~')}" for key, value in sorted(query.items()))


def signed(url: str, region: str, credentials: Credentials, now: datetime) -> dict[str, str]:
    """Returns the headers of a signed GET of `url`, whose path and query are already encoded."""
    parts = urllib.parse.urlsplit(url)
    time = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": parts.netloc, "x-amz-content-sha256": EMPTY_DIGEST, "x-amz-date": time}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = f"GET\n{parts.path or '/'}\n{parts.query}\n{lines}\n{names}\n{EMPTY_DIGEST}"
    scope = f"{time[:8]}/{region}/s3/aws4_request"
    text = f"{ALGORITHM}\n{time}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.digest(key, part.encode(), "sha256")
    authorization = f"{ALGORITHM} Credential={credentials.key_id}/{scope},SignedHeaders={names},Signature={key.hex()}"
    del headers["host"]  # urllib writes it
    return headers | {"authorization": authorization}
