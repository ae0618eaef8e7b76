"""The board over HTTP: the page's parts, who may have the statistics, and what a slow or late watcher gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette
from starlette.types import Message

from inflight.common.errors import Reason, RequestError
from inflight.router.auth.authenticator import Authentication
from inflight.router.auth.caller import ANYBODY, AnonymousAuthenticator, Authenticator, Caller
from inflight.router.dashboard.feed import Feeds, line_of
from inflight.router.dashboard.routes import dashboard_routes
from inflight.router.dashboard.watching import Watching
from inflight.router.settings import RouterSettings
from inflight.router.telemetry.events import RequestFacts
from inflight.v1 import inference_pb2
from tests.support.board.scenes import Scene, ScriptedStatistics, full_bus
from tests.support.stack.credentials import key_entry

KEY = "key-of-acme-" + "a" * 32


class Reply:
    """What an application answers to one GET, chunk by chunk. `hold` lets the client read no further."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.is_gone = asyncio.Event()
        self.reading: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """See ASGI."""
        await self.may_read.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message.get("body"):
            self.chunks.put_nowait(message["body"])

    async def line(self) -> dict[str, Any]:
        """The next message of the stream."""
        chunk: dict[str, Any] = json.loads(await asyncio.wait_for(self.chunks.get(), 60))
        return chunk

    async def body(self) -> bytes:
        """All of it, once it has ended."""
        assert self.reading is not None
        await asyncio.wait_for(asyncio.shield(self.reading), 60)
        return b"".join(self.chunks.get_nowait() for _ in range(self.chunks.qsize()))


@asynccontextmanager
async def get(app: Starlette, path: str, *more: tuple[bytes, bytes], **headers: str) -> AsyncIterator[Reply]:
    """A GET under way; the client goes away at the end. `more` headers may repeat others."""
    reply, is_asked = Reply(), False

    async def receive() -> Message:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await reply.is_gone.wait()
        return {"type": "http.disconnect"}

    fields = [*((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()), *more]
    bare, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "GET",
        "path": bare,
        "raw_path": bare.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": query.encode(),
        "headers": fields,
    }
    reply.reading = asyncio.create_task(app(scope, receive, reply.send))
    try:
        yield reply
    finally:
        reply.is_gone.set()
        reply.may_read.set()
        await asyncio.wait_for(reply.reading, 60)


def application(feeds: Feeds, authenticator: Authenticator | None = None) -> Starlette:
    return Starlette(routes=dashboard_routes(feeds, authenticator or AnonymousAuthenticator()))


def numbered(number: int) -> inference_pb2.GetStatsResponse:
    return inference_pb2.GetStatsResponse(router_id="router", timestamp_ms=number)


def locked(tmp_path: Path) -> Authenticator:
    path = tmp_path / "keys.toml"
    path.write_text(key_entry(KEY, "acme"))
    return Authentication(RouterSettings(api_keys_file=path)).authenticator


