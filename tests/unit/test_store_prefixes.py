"""Placement by cached prefixes, with a price for the fullness of the executor and a bound on the wait there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.router.ledger.types import Demand
from tests.support.ledger.store_pool import RouterSide, StorePool


async def place(a: RouterSide, request_id: str, prefixes: tuple[str, ...] = (), blocks: int = 1) -> str:
    """The executor that gets it."""
    return (await a.place_demand(Demand(request_id, 2, blocks, prefix_hashes=prefixes))).executor_id


async def two_executors(pool: StorePool) -> RouterSide:
    """x, which is a little larger and so the first choice, and y."""
    a = pool.router("a")
    await a.store.report(pool.next_report("x", blocks=21))
    await a.store.report(pool.next_report("y", blocks=20))
    return a


async def test_prompt_goes_where_its_beginning_is_held(store_pool: StorePool) -> None:
    a = await two_executors(store_pool)
    assert await place(a, "first turn", ("p",), blocks=3) == "x"

    assert await place(a, "other") == "y"
    assert await place(a, "second turn", ("p", "pq")) == "x"


async def test_longest_beginning_counts(store_pool: StorePool) -> None:
    a = await two_executors(store_pool)
    assert await place(a, "short", ("p",), blocks=2) == "x"
    assert await place(a, "long", ("q", "pq"), blocks=1) == "y"
    assert await place(a, "in between", ("q",), blocks=1) == "y"

    assert await place(a, "both", ("p", "pq")) == "y"


def prompt_of(name: str, tokens: int, prefixes: tuple[str, ...], deadline_ms: int | None = None) -> Demand:
    """A request with a prompt of so many tokens, in blocks of one; the last of its prefixes is all of it. What is
    called `holder` takes so many blocks that most room is on the other executor."""
    blocks = 15 if name == "holder" else 1
    return Demand(
        name, 2, blocks, prompt_tokens=tokens, prefix_hashes=prefixes, block_size=1, deadline_ms=deadline_ms
    )  # fmt: skip


async def two_fast_executors(pool: StorePool) -> RouterSide:
    """x, the first choice, and y; each computes a token of a prompt in a millisecond."""
    a = pool.router("a")
    await a.store.report(pool.next_report("x", blocks=2100, sequences=800, prefill_tokens_per_s=1000))
    await a.store.report(pool.next_report("y", blocks=2090, sequences=80, prefill_tokens_per_s=1000))
    return a


async def executor_of(a: RouterSide, demand: Demand) -> str:
    """Where it is placed."""
    return (await a.place_demand(demand)).executor_id


async def test_prompt_stays_with_its_prefix_until_prompts_there_take_longer_than_it_saves(
    store_pool: StorePool,
) -> None:
    a = await two_fast_executors(store_pool)
    assert await executor_of(a, prompt_of("holder", 256, ("p",))) == "x"
    await store_pool.wait(100)
    # 156 ms of prompts are in front of what shares 256 tokens with them
    assert await executor_of(a, prompt_of("second", 512, ("p", "pq"))) == "x"
    # Then another 256 ms: more than computing the prefix elsewhere takes
    assert await executor_of(a, prompt_of("third", 512, ("p", "pr"))) == "y"


async def test_prefix_that_several_prompts_share_is_found_on_every_executor_that_was_given_it(
    store_pool: StorePool,
) -> None:
    a = await two_fast_executors(store_pool)
    assert await executor_of(a, prompt_of("holder", 1100, ("p", "pa"))) == "x"
    # It would wait there for more than it saves.
    assert await executor_of(a, prompt_of("second", 1100, ("p", "pb"))) == "y"
    # Now both hold it, so each prompt goes where less is in front. The price of y rises faster: it has fewer seats.
    after = [await executor_of(a, prompt_of(f"later {one}", 1100, ("p", f"q{one}"))) for one in range(8)]
    assert min(after.count("x"), after.count("y")) >= 3


class HybridExecutors:
    """x, the first choice, and y, whose model has recurrent layers. Each computes a token of a prompt in a
    millisecond."""

    def __init__(self, pool: StorePool) -> None:
        self.pool = pool
        self.a = pool.router("a")
        self.has_begun = False

    async def report(self, executor_id: str, *names: str, lists_all: bool = True) -> None:
        """The states that it keeps."""
        # Once x has a prompt, y is where prompts go that find nothing on x.
        is_first = executor_id == ("y" if self.has_begun else "x")
        report = self.pool.next_report(
            executor_id, blocks=2100 if is_first else 2090, sequences=800, prefill_tokens_per_s=1000
        )
        await self.a.store.report(replace(report, checkpoints=names, lists_all_checkpoints=lists_all))

    async def begin(self) -> None:
        """A prompt of 256 tokens on x, of which it keeps two states, and time to compute it."""
        await self.report("x")
        await self.report("y")
        assert await self.place("holder", 256, "p:96", "pq:240") == "x"
        self.has_begun = True
        await self.report("x")
        await self.report("y")
        await self.pool.wait(100)

    async def place(self, name: str, tokens: int, *prefixes: str) -> str:
        """The executor that gets a prompt, which ends at once."""
        executor_id = await executor_of(self.a, prompt_of(name, tokens, prefixes))
        await self.a.store.cancel(name)
        return executor_id

    async def pass_time(self) -> None:
        await self.pool.wait(256 + 3001)


@pytest.mark.parametrize(("kept", "executor_id"), [(("p",), "y"), (("p", "pq"), "x")])
async def test_prefix_counts_as_far_as_its_executor_keeps_a_state(
    store_pool: StorePool, kept: tuple[str, ...], executor_id: str
) -> None:
    pool = HybridExecutors(store_pool)
    await pool.begin()
    await pool.pass_time()
    await pool.report("x", *kept)
    await pool.report("y")
    assert await pool.place("in front", 246, "p:96") == "x"
    # 150 ms of prompts are in front of it on x, which is worth it for 240 tokens and not for 96.
    assert await pool.place("second", 300, "p:96", "pq:240") == executor_id


async def test_prefix_whose_state_was_dropped_does_not_count(store_pool: StorePool) -> None:
    pool = HybridExecutors(store_pool)
    await pool.begin()
    await pool.pass_time()
    await pool.report("x", "p", "pq")
    await pool.report("y")
    assert await pool.place("second", 260, "p:96", "pq:240") == "x"
    await pool.pass_time()
    await pool.report("x")
    await pool.report("y")
    assert await pool.place("third", 260, "p:96", "pq:240") == "y"


async def test_state_counts_as_kept_until_it_can_have_been_reported(store_pool: StorePool) -> None:
    pool = HybridExecutors(store_pool)
    await pool.begin()
    # As the prompts of a fork, it comes before the first one is computed.
    assert await pool.place("fork", 260, "p:96", "pq:240") == "x"
    await store_pool.wait(1500)
    await pool.report("x")
    await pool.report("y")
    assert await pool.place("next turn", 260, "p:96", "pq:240") == "x"
