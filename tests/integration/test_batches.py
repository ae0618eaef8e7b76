"""Files and batches with OpenAI's own client: run, cancelled, expired, refused, limited, and taken over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from inflight.common.errors import Reason, RequestError
from inflight.gateway.batches.running import MAX_WAITING
from inflight.gateway.files.folder import Folder
from inflight.gateway.store import batches
from inflight.local.redis_server import find_redis_binary
from inflight.v1 import inference_pb2
from tests.integration.test_authorization import api_key, locked_cluster
from tests.integration.test_gateway import metric, words
from tests.integration.test_hostile_clients import until
from tests.support.stack.bucket_server import serving_bucket
from tests.support.stack.cluster import Cluster
from tests.support.stack.gateways import RunningGateway, run_gateway
from tests.unit.scripted_router import WORDS, ScriptedRouter, serving, speak

WINDOW: dict[str, Any] = {"completion_window": "24h", "endpoint": "/v1/completions"}
WAIT_S = 60.0
POLL_S = 0.05


class Clock:
    """The time of day, and what a test adds to it."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.added_s


@pytest.fixture(autouse=True)
def _own_tenants(monkeypatch: pytest.MonkeyPatch, pool: str) -> None:
    """Keys of the test's own: tenants have the same names in every test."""
    monkeypatch.setattr("inflight.gateway.store.batches.PREFIX", f"inflight:batches:{{{pool}}}:")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> dict[str, Any]:
    """Of a gateway with files."""
    return {"store_url": redis_url, "files": str(tmp_path / "files")}


@pytest.fixture
async def gateway(cluster: Cluster, settings: dict[str, Any], clock: Clock) -> AsyncIterator[RunningGateway]:
    async with run_gateway(cluster.routers[0].address, clock=clock, **settings) as running:
        yield running


