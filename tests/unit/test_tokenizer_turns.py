"""Turns at tokenizing: a few threads, turns of tenants, and a bound on what waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.api.tokenizer_turns import TokenizerTurns


class Works:
    """Work that ends when it is told to, and the order in which it began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._ends: dict[str, threading.Event] = {}

    def work(self, name: str) -> str:
        self._ends[name] = threading.Event()
        self.began.append(name)
        self._loop.call_soon_threadsafe(self._changed.set)
        assert self._ends[name].wait(60)
        return name

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    async def until_begun(self, *names: str) -> None:
        async with asyncio.timeout(60):
            while self.began != list(names):
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def works() -> AsyncIterator[Works]:
    made = Works()
    yield made
    made.end(*made._ends)


def start(turns: TokenizerTurns, works: Works, name: str, num_bytes: int = 1) -> asyncio.Task[str]:
    return asyncio.create_task(turns.run(name[0], num_bytes, lambda: works.work(name)))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns_on_one_thread(works: Works) -> None:
    turns = TokenizerTurns(1)
    calls = [start(turns, works, name) for name in ("a1", "a2", "a3", "b1", "c1")]
    for begun in (["a1"], ["a1", "a2"], ["a1", "a2", "b1"], ["a1", "a2", "b1", "c1"], ["a1", "a2", "b1", "c1", "a3"]):
        await works.until_begun(*begun)
        assert turns.num_running == 1
        works.end(begun[-1])
    assert await asyncio.gather(*calls) == ["a1", "a2", "a3", "b1", "c1"]
    await settled()
    assert turns.num_running == 0


async def test_no_tenant_has_every_thread(works: Works) -> None:
    turns = TokenizerTurns(2)
    calls = [start(turns, works, name) for name in ("a1", "a2")]
    await works.until_begun("a1")
    calls.append(start(turns, works, "b1"))
    await works.until_begun("a1", "b1")
    works.end("a1")
    await works.until_begun("a1", "b1", "a2")
    works.end("a2", "b1")
    await asyncio.gather(*calls)


async def test_tenant_with_too_much_text_in_line_is_told_to_come_back(works: Works) -> None:
    turns = TokenizerTurns(1, max_waiting_bytes=10)
    calls = [start(turns, works, "a1", 100)]
    await works.until_begun("a1")
    # A first text of any size may wait
    calls.append(start(turns, works, "b1", 100))
    calls += [start(turns, works, "a2", 5), start(turns, works, "a3", 5)]
    await settled()
    with pytest.raises(RequestError) as error:
        await turns.run("a", 1, lambda: None)
    assert (error.value.reason, error.value.quota) == (Reason.QUEUE_FULL, "tenant text to tokenize")
    assert error.value.retry_after_ms
    for call in calls[1:]:
        call.cancel()
    await settled()
    # Those that left have made room
    calls.append(start(turns, works, "a4", 10))
    works.end("a1")
    await works.until_begun("a1", "a4")
    works.end("a4")
    assert await calls[-1] == "a4"


async def test_caller_that_goes_leaves_its_thread_to_its_work(works: Works) -> None:
    turns = TokenizerTurns(1)
    gone, next_one = start(turns, works, "a1"), start(turns, works, "b1")
    await works.until_begun("a1")
    gone.cancel()
    await settled()
    assert turns.num_running == 1
    assert works.began == ["a1"]
    works.end("a1")
    await works.until_begun("a1", "b1")
    works.end("b1")
    await next_one


async def test_turn_of_a_caller_that_goes_at_that_moment_is_the_next_ones(
    works: Works, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = TokenizerTurns(1)
    start_next = turns._start_next

    def start_and_cancel() -> None:
        monkeypatch.undo()
        start_next()
        calls[1].cancel()

    calls = [start(turns, works, name) for name in ("a1", "b1", "c1")]
    await works.until_begun("a1")
    # When the thread comes free and the one whose turn it is goes before it has run
    monkeypatch.setattr(turns, "_start_next", start_and_cancel)
    works.end("a1")
    await works.until_begun("a1", "c1")
    works.end("c1")
    await calls[2]


async def test_work_that_fails_gives_its_thread_back() -> None:
    turns = TokenizerTurns(1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await turns.run("a", 1, lambda: 1 // 0)
    assert await turns.run("a", 1, lambda: 1) == 1