@pytest.mark.parametrize("message", [Scene().message(), full_bus(64), inference_pb2.GetStatsResponse()])
def test_a_line_is_what_protobuf_makes_of_the_message(message: inference_pb2.GetStatsResponse) -> None:
    expected = MessageToDict(message)
    line = line_of(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == expected


def test_a_line_keeps_what_a_sequence_does_not_say() -> None:
    message = inference_pb2.GetStatsResponse()
    sequences = message.executors.add().sequences
    sequences.add(seat=0)
    sequences.add(phase=1, choice_index=1, prompt_tokens=3)
    assert json.loads(line_of(message))["executors"][0]["sequences"] == [
        {"seat": 0},
        {"phase": "SEQUENCE_PHASE_STANDBY", "choiceIndex": 1, "promptTokens": 3},
    ]


async def test_page_and_parts_are_served_with_a_strict_policy() -> None:
    app = application(Feeds(ScriptedStatistics()))
    async with get(app, "/") as page:
        text = (await page.body()).decode()
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert "style=" not in text
    async with get(app, "/board/board.js") as script:
        assert b"import" in await script.body()
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    async with get(app, "/board/board.js", if_none_match=script.headers["etag"]) as again:
        assert await again.body() == b""
    assert again.status == 304


async def test_every_part_of_the_page_is_there_and_nothing_is_fetched_from_elsewhere() -> None:
    folder = resources.files("inflight.router.dashboard") / "static"
    names = {path.name for path in folder.iterdir()}
    assert {"index.html", "board.css", "board.js"} <= names
    paths = {
        getattr(route, "path", "") for route in dashboard_routes(Feeds(ScriptedStatistics()), AnonymousAuthenticator())
    }
    assert paths == {"/", "/board/stats", "/board/request", "/board/usage"} | {
        f"/board/{name}" for name in names - {"index.html"}
    }
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, path.name
        assert "https://" not in text, path.name
        assert "innerHTML" not in text, path.name


async def test_stream_begins_with_the_newest_message_and_goes_on() -> None:
    source = ScriptedStatistics(numbered(1), numbered(2))
    async with get(application(Feeds(source)), "/board/stats") as reply:
        assert (await reply.line())["timestampMs"] == "2"
        source.show(numbered(3))
        assert (await reply.line())["timestampMs"] == "3"
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    assert reply.headers["cache-control"] == "no-store"
    assert source.requests[0].want_iterations
    assert source.requests[0].want_sequences


async def test_watchers_who_may_see_the_same_share_one_watch_which_ends_with_the_last() -> None:
    source = ScriptedStatistics(numbered(1))
    feeds = Feeds(source)
    app = application(feeds)
    async with get(app, "/board/stats") as first, get(app, "/board/stats") as second:
        await first.line()
        await second.line()
        assert (source.num_watching, feeds.num_watchers) == (1, 2)
    assert feeds.num_watchers == 0
    await settled(lambda: source.num_watching == 0)
    async with get(app, "/board/stats") as later:
        await later.line()
    assert len(source.callers) == 2


async def test_slow_watcher_gets_the_newest_message_and_no_backlog() -> None:
    source = ScriptedStatistics(numbered(1))
    feeds = Feeds(source)
    app = application(feeds)
    async with get(app, "/board/stats") as slow, get(app, "/board/stats") as quick:
        await slow.line()
        await quick.line()
        slow.may_read.clear()
        for number in range(2, 50):
            source.show(numbered(number))
            assert (await quick.line())["timestampMs"] == str(number)
        slow.may_read.set()
        # One message was on its way when the reader stopped.
        stamps = [(await slow.line())["timestampMs"]]
        if stamps != ["49"]:
            stamps.append((await slow.line())["timestampMs"])
        assert stamps[-1] == "49"


async def test_more_watchers_than_places_are_told_to_come_back() -> None:
    feeds = Feeds(ScriptedStatistics(numbered(1)), max_watchers=1)
    app = application(feeds)
    async with get(app, "/board/stats") as first:
        await first.line()
        async with get(app, "/board/stats") as second:
            await second.body()
        assert second.status == 503
        assert int(second.headers["retry-after"]) > 0
    async with get(app, "/board/stats") as third:
        await third.line()


async def test_locked_door_opens_to_its_key_alone(tmp_path: Path) -> None:
    source = ScriptedStatistics(numbered(1))
    app = application(Feeds(source), locked(tmp_path))
    for headers in ({}, {"authorization": f"Bearer {KEY}x"}, {"authorization": KEY}):
        async with get(app, "/board/stats", **headers) as refused:
            assert KEY.encode() not in await refused.body()
        assert refused.status == 401
        assert refused.headers["www-authenticate"] == "Bearer"
    assert not source.callers
    async with get(app, "/board/stats", authorization=f"Bearer {KEY}") as let_in:
        await let_in.line()
    assert [caller.tenant for caller in source.callers] == ["acme"]
    async with get(app, "/") as page:
        assert b"<html" in await page.body()


async def test_two_authorization_headers_are_refused(tmp_path: Path) -> None:
    source = ScriptedStatistics(numbered(1))
    for authenticator in (locked(tmp_path), AnonymousAuthenticator()):
        app, second = application(Feeds(source), authenticator), (b"authorization", b"Bearer another")
        async with get(app, "/board/stats", second, authorization=f"Bearer {KEY}") as refused:
            await refused.body()
        assert refused.status == 400
    assert not source.callers


async def test_key_withdrawn_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closing:
        is_open = True

        def identify(self, metadata: object) -> Caller:
            if not self.is_open:
                raise RequestError(Reason.UNAUTHENTICATED, "a key is needed")
            return ANYBODY

    monkeypatch.setattr("inflight.router.dashboard.routes.RECHECK_S", 0.0)
    source, authenticator = ScriptedStatistics(numbered(1)), Closing()
    async with get(application(Feeds(source), authenticator), "/board/stats") as reply:
        await reply.line()
        authenticator.is_open = False
        source.show(numbered(2))
        assert await reply.body() == b""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError(Reason.NOT_ALLOWED, "not for you"), 403),
        (RequestError(Reason.STORE_UNAVAILABLE, "no ledger"), 503),
    ],
)
async def test_refusal_of_the_source_is_the_answer(error: RequestError, status: int) -> None:
    source = ScriptedStatistics()
    source.fail(error)
    async with get(application(Feeds(source)), "/board/stats") as reply:
        assert json.loads(await reply.body()) == {"error": error.description}
    assert reply.status == status


