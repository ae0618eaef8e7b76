"""Both clients in a notebook: cells run while an event loop is running, and what a cell ends with is shown."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator

import pytest

from inflight import aio, sync
from inflight.catalogue import Capacity, ExecutorCapacity
from inflight.errors import InflightError
from inflight.events import Choice, Completion, FinishReason, Timing, Usage
from inflight.sync_stream import Stream
from tests.unit.scripted_router import WORDS, ScriptedRouter, serving

SAID = "The capital is Paris."


@pytest.fixture
def address() -> Iterator[str]:
    with serving(ScriptedRouter()) as served:
        yield served


async def test_the_sync_client_works_inside_a_running_loop(address: str) -> None:
    asyncio.get_running_loop()
    with sync.Client(address) as client:
        assert client.complete("hi").text == SAID
        assert "".join(map(str, client.generate("hi"))) == SAID
        assert client.list_models()[0].name == "smol"


async def test_both_clients_work_beside_each_other(address: str) -> None:
    with sync.Client(address) as blocking:
        async with aio.AsyncClient(address) as client:
            stream = client.generate("hi")
            assert blocking.complete("hi").text == SAID
            assert await stream.text() == SAID


async def test_show_prints_the_text_as_it_comes(address: str) -> None:
    out = io.StringIO()
    with sync.Client(address) as client:
        client.generate("hi").show(out)
    async with aio.AsyncClient(address) as client:
        await client.generate("hi").show(out)
    assert out.getvalue() == f"{SAID}\n{SAID}\n"


def test_a_stream_and_a_client_say_what_they_are(address: str) -> None:
    with sync.Client(address, api_key="secret") as client:
        stream = client.generate("hi")
        assert repr(stream) == "<Stream not accepted yet: 0 tokens, runs>"
        stream.text()
        assert repr(stream) == f"<Stream r1: {len(WORDS)} tokens, stop_token>"
        assert repr(client) == f"<Client of {address}>"
    assert repr(aio.AsyncClient(address)) == f"<AsyncClient of {address}>"


def test_a_completion_is_shown_as_its_text_with_nothing_that_could_run() -> None:
    choice = Choice(text="<script>alert(1)</script>\nPlain.", finish_reason=FinishReason.LENGTH)
    completion = Completion("r1", (choice,), Usage(7, 0, 5, 0), Timing(None, None, 0.5, None, 0))
    shown = completion._repr_html_()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\nPlain." in shown
    assert "<script" not in shown
    assert "7 → 5 tokens, first after 0.50 s, length" in shown
    assert str(completion) == choice.text


def test_capacity_is_shown_as_a_table() -> None:
    executor = ExecutorCapacity("e0", "smol", True, 4, 3, 0, 64, 17, 20, 5, 16, 100.0, 5.0, "inflight", 9)
    assert "<td>3/4</td><td>17/64</td>" in Capacity((executor,), ())._repr_html_()


def test_an_async_client_in_a_second_loop_says_so(address: str) -> None:
    client = aio.AsyncClient(address)

    async def ask() -> None:
        await client.list_models()

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(ask())
        with pytest.raises(RuntimeError, match="another event loop"):
            second.run(ask())
        first.run(client.close())
        second.run(ask())
        second.run(client.close())


def test_an_async_client_without_a_loop_names_the_other_one(address: str) -> None:
    with pytest.raises(RuntimeError, match="without one use Client"):
        aio.AsyncClient(address).generate("hi")


def test_a_closed_client_says_so_and_not_what_grpc_says(address: str) -> None:
    client = sync.Client(address)
    client.close()
    with pytest.raises(InflightError, match="the client was closed"):
        client.list_models()
    with pytest.raises(InflightError, match="the client was closed"):
        client.generate("hi")


def test_an_interrupted_cell_ends_its_request() -> None:
    router = ScriptedRouter()
    with serving(router) as address, sync.Client(address) as client:
        stream = client.generate("hi")
        with pytest.raises(KeyboardInterrupt):
            _interrupt_at_first(stream)
        assert router.ended.wait(60)
        assert stream.finish_reason is FinishReason.CANCELLED


def _interrupt_at_first(stream: Stream) -> None:
    for _ in stream:
        raise KeyboardInterrupt
