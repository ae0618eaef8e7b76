"""Contents of files, in a folder and in a bucket: written whole or not at all, read in blocks and lines, swept."""

from __future__ import annotations

import os
import time
import urllib.error
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.gateway.errors import ApiError
from inflight.gateway.files import contents as contents_module
from inflight.gateway.files.bucket import PART_BYTES, Bucket
from inflight.gateway.files.contents import Contents, blocks, lines
from inflight.gateway.files.folder import Folder
from inflight.gateway.files.multipart import Form
from inflight.tools.fetching.s3 import Credentials
from tests.support.stack.bucket_server import BucketServer, serving_bucket

NAME = "files/file-1"


@pytest.fixture
def server() -> Iterator[BucketServer]:
    with serving_bucket() as running:
        yield running


@pytest.fixture(params=["folder", "bucket"])
def contents(request: pytest.FixtureRequest, tmp_path: Path, server: BucketServer) -> Contents:
    """Each kind of place."""
    return Folder(tmp_path / "files") if request.param == "folder" else Bucket(server.bucket, "some/prefix/")


async def parts_of(*parts: bytes, fails: bool = False) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if fails:
        raise ApiError(400, "the upload ended early")


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def content_of(contents: Contents, name: str = NAME) -> bytes:
    return b"".join([block async for block in blocks(contents, name)])


async def test_content_is_what_was_written(contents: Contents) -> None:
    for parts in ((), (b"",), (b"one", b"two"), (bytes(PART_BYTES - 1), b"xy", b"z")):
        assert await contents.write(NAME, parts_of(*parts)) == len(b"".join(parts))
        assert await content_of(contents) == b"".join(parts)
    assert await contents.read(NAME, PART_BYTES - 1, 2) == b"xy"
    assert await contents.read(NAME, PART_BYTES + 5, 2) == b""
    assert await contents.read(NAME, 0, 0) == b""
    await contents.delete(NAME)
    await contents.delete(NAME)
    with pytest.raises(ApiError) as lost:
        await contents.read(NAME, 0, 0)
    assert lost.value.status == 410


@pytest.mark.parametrize("size", [1, PART_BYTES + 1])
async def test_interrupted_write_leaves_what_was_there(
    contents: Contents, server: BucketServer, tmp_path: Path, size: int
) -> None:
    await contents.write(NAME, parts_of(b"before"))
    with pytest.raises(ApiError):
        await contents.write(NAME, parts_of(bytes(size), fails=True))
    assert await content_of(contents) == b"before"
    assert not server.uploads
    assert len(files_in(tmp_path)) <= 1


async def test_old_contents_are_deleted(contents: Contents, server: BucketServer, tmp_path: Path) -> None:
    for number in range(5):
        await contents.write(f"segments/batch_1/{number}", parts_of(b"x"))
    old_s = time.time() - 1000
    for path in files_in(tmp_path):
        if path.name in "012":
            os.utime(path, (old_s, old_s))
    for key in [key for key in server.objects if key[-1] in "012"]:
        server.objects[key] = b"x", old_s
    assert await contents.delete_older(time.time() - 500) == 3
    assert await contents.read("segments/batch_1/3", 0, 1) == b"x"
    assert await contents.delete_older(time.time() - 500) == 0


async def test_bucket_is_asked_again_while_it_is_busy(server: BucketServer) -> None:
    contents = Bucket(server.bucket, "")
    server.num_failing = 2
    await contents.write(NAME, parts_of(b"x"))
    server.num_failing = 3
    with pytest.raises(ApiError) as failed:
        await contents.read(NAME, 0, 1)
    assert failed.value.status == 503


async def test_wrong_key_is_refused_by_the_bucket(server: BucketServer) -> None:
    """The server of these tests checks signatures."""
    wrong = replace(server.bucket, credentials=Credentials("AKIDEXAMPLE", "wrong"))
    with pytest.raises(urllib.error.HTTPError) as refused:
        wrong.put("a", b"b")
    assert refused.value.code == 403
    refused.value.close()


async def test_lines_have_their_numbers_in_blocks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = Folder(tmp_path)
    await contents.write(NAME, parts_of(b"one\n\ntwo\r\n" + b"x" * 11 + b"\nlast"))
    for size in range(1, 30):
        monkeypatch.setattr(contents_module, "BLOCK_BYTES", size)
        found = [line async for line in lines(contents, NAME, 10)]
        assert found == [(1, b"one"), (3, b"two\r"), (4, None), (5, b"last")]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
async def test_byte_order_mark_is_no_part_of_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    contents = Folder(tmp_path)
    monkeypatch.setattr(contents_module, "BLOCK_BYTES", size)
    for content, expected in (
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", [(1, b"a"), (2, b"\xef\xbb\xbfb")]),
        (b"\xef\xbb\xbfa", [(1, b"a")]),
        (b"\xef\xbb\xbf\r\n", []),
        (b"\xef\xbb", [(1, b"\xef\xbb")]),
    ):
        await contents.write(NAME, parts_of(content))
        assert [line async for line in lines(contents, NAME, 10)] == expected


BODY = (
    b"preamble\r\n--B\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--B\r\n"
    b'Content-Disposition: form-data; name="file"; filename="a b.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    b"one\r\n--\r\n--C\r\n\r\n--B\r\nContent-Disposition: form-data; name=\"empty\"\r\n\r\n\r\n--B--\r\nepilogue"
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 4096])
async def test_form_is_read_in_parts_of_any_size(size: int) -> None:
    form = Form("multipart/form-data; boundary=B", parts_of(*(BODY[n : n + size] for n in range(0, len(BODY), size))))
    assert b"".join([part async for part in form.file()]) == b"one\r\n--\r\n--C\r\n"
    assert (form.fields, form.filename) == ({"purpose": "batch", "empty": ""}, "a b.jsonl")


@pytest.mark.parametrize("end", [0, 5, 20, 70, 200, len(BODY) - 15])
async def test_form_that_ends_early_is_refused(end: int) -> None:
    form = Form("multipart/form-data; boundary=B", parts_of(BODY[:end]))
    with pytest.raises(ApiError) as refused:
        [part async for part in form.file()]
    assert refused.value.status == 400


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=B"])
async def test_body_of_another_type_is_refused(kind: str) -> None:
    with pytest.raises(ApiError) as refused:
        Form(kind, parts_of(BODY))
    assert refused.value.status == 415


@pytest.mark.parametrize("encoding", ["undefined", "a\0b"])
async def test_encodings_that_cannot_be_read_are_refused(encoding: str) -> None:
    with pytest.raises(ApiError) as refused:
        Form(f"multipart/form-data; boundary*={encoding}''B", parts_of(BODY))
    assert refused.value.status == 400
    body = BODY.replace(b"filename=", f"filename*={encoding}''".encode())
    form = Form("multipart/form-data; boundary=B", parts_of(body))
    with pytest.raises(ApiError) as refused:
        [part async for part in form.file()]
    assert refused.value.status == 400
