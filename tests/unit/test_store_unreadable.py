"""Contents of Redis that no router wrote: they count as lost, and the ledger is built again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from inflight.router.ledger.keys import POOL_KEYS
from inflight.router.ledger.mailbox import Mailbox
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.types import (
    Demand,
    Ending,
    HeldSequence,
    LeaseLapsed,
    LedgerEvent,
    Placement,
    TenantLimits,
)
from tests.support.ledger.store_pool import RouterSide, StorePool

HASHES = ("executors", "requests", "tenants", "lengths", "endings", "adapters", "prefixes", "attended")
# All that a router calls. After any of them nothing unreadable is left in its way.
CALLS: dict[str, Callable[[RedisLedger], Awaitable[object]]] = {
    "settle": lambda store: store.settle([Ending("r", 1, 1, 1)]),
    "submit": lambda store: store.submit(Demand("n", 2, blocks=1)),
    "hand_back": lambda store: store.hand_back("q", 1, 2, rejected=True),
    "cancel": lambda store: store.cancel("q"),
    "adopt": lambda store: store.adopt("r"),
    "clear_suspect": lambda store: store.clear_suspect("r", 1),
    "explain": lambda store: store.explain("q"),
    "check_rates": lambda store: store.check_rates("t", TenantLimits(requests_per_s=5), 1, takes=True),
    "find_forgotten": lambda store: store.find_forgotten([]),
    "renew": lambda store: store.renew(),
    "reap": lambda store: store.reap(),
    "snapshot": lambda store: store.snapshot(10),
}


async def with_work(pool: StorePool) -> RedisLedger:
    """A router with a request that is placed and one that waits."""
    a = pool.router("a")
    await a.store.report(pool.next_report(blocks=4))
    await a.place("r", 4)
    await a.queue(Demand("q", 2, blocks=1))
    return a.store


async def replace(pool: StorePool, key: str, kind: str) -> None:
    """Puts something else in a key's place."""
    is_hash = key.endswith(HASHES)
    if kind == "no record":
        if not is_hash:
            await pool.redis.set(key, "x")
        for field in await pool.redis.hkeys(key) if is_hash else ():
            await pool.redis.hset(key, field, "x")
        return
    await pool.redis.delete(key)
    match kind:
        case "string":
            await (pool.redis.hset(key, "a", "b") if key.endswith(":state") else pool.redis.set(key, "x"))
        case "list":
            await pool.redis.rpush(key, "x")
        case "stream":
            await pool.redis.xadd(key, {"a": "b"})


def places() -> list[tuple[str, str]]:
    """Each key with something of another type in its place, which Redis refuses whatever it is; and no records."""
    kinds = [*zip(POOL_KEYS, itertools.cycle(("string", "list", "stream")))]
    return kinds + [(name, "no record") for name in ("executors", "requests", "tenants", "state")]


@pytest.mark.parametrize(("name", "kind"), places())
async def test_pool_with_an_unreadable_key_is_built_again(store_pool: StorePool, name: str, kind: str) -> None:
    store = await with_work(store_pool)
    await replace(store_pool, store_pool.keys.key(name), kind)
    for call in CALLS.values():
        await call(store)
    # The executor reports what it holds, and the router submits again what waits
    held = (HeldSequence("r", 1, 4),)
    await store_pool.wait(3000)
    await store.renew()
    for _ in range(2):
        await store.report(store_pool.next_report(blocks=10, held=held))
        await store_pool.wait(1000)
    assert await store.submit(Demand("again", 2, blocks=6)) == Placement("again", 1, "x", 1, blocks=6)
    await store.settle([Ending("r", 1, 1, 1), Ending("n", 1, 1, 1), Ending("again", 1, 1, 1)])
    await store_pool.wait(3000)
    await store.report(store_pool.next_report(blocks=10))
    assert await store_pool.reserved_blocks() == {"x": 0}
    assert isinstance(await store.submit(Demand("last", 2, blocks=10)), Placement)