def prompt(number: int) -> list[int]:
    """The prompt of a line, of the model's five token ids."""
    return [1, number % 5, number // 5 % 5, number // 25 % 5]


def line(model: str, number: int, **body: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": prompt(number), "max_tokens": 3, "temperature": 0, "ignore_eos": True, **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": asked}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def upload(client: openai.AsyncOpenAI, content: bytes) -> str:
    return (await client.files.create(file=("asked.jsonl", content), purpose="batch")).id


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """The batch, when it has ended."""
    async with asyncio.timeout(WAIT_S):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(POLL_S)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def num_completed(batch: Any) -> int:
    number: int = batch.request_counts.completed
    return number


async def run(client: openai.AsyncOpenAI, content: bytes) -> Any:
    """A batch of this file, when it has ended."""
    batch = await client.batches.create(input_file_id=await upload(client, content), **WINDOW)
    return await ended(client, batch.id)


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file of results by custom id, each once."""
    if file_id is None:
        return {}
    text = (await client.files.content(file_id)).text
    found = [json.loads(one) for one in text.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found)
    return by_id


async def test_files_are_kept_listed_read_and_deleted(client: openai.AsyncOpenAI) -> None:
    contents = [b"", b"one\r\n--not-a-boundary\r\n", bytes(range(256)) * 9000]
    files = [await client.files.create(file=(f"f{n}.jsonl", one), purpose="batch") for n, one in enumerate(contents)]
    for file, content in zip(files, contents, strict=True):
        assert (file.bytes, file.purpose, file.status) == (len(content), "batch", "processed")
        assert (await client.files.content(file.id)).content == content
        assert await client.files.retrieve(file.id) == file
    assert [file.filename for file in files] == ["f0.jsonl", "f1.jsonl", "f2.jsonl"]
    listed = [file.id async for file in client.files.list(limit=2)]
    assert sorted(listed) == sorted(file.id for file in files)
    assert [file.id async for file in client.files.list(order="asc")] == listed[::-1]
    assert [file async for file in client.files.list(purpose="batch_output")] == []
    assert (await client.files.delete(files[0].id)).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(files[0].id)


async def test_file_is_kept_as_long_as_its_client_asks(client: openai.AsyncOpenAI) -> None:
    kept: Any = {"anchor": "created_at", "seconds": 3600}
    file = await client.files.create(file=b"x", purpose="batch", expires_after=kept)
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 3600
    default = await client.files.create(file=b"x", purpose="batch")
    assert default.expires_at == default.created_at + 30 * 86400


async def test_refused_uploads_leave_nothing(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=b"x", purpose="fine-tune")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 5})
    assert refused.value.param == "expires_after.seconds"
    with pytest.raises(openai.APIStatusError) as other:
        await client.post("/files", body={"purpose": "batch"}, cast_to=object)
    assert other.value.status_code == 415
    assert not files_below(tmp_path)


async def test_batch_has_one_result_for_each_line(
    client: openai.AsyncOpenAI, gateway: RunningGateway, pool: str, tmp_path: Path
) -> None:
    asked = [line(pool, number) for number in range(30)]
    asked[7]["body"]["max_tokens"] = 1000  # more than the context
    asked[8]["body"]["stream"] = True
    asked[9]["body"]["no_such"] = 1
    batch = await run(client, jsonl(asked) + b"\n")
    assert (batch.status, batch.model, batch.errors) == ("completed", pool, None)
    assert batch.request_counts.model_dump() == {"total": 30, "completed": 27, "failed": 3}
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times)
    assert batch.expires_at == batch.created_at + 86400
    succeeded, failed = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
    assert failed.keys() == {"line-7", "line-8", "line-9"}
    assert succeeded.keys() | failed.keys() == {one["custom_id"] for one in asked}
    for number in (0, 29):
        response = succeeded[f"line-{number}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["text"] == words(prompt(number), 3)
    assert (succeeded["line-0"]["error"], failed["line-7"]["error"]) == (None, None)
    assert {one["response"]["status_code"] for one in failed.values()} == {400}
    assert [failed[f"line-{n}"]["response"]["body"]["error"]["param"] for n in (8, 9)] == ["stream", "no_such"]
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (27 * 4, 27 * 3)
    files = [file async for file in client.files.list(purpose="batch_output")]
    assert {file.id for file in files} == {batch.output_file_id, batch.error_file_id}
    assert not [path for path in (tmp_path / "files" / "segments").rglob("*") if path.is_file()]
    assert await metric(gateway, 'inflight_gateway_batches_total{status="completed"}') == 1
    assert await metric(gateway, 'inflight_gateway_batch_lines_total{result="completed"}') == 27
    assert await metric(gateway, "inflight_gateway_batch_lines_running") == 0


async def test_chats_of_a_batch_run_on_class_batch(
    client: openai.AsyncOpenAI, pool: str, submits: list[Any], cluster: Cluster
) -> None:
    batch = await run(client, jsonl([line(pool, 0, priority="interactive", n=2)]))
    assert batch.request_counts.completed == 1
    assert {submit.priority for submit in submits} == {3}


async def test_malformed_files_fail_with_their_lines(client: openai.AsyncOpenAI, pool: str) -> None:
    lines = [json.dumps(line(pool, number)).encode() for number in range(9)]
    lines[1] = b"{"
    lines[2] = lines[0]
    lines[3] = json.dumps(line("other", 3)).encode()
    lines[4] = json.dumps({**line(pool, 4), "url": "/v1/chat/completions"}).encode()
    lines[5] = json.dumps({**line(pool, 5), "method": "GET"}).encode()
    lines[6] = json.dumps({"custom_id": "a"}).encode()
    batch = await run(client, b"\n".join(lines))
    found = [(problem.line, problem.code) for problem in batch.errors.data]
    assert found == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_model"),
        (5, "mismatched_url"),
        (6, "invalid_method"),
        (7, "missing_required_parameter"),
    ]
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    for content, code in ((b"\n\n", "empty_file"), (jsonl([line("gpt-5", 0)]), "model_not_found")):
        batch = await run(client, content)
        assert [problem.code for problem in batch.errors.data] == [code]


async def test_refusals_of_batches_have_their_status(client: openai.AsyncOpenAI, pool: str) -> None:
    file_id = await upload(client, jsonl([line(pool, 0)]))
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"extra_body": {"no_such": 1}}, "no_such"),
    )
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.batches.create(**{"input_file_id": file_id, **WINDOW, **fields})
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError):
        await client.batches.create(input_file_id="file-0", **WINDOW)
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_0")


async def test_cancelled_batch_has_the_results_that_it_had(
    cluster: Cluster, client: openai.AsyncOpenAI, pool: str
) -> None:
    executor = cluster.executors[0]
    short = [line(pool, number, max_tokens=1) for number in range(2)]
    asked = [*short, *(line(pool, number, max_tokens=40) for number in range(2, 40))]
    executor.brake.hold()
    file_id = await upload(client, jsonl(asked))
    batch = await client.batches.create(input_file_id=file_id, metadata={"a": "b"}, **WINDOW)
    with pytest.raises(openai.ConflictError):
        await client.files.delete(file_id)
    await until(lambda: executor.scheduler.num_held)
    # The lines wait in the file, not at the router.
    assert 0 < executor.scheduler.num_held <= 4
    executor.brake.permit(6)
    async with asyncio.timeout(WAIT_S):
        while num_completed(await client.batches.retrieve(batch.id)) < 2:
            await asyncio.sleep(POLL_S)
    cancelling = await client.batches.cancel(batch.id)
    assert cancelling.status in ("cancelling", "cancelled")
    batch = await ended(client, batch.id)
    executor.brake.release()
    assert (batch.status, batch.metadata) == ("cancelled", {"a": "b"})
    assert batch.cancelling_at is not None
    succeeded, failed = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
    assert succeeded.keys() == {"line-0", "line-1"}
    assert {one["error"]["code"] for one in failed.values()} == {"batch_cancelled"}
    assert len(succeeded) + len(failed) == len(asked)
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)
    await client.files.delete(file_id)


async def test_expired_batch_has_an_error_for_each_line_that_was_not_run(
    cluster: Cluster, client: openai.AsyncOpenAI, clock: Clock, pool: str
) -> None:
    cluster.executors[0].brake.hold()
    asked = jsonl([line(pool, number) for number in range(20)])
    batch = await client.batches.create(input_file_id=await upload(client, asked), **WINDOW)
    await until(lambda: cluster.executors[0].scheduler.num_held)
    clock.added_s = 86_401
    batch = await ended(client, batch.id)
    cluster.executors[0].brake.release()
    assert batch.status == "expired"
    failed = await results(client, batch.error_file_id)
    assert {one["error"]["code"] for one in failed.values()} == {"batch_expired"}
    assert len(failed) == batch.request_counts.failed == 20


async def test_another_gateway_goes_on_with_a_batch(
    cluster: Cluster, client: openai.AsyncOpenAI, settings: dict[str, Any], pool: str, submits: list[Any]
) -> None:
    brake = cluster.executors[0].brake
    brake.hold()
    asked = [line(pool, number, max_tokens=6) for number in range(24)]
    async with run_gateway(cluster.routers[0].address, **settings) as first, first.openai() as its_client:
        batch = await its_client.batches.create(input_file_id=await upload(its_client, jsonl(asked)), **WINDOW)
        await until(lambda: submits)
        async with asyncio.timeout(WAIT_S):
            while len(submits) <= 8:
                brake.permit(1)
                await asyncio.sleep(POLL_S / 10)
    brake.release()
    batch = await ended(client, batch.id)
    assert batch.request_counts.completed == 24
    succeeded = await results(client, batch.output_file_id)
    assert succeeded.keys() == {one["custom_id"] for one in asked}
    for number in range(24):
        assert succeeded[f"line-{number}"]["response"]["body"]["choices"][0]["text"] == words(prompt(number), 6)
    # What ran when its gateway ended went on, and was read by the other one.
    assert len({submit.request_id for submit in submits}) == 24


async def test_repeated_creation_is_one_batch(client: openai.AsyncOpenAI, pool: str) -> None:
    file_id = await upload(client, jsonl([line(pool, 0)]))
    key = {"Idempotency-Key": "once"}
    one, again = [await client.batches.create(input_file_id=file_id, extra_headers=key, **WINDOW) for _ in range(2)]
    assert one.id == again.id
    other = await client.batches.create(input_file_id=file_id, **WINDOW)
    assert {batch.id async for batch in client.batches.list(limit=1)} == {other.id, one.id}
    await ended(client, one.id)
    await ended(client, other.id)


async def test_files_and_batches_are_their_tenants_only(settings: dict[str, Any], pool: str, tmp_path: Path) -> None:
    async with (
        locked_cluster(settings["store_url"], pool, tmp_path) as cluster,
        run_gateway(cluster.routers[0].address, store_secret="s" * 32, **settings) as gateway,
        gateway.openai(api_key("all")) as owner,
        gateway.openai(api_key("standard")) as colleague,
        gateway.openai(api_key("umbrella")) as other,
        gateway.openai("wrong") as stranger,
    ):
        cluster.executors[0].brake.hold()
        file_id = await upload(owner, jsonl([line(pool, 0)]))
        batch = await owner.batches.create(input_file_id=file_id, **WINDOW)
        await until(lambda: cluster.executors[0].scheduler.num_held)
        redis = Redis.from_url(settings["store_url"], decode_responses=True)
        (sealed,) = await redis.hmget(f"{batches.PREFIX}batch:{batch.id}", ["authorization"])
        assert sealed
        assert api_key("all") not in sealed
        cluster.executors[0].brake.release()
        batch = await ended(owner, batch.id)
        assert await redis.hmget(f"{batches.PREFIX}batch:{batch.id}", ["authorization", "owner"]) == [None, None]
        await redis.aclose()
        assert (await colleague.batches.retrieve(batch.id)).output_file_id == batch.output_file_id
        assert [one.id async for one in other.files.list()] == [one.id async for one in other.batches.list()] == []
        for of_batch in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await of_batch(batch.id)
        for found in (file_id, batch.output_file_id):
            for of_file in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await of_file(found)
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(input_file_id=file_id, **WINDOW)
        with pytest.raises(openai.AuthenticationError):
            await stranger.files.create(file=b"x", purpose="batch")


async def test_segment_beside_one_that_its_writer_does_not_know_is_refused(redis_url: str) -> None:
    """A call that timed out may still be carried out, when its driver has begun again without that segment."""
    store = batches.BatchStore(redis_url, batches.BatchLimits(3600, 9, 9, 9))
    now = int(time.time())
    batch = batches.Batch("batch_1", "t", "/v1/completions", "file-1", now, now + 86_400, owner="o")
    assert await store.create_batch(batch)
    for _ in range(2):
        assert await store.advance(batch, {"completed": 1}, ("late", "{}"), 0)
    assert not await store.advance(batch, {"completed": 1}, ("again", "{}"), 0)
    assert await store.segments(batch.batch_id) == {"late": "{}"}
    assert await store.advance(batch, {"completed": 2}, ("next", "{}"), 1)
    await store.close()


async def test_batch_is_there_until_it_expires_however_short_files_are_kept(
    redis_url: str, redis_admin_url: str
) -> None:
    store = batches.BatchStore(redis_url, batches.BatchLimits(3600, 9, 9, 9))
    now = int(time.time())
    batch = batches.Batch("batch_2", "t", "/v1/completions", "file-1", now, now + 86_400, owner="o")
    assert await store.create_batch(batch)
    async with Redis.from_url(redis_admin_url) as redis:
        record = f"{batches.PREFIX}batch:batch_2"
        assert await redis.pttl(record) > 86_400_000
        assert await store.advance(batch, {"status": "in_progress"})
        assert await redis.pttl(record) > 86_400_000
        assert await store.advance(batch, {"status": "completed"}, has_ended=True)
        assert await redis.pttl(record) <= 3_600_000
    await store.close()


async def test_limits_of_a_tenant_refuse_more(cluster: Cluster, settings: dict[str, Any], pool: str) -> None:
    limits: dict[str, Any] = {
        "files_max_files": 3,
        "files_max_file_bytes": 2048,
        "files_max_bytes": 4096,
        "batch_max_open": 1,
        "batch_max_lines": 5,
    }
    async with (
        run_gateway(cluster.routers[0].address, **settings, **limits) as gateway,
        gateway.openai() as client,
    ):
        with pytest.raises(openai.APIStatusError) as too_large:
            await upload(client, bytes(2049))
        assert too_large.value.status_code == 413
        cluster.executors[0].brake.hold()
        file_id = await upload(client, jsonl([line(pool, 0)]))
        batch = await client.batches.create(input_file_id=file_id, **WINDOW)
        with pytest.raises(openai.RateLimitError):
            await client.batches.create(input_file_id=file_id, **WINDOW)
        cluster.executors[0].brake.release()
        await ended(client, batch.id)
        # The limits are those of the input: results are stored in any case.
        small = [await upload(client, b"x") for _ in range(1)]
        with pytest.raises(openai.RateLimitError) as full:
            await upload(client, b"x")
        assert full.value.code == "storage_full"
        await client.files.delete(small[0])
        batch = await run(client, jsonl([line(pool, number) for number in range(6)]))
        assert [problem.code for problem in batch.errors.data] == ["too_many_requests"]
        batch = await client.batches.create(input_file_id=file_id, **WINDOW)
        assert (await ended(client, batch.id)).status == "completed"


async def test_without_a_place_for_files_there_are_none(cluster: Cluster, redis_url: str) -> None:
    async with (
        run_gateway(cluster.routers[0].address, store_url=redis_url) as gateway,
        gateway.openai() as client,
    ):
        with pytest.raises(openai.NotFoundError):
            await upload(client, b"x")


async def test_batch_sends_nothing_before_the_time_that_a_router_names(settings: dict[str, Any]) -> None:
    asked_s: list[float] = []

    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        asked_s.append(time.monotonic())
        if len(asked_s) == 1:
            raise RequestError(Reason.QUEUE_FULL, "the queue is full", retry_after_ms=700)
        yield from speak(WORDS)

    # One line at a time, so that the first request is refused before the next is sent.
    with serving(ScriptedRouter(script)) as address:
        async with (
            run_gateway(address, batch_max_running=1, **settings) as gateway,
            gateway.openai() as client,
        ):
            batch = await run(client, jsonl([line("smol", number) for number in range(40)]))
    assert batch.request_counts.completed == 40
    assert len(asked_s) == 41
    # Those that were about to be sent are sent, and none after them: a batch has at most so many that wait.
    early = [one for one in asked_s[1:] if one - asked_s[0] < 0.7]
    assert len(early) < MAX_WAITING


async def test_line_whose_output_is_lost_runs_again_under_another_key(settings: dict[str, Any]) -> None:
    keys: list[str] = []

    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        keys.append(request.idempotency_key)
        if len(keys) == 1:
            raise RequestError(Reason.OUTPUT_LOST, "the output is lost")
        yield from speak(WORDS)

    with serving(ScriptedRouter(script)) as address:
        async with run_gateway(address, **settings) as gateway, gateway.openai() as client:
            batch = await run(client, jsonl([line("smol", 0)]))
    assert batch.request_counts.completed == 1
    assert keys == [f"{batch.id}.1", f"{batch.id}.1.1"]


async def test_files_may_be_in_a_bucket(
    cluster: Cluster, settings: dict[str, Any], pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_bucket() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place = {**settings, "files": "s3://bucket/some/prefix"}
        async with run_gateway(cluster.routers[0].address, **place) as gateway, gateway.openai() as client:
            batch = await run(
                client, jsonl([line(pool, number, **({"no_such": 1} if number == 3 else {})) for number in range(9)])
            )
            assert batch.request_counts.model_dump() == {"total": 9, "completed": 8, "failed": 1}
            assert len(await results(client, batch.output_file_id)) == 8
            assert len(await results(client, batch.error_file_id)) == 1
            files = {batch.input_file_id, batch.output_file_id, batch.error_file_id}
            assert server.objects.keys() == {f"some/prefix/files/{file}" for file in files}
            for file in files:
                await client.files.delete(file)
            assert not server.objects


async def test_files_of_any_editor_are_read(client: openai.AsyncOpenAI, pool: str) -> None:
    """With a byte order mark, CRLF and blank lines; and results are read line by line by what ends lines at more."""
    asked = [line(pool, number) for number in range(4)]
    asked[2]["custom_id"] = "a\u2028b\x85c\u2029d\x00e\U0001f600"
    content = b"\r\n \r\n".join(json.dumps(one, ensure_ascii=False).encode() for one in asked)
    batch = await run(client, b"\xef\xbb\xbf" + content + b"\r\n\r\n")
    assert (batch.status, batch.request_counts.completed) == ("completed", 4)
    assert (await results(client, batch.output_file_id)).keys() == {one["custom_id"] for one in asked}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\x00" * 99, "invalid_json_line"),
        ('{"custom_id": "a"}'.encode("utf-16"), "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (rb'{"custom_id": "\ud800", "method": "POST", "url": "/v1/completions", "body": {}}', "invalid_json_line"),
        (b"\xef\xbb\xbf \r\n", "empty_file"),
    ],
)
async def test_what_is_no_batch_is_refused_with_its_line(client: openai.AsyncOpenAI, content: bytes, code: str) -> None:
    batch = await run(client, content)
    assert batch.status == "failed"
    assert [problem.code for problem in batch.errors.data] == [code]


async def test_name_of_a_file_is_no_path(client: openai.AsyncOpenAI, gateway: RunningGateway, tmp_path: Path) -> None:
    names = ("../../../outside.jsonl", "/etc/passwd", "..", "a\x00b", "a\r\nb", "ß\u2028", "x" * 5000)
    files = [await client.files.create(file=(name, b"x"), purpose="batch") for name in names]
    assert all(len(file.filename) <= 255 for file in files)
    stored = {path.relative_to(tmp_path) for path in files_below(tmp_path)}
    assert stored == {Path("files", "files", file.id) for file in files}
    async with httpx2.AsyncClient() as http:
        for file_id in (
            "..%2f..%2fetc%2fpasswd",
            "%2e%2e%2ffiles",
            "file-%00",
            f"..%2ffiles%2f{files[0].id}",
            "a" * 5000,
        ):
            for answer in (
                await http.get(f"{gateway.url}/v1/files/{file_id}"),
                await http.get(f"{gateway.url}/v1/files/{file_id}/content"),
                await http.delete(f"{gateway.url}/v1/files/{file_id}"),
                await http.post(f"{gateway.url}/v1/batches/{file_id}/cancel"),
            ):
                assert answer.status_code == 404, file_id
    assert {file.id for file in files} == {file.id async for file in client.files.list()}


async def test_batch_whose_file_is_lost_has_the_results_that_it_had(
    cluster: Cluster, client: openai.AsyncOpenAI, pool: str, tmp_path: Path
) -> None:
    brake = cluster.executors[0].brake
    asked = [line(pool, number, max_tokens=1 if number < 2 else 40) for number in range(40)]
    brake.hold()
    file_id = await upload(client, jsonl(asked))
    batch = await client.batches.create(input_file_id=file_id, **WINDOW)
    await until(lambda: cluster.executors[0].scheduler.num_held)
    brake.permit(6)
    async with asyncio.timeout(WAIT_S):
        while num_completed(await client.batches.retrieve(batch.id)) < 2:
            await asyncio.sleep(POLL_S)
    (tmp_path / "files" / "files" / file_id).unlink()
    brake.release()
    batch = await ended(client, batch.id)
    assert (batch.status, [problem.code for problem in batch.errors.data]) == ("failed", ["content_lost"])
    assert (await results(client, batch.output_file_id)).keys() >= {"line-0", "line-1"}


async def test_batch_that_expires_while_its_files_are_written_is_completed(
    client: openai.AsyncOpenAI, clock: Clock, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = await upload(client, jsonl([line(pool, number) for number in range(3)]))
    write = Folder.write

    async def late(self: Folder, name: str, parts: AsyncIterator[bytes]) -> int:
        clock.added_s += 86_401 * name.startswith("files/")
        return await write(self, name, parts)

    monkeypatch.setattr(Folder, "write", late)
    batch = await ended(client, (await client.batches.create(input_file_id=file_id, **WINDOW)).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)
    assert len(await results(client, batch.output_file_id)) == 3


async def test_crowd_of_calls_on_two_gateways_is_one_batch(
    cluster: Cluster, client: openai.AsyncOpenAI, settings: dict[str, Any], pool: str, submits: list[Any]
) -> None:
    """It is created and then cancelled by several calls at the same moment."""
    async with run_gateway(cluster.routers[0].address, **settings) as second, second.openai() as other:
        for is_cancelled in (False, True):
            submits.clear()
            file_id = await upload(client, jsonl([line(pool, number, max_tokens=20) for number in range(30)]))
            options: dict[str, Any] = {"extra_headers": {"Idempotency-Key": file_id}, **WINDOW}
            both = (client, other) * 3
            made = await asyncio.gather(*(one.batches.create(input_file_id=file_id, **options) for one in both))
            (batch_id,) = {batch.id for batch in made}
            if is_cancelled:
                await until(lambda: submits)
                await asyncio.gather(*(one.batches.cancel(batch_id) for one in both))
            batch = await ended(other, batch_id)
            assert batch.status == ("cancelled" if is_cancelled else "completed")
            found = [await results(client, file) for file in (batch.output_file_id, batch.error_file_id)]
            assert sorted([*found[0], *found[1]]) == sorted(f"line-{number}" for number in range(30))
            assert len({submit.request_id for submit in submits}) == len(submits)


async def test_lapsed_batch_is_taken_by_one_of_a_crowd(redis_url: str) -> None:
    stores = [batches.BatchStore(redis_url, batches.BatchLimits(3600, 9, 9, 9)) for _ in range(3)]
    now = int(time.time())
    batch = batches.Batch("batch_3", "t", "/v1/completions", "file-1", now, now + 86_400, owner="first")
    assert await stores[0].create_batch(batch)
    await stores[0].tend({"batch_3": "first"}, gives_back=True)
    owners = [f"owner {number}" for number in range(12)]
    taken = await asyncio.gather(*(stores[n % 3].take("batch_3", owner) for n, owner in enumerate(owners)))
    assert sorted(taken) == ["held"] * 11 + ["taken"]
    taker = owners[taken.index("taken")]
    written = [await stores[0].advance(replace(batch, owner=owner), {"completed": 1}) for owner in ("first", *owners)]
    assert written == [owner == taker for owner in ("first", *owners)]
    for store in stores:
        await store.close()


async def started_redis(socket: Path, folder: Path, **options: str) -> asyncio.subprocess.Process:
    """A Redis that keeps its data in a folder, when it answers."""
    given = {"unixsocket": str(socket), "port": "0", "dir": str(folder), "appendonly": "yes", **options}
    arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
    process = await asyncio.create_subprocess_exec(find_redis_binary(), *arguments, stdout=subprocess.DEVNULL)
    async with asyncio.timeout(WAIT_S), Redis(unix_socket_path=str(socket)) as redis:
        while True:
            with contextlib.suppress(RedisError):
                await redis.ping()
                return process
            await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("is_kept", [True, False])
async def test_batch_goes_on_when_redis_comes_back_and_is_gone_if_redis_is_empty(
    cluster: Cluster, settings: dict[str, Any], pool: str, tmp_path: Path, submits: list[Any], is_kept: bool
) -> None:
    brake, socket = cluster.executors[0].brake, tmp_path / "redis.sock"
    redis = await started_redis(socket, tmp_path)
    asked = jsonl([line(pool, number, max_tokens=1 if number < 2 else 6) for number in range(24)])
    store: dict[str, Any] = {**settings, "store_url": f"unix://{socket}"}
    async with run_gateway(cluster.routers[0].address, **store) as gateway, gateway.openai() as client:
        brake.hold()
        batch = await client.batches.create(input_file_id=await upload(client, asked), **WINDOW)
        await until(lambda: cluster.executors[0].scheduler.num_held)
        brake.permit(6)
        async with asyncio.timeout(WAIT_S):
            while not num_completed(await client.batches.retrieve(batch.id)):
                await asyncio.sleep(POLL_S)
        redis.kill()
        await redis.wait()
        socket.unlink()
        with pytest.raises(openai.InternalServerError) as away:
            await client.batches.retrieve(batch.id)
        assert away.value.status_code == 503
        brake.release()
        await until(lambda: len({submit.request_id for submit in submits}) == 24)
        redis = await started_redis(socket, tmp_path, **({} if is_kept else {"appenddirname": "other"}))
        if is_kept:
            batch = await ended(client, batch.id)
            assert (batch.status, batch.request_counts.completed) == ("completed", 24)
            assert len(await results(client, batch.output_file_id)) == 24
        else:
            with pytest.raises(openai.NotFoundError):
                await client.batches.retrieve(batch.id)
            again = await run(client, asked)
            assert (again.status, again.request_counts.completed) == ("completed", 24)
    redis.kill()
    await redis.wait()