async def test_source_that_breaks_ends_streams_and_the_next_watcher_starts_it_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = ScriptedStatistics(numbered(1))
    feeds = Feeds(source)
    app = application(feeds)
    async with get(app, "/board/stats") as reply:
        await reply.line()
        source.fail(RuntimeError("broken"))
        assert await reply.body() == b""
    assert "the dashboard's statistics failed" in caplog.text
    source.error = None
    async with get(app, "/board/stats") as again:
        await again.line()


async def test_closing_ends_streams_and_takes_no_more() -> None:
    source = ScriptedStatistics(numbered(1))
    feeds = Feeds(source)
    app = application(feeds)
    async with get(app, "/board/stats") as reply:
        await reply.line()
        feeds.close()
        assert await reply.body() == b""
    async with get(app, "/board/stats") as late:
        await late.body()
    assert late.status == 503
    await settled(lambda: source.num_watching == 0)


async def test_pages_of_other_sites_take_no_place() -> None:
    source = ScriptedStatistics(numbered(1))
    app = application(Feeds(source))
    async with get(app, "/board/stats", sec_fetch_site="cross-site") as reply:
        await reply.body()
    assert reply.status == 403
    assert not source.callers


async def settled(is_so: Callable[[], bool]) -> None:
    """Lets the loop come round until something is so."""
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


async def test_timeline_of_a_request_is_for_its_tenant_and_operators(tmp_path: Path) -> None:
    watching = Watching()
    for tenant in ("acme", "globex"):
        facts = RequestFacts(model="tiny", request_id="one", tenant=tenant)
        watching.requests.follow(facts).admitted()
    routes = dashboard_routes(Feeds(ScriptedStatistics()), locked(tmp_path), watching)
    app, key = Starlette(routes=routes), {"authorization": f"Bearer {KEY}"}
    for query, headers, status in (
        ("tenant=acme&id=one", key, 200),
        ("tenant=globex&id=one", key, 404),
        ("tenant=acme&id=two", key, 404),
        ("tenant=acme&id=one", {}, 401),
        ("tenant=acme&id=one", {**key, "sec_fetch_site": "cross-site"}, 403),
    ):
        async with get(app, "/board/request?model=tiny&" + query, **headers) as reply:
            body = json.loads(await reply.body())
            assert reply.status == status, query
            assert ("stages" in body) == (status == 200)


async def test_usage_is_what_its_caller_may_see(tmp_path: Path) -> None:
    async def usage(caller: Caller, request: inference_pb2.GetUsageRequest) -> inference_pb2.GetUsageResponse:
        line = inference_pb2.UsageLine(tenant=caller.tenant or "", cost=1.5)
        return inference_pb2.GetUsageResponse(lines=[line], currency="EUR")

    routes = dashboard_routes(Feeds(ScriptedStatistics()), locked(tmp_path), None, usage)
    app, key = Starlette(routes=routes), {"authorization": f"Bearer {KEY}"}
    for headers, status in ((key, 200), ({}, 401), ({**key, "sec_fetch_site": "cross-site"}, 403)):
        async with get(app, "/board/usage", **headers) as reply:
            body = json.loads(await reply.body())
            assert reply.status == status
            expected = {"lines": [{"tenant": "acme", "cost": 1.5}], "currency": "EUR"}
            assert (body == expected) == (status == 200)


async def test_first_line_has_the_history_and_later_ones_what_is_new() -> None:
    source, watching = ScriptedStatistics(numbered(1)), Watching()
    for number in range(180):
        watching.history.add(5.0 * number, 5.0, {})
    watching.events.executor_lost("executor-0", "tiny", 6)
    app = Starlette(routes=dashboard_routes(Feeds(source), AnonymousAuthenticator(), watching))
    async with get(app, "/board/stats") as reply:
        first = await reply.line()
        assert len(first["board"]["samples"]) == 180
        assert [one["text"] for one in first["board"]["events"]] == ["executor-0 lost, 6 requests moved"]
        source.show(numbered(2))
        assert "board" not in await reply.line()
        watching.history.add(1000.0, 5.0, {})
        source.show(numbered(3))
        assert [one["number"] for one in (await reply.line())["board"]["samples"]] == [181]
