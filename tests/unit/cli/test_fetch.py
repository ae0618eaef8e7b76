"""`inflight fetch`: a model from S3 or the hub, complete or absent, with a digest."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from inflight.cli.deploy.fetch import ORIGIN, digest_of
from inflight.cli.main import main
from inflight.tools.fetching.s3 import Credentials, canonical_query, signed

FILES = {"config.json": b"{}", "model.safetensors": bytes(100), "tokenizer.json": b"[]", "notes.md": b"not needed"}
COMMIT = "0" * 40


class Store(http.server.ThreadingHTTPServer):
    """A bucket `bucket` with the model below `models/m/`, and a hub with `org/m`. Pages of two objects."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files = dict(FILES)
        self.requests: list[tuple[str, str]] = []
        self.cut = ""  # this file's answer ends early
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answers(http.server.BaseHTTPRequestHandler):
    server: Store

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        self.server.requests.append((parts.path, self.headers.get("authorization", "")))
        name = parts.path.rpartition("/")[2]
        if parts.path == "/bucket/":
            self._answer(self._page(dict(urllib.parse.parse_qsl(parts.query))))
        elif parts.path.startswith("/api/models/org/m/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(content), "oid": str(len(content))}
                for name, content in self.server.files.items()
            ]
            self._answer(json.dumps(files).encode())
        elif parts.path.startswith("/api/models/org/m"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._answer(json.dumps({"id": "org/m", "sha": COMMIT, "siblings": siblings}).encode())
        elif name in self.server.files:
            content = self.server.files[name]
            self._answer(content, len(content) - 1 if name == self.server.cut else len(content))
        else:
            self.send_error(404)

    def _page(self, query: dict[str, str]) -> bytes:
        names = sorted(self.server.files)
        first = int(query.get("continuation-token", "0"))
        contents = "".join(
            f"<Contents><Key>{query['prefix']}{name}</Key><Size>{len(self.server.files[name])}</Size></Contents>"
            for name in names[first : first + 2]
        )
        more = f"<NextContinuationToken>{first + 2}</NextContinuationToken>" if first + 2 < len(names) else ""
        space = "http://s3.amazonaws.com/doc/2006-03-01/"
        return f'<ListBucketResult xmlns="{space}">{contents}{more}</ListBucketResult>'.encode()

    def _answer(self, content: bytes, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.send_header("ETag", f'"{len(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:length])

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with Store() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def fetched(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ORIGIN}


WANTED = {name: content for name, content in FILES.items() if name != "notes.md"}


def test_bucket_is_listed_in_pages_and_downloaded_once(store: Store, tmp_path: Path) -> None:
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "m"))) == 0
    assert fetched(tmp_path / "m") == WANTED
    num_requests = len(store.requests)
    assert all(not authorization for _, authorization in store.requests)
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "m"))) == 0
    assert len(store.requests) == num_requests


def test_folder_of_another_source_is_not_taken_for_this_one(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "m"))) == 0
    assert main(("fetch", "hf://org/m@v2", str(tmp_path / "m"))) == 1
    assert "came from s3://bucket/models/m" in capsys.readouterr().err
    # Nor is a part of another download
    store.cut = "model.safetensors"
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "n"))) == 1
    store.cut = ""
    store.requests.clear()
    assert main(("fetch", "s3://bucket/models/v2", str(tmp_path / "n"))) == 0
    assert [path for path, _ in store.requests if path.endswith("config.json")]


def test_interrupted_download_leaves_no_folder_and_continues(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.cut = "model.safetensors"
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "m"))) == 1
    assert "99 of 100 bytes" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
    store.cut = ""
    store.requests.clear()
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "m"))) == 0
    assert fetched(tmp_path / "m") == WANTED
    assert not [path for path, _ in store.requests if path.endswith("config.json")]


def test_another_digest_is_refused(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "m"), "--sha256", "0" * 64)) == 1
    assert not (tmp_path / "m").exists()
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "first"))) == 0
    digest = capsys.readouterr().out.split()[-1]
    assert digest == digest_of(tmp_path / "first")
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "m"), "--sha256", digest)) == 0
    # And a folder that was changed later is found
    (tmp_path / "m" / "config.json").write_bytes(b"{ }")
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "m"), "--sha256", digest)) == 1


def test_what_is_no_model_is_refused(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del store.files["config.json"]
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "m"))) == 1
    assert "config.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    for source in ("/models/m", "s3://bucket", "hf://m", "https://example.org/m"):
        assert main(("fetch", source, str(tmp_path / "m"))) == 2


def test_keys_that_lead_out_of_the_folder_are_refused(store: Store, tmp_path: Path) -> None:
    store.files = {"../config.json": b"{}"}
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "sub" / "m"))) == 1
    assert not (tmp_path / "sub" / "config.json").exists()


def test_requests_are_signed_with_credentials(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert main(("fetch", "s3://bucket/models/m", str(tmp_path / "m"))) == 0
    assert all("Credential=AKIAIOSFODNN7EXAMPLE/" in authorization for _, authorization in store.requests)


def test_signature_is_that_of_amazons_example() -> None:
    # "GET Bucket (List Objects)" in Amazon S3's API reference, "Using the Authorization Header"
    url = f"https://examplebucket.s3.amazonaws.com/?{canonical_query({'prefix': 'J', 'max-keys': '2'})}"
    credentials = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    headers = signed(url, "us-east-1", credentials, datetime(2013, 5, 24, tzinfo=UTC))
    assert headers["authorization"].endswith(
        "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    )


def test_hub_is_read_at_the_revision(store: Store, tmp_path: Path) -> None:
    # In a process of its own: the library reads its variables when it is imported
    variables = {"HF_ENDPOINT": store.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "inflight.cli.main", "fetch", "hf://org/m@main", str(tmp_path / "m")]
    ran = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert fetched(tmp_path / "m") == WANTED
    assert any("/revision/main" in path for path, _ in store.requests)
