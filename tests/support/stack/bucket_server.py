"""A server of one bucket with S3's API: it checks the signature of every request as AWS documents it, and keeps objects
in memory."""

from __future__ import annotations

import hashlib
import hmac
import http.server
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from inflight.tools.fetching.s3 import Bucket, Credentials

REGION = "eu-test-1"
CREDENTIALS = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>\w+)/(?P<scope>[\w/-]+), ?SignedHeaders=(?P<names>[\w;-]+), ?"
    r"Signature=(?P<signature>[0-9a-f]{64})"
)
MAX_LISTED = 2


class BucketServer(http.server.ThreadingHTTPServer):
    """The bucket `bucket`. `objects` has contents with the times of their writes, in seconds since 1970."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        # So many requests are answered with 503 first.
        self.num_failing = 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def bucket(self) -> Bucket:
        """The client of it."""
        return Bucket(f"{self.url}/bucket", REGION, CREDENTIALS)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of AWS's tools for it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": CREDENTIALS.key_id,
            "AWS_SECRET_ACCESS_KEY": CREDENTIALS.secret,
        }


@contextmanager
def serving_bucket() -> Iterator[BucketServer]:
    """The server, while it serves."""
    with BucketServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Request(http.server.BaseHTTPRequestHandler):
    server: BucketServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_PUT = do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        with self.server.lock:
            if self.server.num_failing:
                self.server.num_failing -= 1
                self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
            elif not self._is_signed(body):
                self._answer(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
            else:
                parts = urllib.parse.urlsplit(self.path)
                key = urllib.parse.unquote(parts.path).removeprefix("/bucket/")
                query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
                getattr(self, f"_{self.command.lower()}")(key, query, body)

    def _is_signed(self, body: bytes) -> bool:
        """Whether the signature is that of the request, put together once more from what arrived."""
        found = AUTHORIZATION.fullmatch(self.headers.get("authorization", ""))
        digest = hashlib.sha256(body).hexdigest()
        if found is None or found["key"] != CREDENTIALS.key_id or self.headers["x-amz-content-sha256"] != digest:
            return False
        parts = urllib.parse.urlsplit(self.path)
        pairs = urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
        quoted = sorted((urllib.parse.quote(a, safe="-_.~"), urllib.parse.quote(b, safe="-_.~")) for a, b in pairs)
        names = found["names"].split(";")
        if not {"host", "x-amz-content-sha256", "x-amz-date"} <= set(names) or names != sorted(names):
            return False
        request = "\n".join(
            (
                *(self.command, parts.path, "&".join(f"{a}={b}" for a, b in quoted)),
                *(f"{name}:{' '.join((self.headers[name] or '').split())}" for name in names),
                *("", found["names"], digest),
            )
        )
        date = self.headers["x-amz-date"]
        if found["scope"] != f"{date[:8]}/{REGION}/s3/aws4_request":
            return False
        digest = hashlib.sha256(request.encode()).hexdigest()
        key = ("AWS4" + CREDENTIALS.secret).encode()
        for part in found["scope"].split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        text = f"AWS4-HMAC-SHA256\n{date}\n{found['scope']}\n{digest}"
        return hmac.compare_digest(hmac.new(key, text.encode(), hashlib.sha256).hexdigest(), found["signature"])

    def _get(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "list-type" in query:
            self._answer(200, self._page(query))
            return
        if key not in self.server.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        content = self.server.objects[key][0]
        if (asked := self.headers.get("range")) is None:
            self._answer(200, content)
            return
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        if first >= len(content):
            self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
        else:
            self._answer(206, content[first : last + 1])

    def _put(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.server.objects[key] = body, time.time()
        self._answer(200, b"", ETag=f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"')

    def _post(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            upload = f"upload-{len(self.server.uploads)}"
            self.server.uploads[upload] = {}
            self._answer(200, _element("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>"))
            return
        parts = self.server.uploads.pop(query["uploadId"])
        tags = [f'"{hashlib.md5(parts[n], usedforsecurity=False).hexdigest()}"' for n in sorted(parts)]
        if re.findall(r"<ETag>(.*?)</ETag>", body.decode().replace("&quot;", '"')) != tags:
            self._answer(200, b"<Error><Code>InvalidPart</Code></Error>")
            return
        self.server.objects[key] = b"".join(parts[number] for number in sorted(parts)), time.time()
        self._answer(200, _element("CompleteMultipartUploadResult", ""))

    def _delete(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"], None)
        else:
            self.server.objects.pop(key, None)
        self._answer(204, b"")

    def _page(self, query: dict[str, str]) -> bytes:
        keys = sorted(key for key in self.server.objects if key.startswith(query["prefix"]))
        after = query.get("continuation-token", "")
        keys = [key for key in keys if key > after]
        contents = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(self.server.objects[key][0])}</Size>"
            f"<LastModified>{datetime.fromtimestamp(self.server.objects[key][1], UTC):%Y-%m-%dT%H:%M:%S.000Z}"
            f"</LastModified></Contents>"
            for key in keys[:MAX_LISTED]
        )
        more = (
            f"<NextContinuationToken>{keys[MAX_LISTED - 1]}</NextContinuationToken>" if len(keys) > MAX_LISTED else ""
        )
        return _element("ListBucketResult", contents + more)

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status != 204:
            self.wfile.write(body)


def _element(name: str, content: str) -> bytes:
    return f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{name}>'.encode()
