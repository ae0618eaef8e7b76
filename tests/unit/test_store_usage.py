"""What accounts have used, in the ledger: each figure once, over repeats, routers and lost data."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.router.ledger.types import FIGURES, Account, AccountUsage, ExecutorUsage
from tests.support.examples import examples
from tests.support.ledger.store_pool import StorePool

DAY = 20_000
ACME = Account(DAY, "acme", 2, "", "h200")
OTHER = Account(DAY, "Müller & Söhne", 3, "style", "h200")
SYSTEM = Account(DAY, "", 0, "", "h200", is_system=True)


def figures(first: int, *others: int) -> tuple[int, ...]:
    """Figures that begin with these; the others are 0."""
    return (first, *others, *(0,) * (len(FIGURES) - 1 - len(others)))


def usage_of(totals: dict[Account, tuple[int, ...]], executor_id: str = "x", generation: int = 1) -> ExecutorUsage:
    return ExecutorUsage(executor_id, generation, tuple(AccountUsage(*one) for one in totals.items()))


async def totals_of(pool: StorePool, day: int = DAY) -> dict[Account, tuple[int, ...]]:
    return {one.account: one.figures for one in (await pool.router("reader").store.usage(day)).accounts}


async def test_repeated_and_overtaken_charges_of_any_router_count_once(store_pool: StorePool) -> None:
    a, b = store_pool.router("a").store, store_pool.router("b").store
    early = usage_of({ACME: figures(100, 5), OTHER: figures(7)})
    late = usage_of({ACME: figures(150, 9), OTHER: figures(7), SYSTEM: figures(1)})

    first = await a.charge(early)
    second = await b.charge(late)
    repeats = [await store.charge(usage) for store in (a, b) for usage in (early, late)]

    assert first.added == early.totals
    assert second.added == (AccountUsage(ACME, figures(50, 4)), AccountUsage(SYSTEM, figures(1)))
    assert all(outcome.added == () for outcome in repeats)
    assert await totals_of(store_pool) == {ACME: figures(150, 9), OTHER: figures(7), SYSTEM: figures(1)}


async def test_each_start_of_an_executor_counts_from_zero(store_pool: StorePool) -> None:
    store = store_pool.router("a").store
    await store.charge(usage_of({ACME: figures(100)}))
    await store.charge(usage_of({ACME: figures(30)}, generation=2))
    await store.charge(usage_of({ACME: figures(100)}))
    await store.charge(usage_of({ACME: figures(5)}, "y"))

    assert await totals_of(store_pool) == {ACME: figures(135)}


async def test_days_are_apart(store_pool: StorePool) -> None:
    tomorrow = Account(DAY + 1, "acme", 2, "", "h200")
    await store_pool.router("a").store.charge(usage_of({ACME: figures(1), tomorrow: figures(2)}))

    assert await totals_of(store_pool) == {ACME: figures(1)}
    assert await totals_of(store_pool, DAY + 1) == {tomorrow: figures(2)}
    assert await totals_of(store_pool, DAY + 2) == {}


async def test_sums_are_exact_beyond_the_numbers_of_lua(store_pool: StorePool) -> None:
    """A day of an executor is below 2**53 of any figure; that of thousands is not."""
    store, most = store_pool.router("a").store, 2**53 - 1
    for generation in range(3):
        await store.charge(usage_of({ACME: (most,) * len(FIGURES)}, generation=generation))
    await store.charge(usage_of({ACME: (1,) * len(FIGURES)}, generation=3))

    assert await totals_of(store_pool) == {ACME: (3 * most + 1,) * len(FIGURES)}


async def test_many_accounts_take_several_calls(store_pool: StorePool) -> None:
    accounts = {Account(DAY, f"t{number}", 2, "", "cpu"): figures(number) for number in range(1, 700)}
    outcome = await store_pool.router("a").store.charge(usage_of(accounts))

    assert len(outcome.added) == len(accounts)
    assert await totals_of(store_pool) == accounts


async def test_accounts_without_room_are_left_out_and_counted(
    store_pool: StorePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.router.ledger.codec.MAX_COUNTED", 1)
    store = store_pool.router("a").store
    outcome = await store.charge(usage_of({ACME: figures(1), OTHER: figures(2)}))

    assert (outcome.added, outcome.num_left_out) == ((AccountUsage(ACME, figures(1)),), 1)
    assert (await store.charge(usage_of({ACME: figures(3)}))).added == (AccountUsage(ACME, figures(2)),)


async def test_lost_totals_of_today_come_back_with_the_next_charge(store_pool: StorePool) -> None:
    store = store_pool.router("a").store
    await store.charge(usage_of({ACME: figures(100)}, "dead"))
    await store.charge(usage_of({ACME: figures(50)}))
    await store_pool.redis.delete(*store_pool.keys.usage(DAY))

    await store.charge(usage_of({ACME: figures(60)}))

    assert await totals_of(store_pool) == {ACME: figures(60)}


async def test_keys_expire(store_pool: StorePool) -> None:
    await store_pool.router("a").store.charge(usage_of({ACME: figures(1)}))
    totals, counted, _ = store_pool.keys.usage(DAY)

    days = [await store_pool.redis.pttl(key) / 86_400_000 for key in (totals, counted)]
    assert days == pytest.approx([91, 4], abs=0.01)


async def test_totals_are_complete_since_the_ledger_began_to_count_or_lost_them(store_pool: StorePool) -> None:
    async def since_ms(day: int) -> int | None:
        return (await store_pool.router("reader").store.usage(day)).since_ms

    store, tomorrow = store_pool.router("a").store, dataclasses.replace(ACME, day=DAY + 1)
    assert await since_ms(DAY) is None
    await store.charge(usage_of({ACME: figures(1)}))
    began_ms = await since_ms(DAY)
    assert began_ms is not None
    await store.charge(usage_of({tomorrow: figures(1)}))
    assert await since_ms(DAY) == await since_ms(DAY + 1) == began_ms

    await store_pool.redis.delete(*store_pool.keys.usage(DAY), *store_pool.keys.usage(DAY + 1))
    seconds, microseconds = await store_pool.redis.time()
    await store.charge(usage_of({ACME: figures(2)}))
    again_ms = await since_ms(DAY + 1)
    assert again_ms is not None
    assert again_ms >= seconds * 1000 + microseconds // 1000 >= began_ms


def delivered(usages: Iterable[ExecutorUsage], seed: int) -> list[ExecutorUsage]:
    """The reports in any order, some of them twice and some lost. Of an executor that died, the last one may be."""
    chance = random.Random(seed)
    several = [usage for usage in usages for _ in range(chance.randint(0, 2))]
    chance.shuffle(several)
    return several


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    growth=st.lists(
        st.tuples(
            st.sampled_from("xy"), st.integers(1, 2), st.sampled_from((ACME, OTHER, SYSTEM)), st.integers(0, 2**50)
        ),
        max_size=12,
    ),
    seed=st.integers(0, 99),
)
async def test_totals_are_the_largest_that_arrived_of_every_executor_in_any_order(
    store_pool: StorePool, growth: list[tuple[str, int, Account, int]], seed: int
) -> None:
    await store_pool.redis.delete(*store_pool.keys.usage(DAY))
    newest: dict[tuple[str, int], dict[Account, int]] = {}
    usages = []
    for executor_id, generation, account, more in growth:
        mine = newest.setdefault((executor_id, generation), {})
        mine[account] = mine.get(account, 0) + more
        usages.append(usage_of({one: figures(used) for one, used in mine.items()}, executor_id, generation))
    arrived = delivered(usages, seed)

    routers = [store_pool.router(name).store for name in ("a", "b")]
    added = [one for number, usage in enumerate(arrived) for one in (await routers[number % 2].charge(usage)).added]

    largest: dict[tuple[str, int, Account], int] = {}
    for usage in arrived:
        for one in usage.totals:
            of = (usage.executor_id, usage.generation, one.account)
            largest[of] = max(largest.get(of, 0), one.figures[0])
    expected: dict[Account, int] = {}
    for (_, _, account), used in largest.items():
        expected[account] = expected.get(account, 0) + used
    assert {one: found[0] for one, found in (await totals_of(store_pool)).items()} == {
        one: used for one, used in expected.items() if used
    }
    assert sum(one.figures[0] for one in added) == sum(expected.values())