async def test_readable_state_survives_errors_of_the_server(store_pool: StorePool) -> None:
    store = await with_work(store_pool)
    await store_pool.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(Exception, match="does not answer"):
            await store.submit(Demand("n", 2, blocks=1))
    finally:
        await store_pool.redis.config_set("maxmemory", 0)
    assert await store_pool.reserved_blocks() == {"x": 4}


ENTRIES: dict[str, dict[Any, Any]] = {
    "no kind": {"a": "b"},
    "unknown kind": {"kind": "greeting", "request_id": "r"},
    "no request": {"kind": "placed"},
    "attempt that is no number": {"kind": "cancel", "request_id": "r", "attempt": "x"},
    "attempt of 2^32": {"kind": "cancel", "request_id": "r", "attempt": str(2**32)},
    "attempt below zero": {"kind": "preempt", "request_id": "r", "attempt": "-1"},
    "blocks of 2^40": {
        "kind": "placed",
        "request_id": "r",
        "attempt": "1",
        "executor_id": "x",
        "generation": "1",
        "blocks": str(2**40),
    },
    "time that is none": {"kind": "taken_over", "request_id": "r", "at_ms": ""},
    "no text": {"kind": b"\xff\xfe", "request_id": "r"},
}


async def told(mailbox: Mailbox, number: int, fails: bool = False) -> list[LedgerEvent]:
    """The first events that a mailbox delivers."""
    events: list[LedgerEvent] = []
    enough = asyncio.Event()

    def on_event(event: LedgerEvent) -> None:
        events.append(event)
        if len(events) >= number:
            enough.set()
        if fails and not isinstance(event, LeaseLapsed):
            raise AssertionError("an event that the life cycle does not allow")

    reading = asyncio.create_task(mailbox.run(on_event, lambda cause: None))
    async with asyncio.timeout(60):
        await asyncio.wait((reading, asyncio.create_task(enough.wait())), return_when=asyncio.FIRST_COMPLETED)
    assert not reading.done()
    reading.cancel()
    return events


PLACED = Placement("q", 1, "x", 1, blocks=1)


async def with_two_routers(pool: StorePool) -> tuple[RouterSide, RouterSide]:
    """Router a, whose request waits for the only block, and router b."""
    a, b = pool.router("a"), pool.router("b")
    await a.store.renew()
    await b.store.renew()
    await b.store.report(pool.next_report(blocks=1))
    await b.place("r")
    await a.queue(Demand("q", 2, blocks=1))
    return a, b


@pytest.mark.parametrize("name", ENTRIES)
async def test_entry_of_a_mailbox_that_no_script_writes_is_skipped(store_pool: StorePool, name: str) -> None:
    a, b = await with_two_routers(store_pool)
    await store_pool.redis.xadd(store_pool.keys.mailbox("a"), ENTRIES[name])
    assert await told(a.mailbox, 1) == [LeaseLapsed(is_certain=False)]
    # What comes next arrives
    await b.store.settle([Ending("r", 1, 1, 1)])
    assert await told(a.mailbox, 1) == [PLACED]


async def test_event_that_cannot_be_applied_ends_nothing(store_pool: StorePool) -> None:
    a, b = await with_two_routers(store_pool)
    await b.store.settle([Ending("r", 1, 1, 1)])
    assert await told(a.mailbox, 2, fails=True) == [PLACED, LeaseLapsed(is_certain=False)]


@pytest.mark.parametrize("kind", ["string", "last id"])
async def test_mailbox_that_cannot_be_used_is_replaced(store_pool: StorePool, kind: str) -> None:
    a, b = await with_two_routers(store_pool)
    key = store_pool.keys.mailbox("a")
    await store_pool.redis.delete(key)
    if kind == "string":
        await store_pool.redis.set(key, "x")
        assert await told(a.mailbox, 1) == [LeaseLapsed(is_certain=False)]
    else:
        await store_pool.redis.xadd(key, {"a": "b"}, id="18446744073709551615-18446744073709551615")
    await b.store.settle([Ending("r", 1, 1, 1)])
    if kind == "string":
        assert await told(a.mailbox, 1) == [PLACED]
    else:  # found by the first script that writes there, so the ledger is lost as well
        assert await b.store.explain("q") is None
