"""Turns of calls to Redis: kinds alternate, each kind in order of arrival, and only silence refuses them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from inflight.router.ledger.calls import Turns
from inflight.router.ledger.connection import NotSent
from inflight.router.ledger.settings import LedgerSettings
from tests.support.clock import Clock


class Calls:
    """Calls that begin in their turn and end when the test says so."""

    def __init__(self, max_connections: int = 2) -> None:
        self.clock = Clock(0.0)
        self.turns = Turns(LedgerSettings(max_connections=max_connections, call_timeout_ms=2000), self.clock)
        self.begun: list[str] = []
        self.refused: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def start(self, kind: str, name: str) -> asyncio.Task[None]:
        self._ends[name] = asyncio.Event()
        return asyncio.create_task(self._call(kind, name))

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settled()

    async def _call(self, kind: str, name: str) -> None:
        try:
            async with self.turns.turn(kind):
                self.begun.append(name)
                await self._ends[name].wait()
        except NotSent:
            self.refused.append(name)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_half_of_the_connections_are_left_to_calls_that_need_no_turn() -> None:
    calls = Calls(max_connections=6)
    started = [calls.start("cancel", f"c{number}") for number in range(5)]
    await settled()
    assert calls.begun == ["c0", "c1", "c2"]
    for one in started:
        one.cancel()
    await asyncio.wait(started)


async def test_kinds_alternate_and_each_kind_is_served_in_order_of_arrival() -> None:
    calls = Calls()
    for name in ("c0", "c1", "c2", "c3"):
        calls.start("cancel", name)
    for name in ("s0", "s1"):
        calls.start("submit", name)
    await settled()
    for name in ("c0", "c1", "s0", "c2", "s1", "c3"):
        assert calls.begun[-1] == name
        await calls.end(name)
    assert calls.refused == []


async def test_caller_that_goes_away_leaves_its_turn_to_the_next() -> None:
    calls = Calls()
    calls.start("cancel", "first")
    waiting, goes = calls.start("cancel", "waiting"), calls.start("cancel", "goes")
    calls.start("cancel", "last")
    await settled()
    goes.cancel()
    await settled()
    # One goes in the moment that it is given the turn
    calls._ends["first"].set()
    while "first" in calls.begun and not waiting.done() and len(calls.turns._waiting.get("cancel", ())) > 2:
        await asyncio.sleep(0)
    waiting.cancel()
    await settled()
    assert calls.begun[-1] == "last"
    await calls.end("last")
    assert calls.turns._num_free == 1
    for one in (waiting, goes):
        with suppress(asyncio.CancelledError):
            await one


@pytest.mark.parametrize("answers", [True, False])
async def test_calls_are_refused_a_turn_only_when_redis_has_been_silent_for_as_long_as_a_call_takes(
    answers: bool,
) -> None:
    calls = Calls()
    calls.start("renew", "under way")
    calls.start("cancel", "old")
    await settled()
    calls.clock.now_s = 1.5
    calls.start("cancel", "new")
    await settled()
    if answers:
        calls.turns.heard()
    calls.clock.now_s = 2.5
    calls.turns.missed()
    await settled()
    assert calls.refused == ([] if answers else ["old"])
    await calls.end("under way")
    assert calls.begun[-1] == ("old" if answers else "new")
    for name in ("old", "new"):
        await calls.end(name)
