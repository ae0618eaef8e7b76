"""The store on a real Redis decides as the plain model does, whatever is called in whatever order at whatever time.

Three routers call their own stores; after every call the result, what each router was told, and everything in Redis are
compared with the model. Time is an argument: the scripts run with a clock that the test sets. Replies get lost and
their calls are repeated, routers and executors fall silent, and Redis is emptied.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.mailbox import Mailbox
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import Attempt, Demand, Ending, ExecutorReport, HeldSequence, LedgerEvent
from tests.property.ledger_comparison import compare
from tests.property.ledger_explain import explain
from tests.property.ledger_model import Ledger
from tests.property.store_cases import (
    ASKED_ADAPTERS,
    EXECUTORS,
    REQUESTS,
    ROUTERS,
    WHYS,
    demands,
    is_suspect,
    pool_settings,
    random_demand,
    random_report,
    repeated,
    served_adapters,
    whys,
)
from tests.property.store_records import read_records, write_histogram
from tests.support.ledger.store_pool import PATIENT, START_MS, steered_scripts

router_ids = st.sampled_from(ROUTERS)
executor_ids = st.sampled_from(EXECUTORS)
request_ids = st.sampled_from(REQUESTS)
steps_ms = st.sampled_from((1, 50, 300, 500, 999, 1000, 1999, 2001, 3001, 5001, 30_001, 60_001, 600_001))
STEPS_BACK_MS = (40, 10_000, 3_600_000)
MOST_SET_BACK_MS = 1000 * 3_600_000  # by more calls than one example makes

pool_numbers = itertools.count()

Operation = Callable[[], Coroutine[Any, Any, Any]]


class StoreMachine(RuleBasedStateMachine):
    """Does everything twice: on the stores and on the model."""

    def __init__(self, url: str, admin_url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis, self.routers_redis = connect_node(admin_url, PATIENT), connect_node(url, PATIENT)
        self.keys = PoolKeys(f"model-{next(pool_numbers)}")
        self.told: dict[str, list[LedgerEvent]] = {name: [] for name in ROUTERS}
        self.demands: dict[str, Demand] = {}
        # How far the ledger's clock is ahead of that of Redis.
        self.ahead_ms = 0

    def teardown(self) -> None:
        self.runner.run(self.redis.aclose())
        self.runner.run(self.routers_redis.aclose())
        self.runner.close()

    @initialize(pool_settings=pool_settings)
    def there_is_an_executor(self, pool_settings: LedgerSettings) -> None:
        scripts = steered_scripts()
        self.model = Ledger(pool_settings)
        self.stores = {
            name: RedisLedger(self.routers_redis, self.keys.pool, name, pool_settings, self.told[name].append, scripts)
            for name in ROUTERS
        }
        self.mailboxes = {name: Mailbox(self.routers_redis, self.keys.mailbox(name), pool_settings) for name in ROUTERS}
        self.time_passes(START_MS + MOST_SET_BACK_MS)
        self.report_as_usual("a", "x")

    @rule(seed=st.integers(0, 2**32))
    def a_while_passes(self, seed: int) -> None:
        """Many calls in the proportions of a bad day; drawn one by one, full lines would hardly come about."""
        rng = random.Random(seed)
        actions, weights = zip(*self._bad_day().items(), strict=True)
        for action in rng.choices(actions, weights, k=rng.randrange(20, 60)):
            action(rng, rng.choice(ROUTERS), rng.choice(EXECUTORS))

    def _bad_day(self) -> dict[Callable[[random.Random, str, str], None], int]:
        return {
            self._submit_something: 16,
            lambda rng, router_id, executor_id: self.settle_as_usual(router_id, executor_id): 6,
            lambda rng, router_id, executor_id: self.report_as_usual(router_id, executor_id): 8,
            lambda rng, router_id, executor_id: self.time_passes(rng.randrange(1, 700)): 6,
            lambda rng, router_id, executor_id: self.time_passes(rng.choice((2001, 3001, 5001))): 1,
            lambda rng, router_id, executor_id: self.redis_clock_is_set_back(router_id, rng.choice(STEPS_BACK_MS)): 1,
            lambda rng, router_id, executor_id: self.reap(router_id): 2,
            lambda rng, router_id, executor_id: self.renew(router_id): 1,
            lambda rng, router_id, executor_id: self.forget_who_else_is_there(router_id): 1,
            lambda rng, router_id, executor_id: self.cancel(router_id, self._something(rng).request_id, False): 2,
            lambda rng, router_id, executor_id: self.cancel(router_id, self._something(rng).request_id, True): 2,
            lambda rng, router_id, executor_id: self.explain(router_id, self._something(rng).request_id): 1,
            lambda rng, router_id, executor_id: self._verify(router_id, [self._something(rng) for _ in range(3)]): 1,
            lambda rng, router_id, executor_id: self._settle(router_id, [self._something(rng)]): 2,
            lambda rng, router_id, executor_id: self._hand_back(
                router_id, self._something(rng), 3, rng.choice(WHYS)
            ): 4,
            lambda rng, router_id, executor_id: self.adopt(router_id, self._something(rng).request_id): 2,
            lambda rng, router_id, executor_id: self._clear_suspect(router_id, self._something(rng)): 2,
            self._submit_something_again: 4,
            self._report_something: 4,
            self._lose_and_see: 5,
        }

    def _submit_something(self, rng: random.Random, router_id: str, executor_id: str) -> None:
        request_id = rng.choice((f"new {self.model.pool.num_arrivals}", rng.choice(REQUESTS)))
        self.submit(router_id, random_demand(rng, request_id))

    def _submit_something_again(self, rng: random.Random, router_id: str, executor_id: str) -> None:
        """By the same router or another, now and then of what has ended, or asking for something else."""
        known = [one for one in self.demands if one in self.model.pool.requests or one in self.model.pool.ended_ms]
        if known:
            self.submit(router_id, repeated(rng, self.demands[rng.choice(known)]))

    def _report_something(self, rng: random.Random, router_id: str, executor_id: str) -> None:
        """Of a new generation now and then, not holding all that is placed there, and holding what is not."""
        last = self.model.pool.executors.get(executor_id)
        placed, other = self._placed_on(executor_id), self._something(rng)
        self._report(router_id, random_report(rng, executor_id, last.report if last else None, placed, other))

    def _lose_and_see(self, rng: random.Random, router_id: str, executor_id: str) -> None:
        """A link breaks, its executor reports about as late as that may be from before, and its router asks again."""
        for held in self._placed_on(executor_id)[:1]:
            owner_id = self.model.pool.requests[held.request_id].owner_id or router_id
            one, most = Attempt(held.request_id, held.attempt), rng.choice((1, 2, 4))
            self._hand_back(owner_id, one, most, "lost")
            self.report_as_usual(router_id, rng.choice(EXECUTORS))
            self.time_passes(rng.choice((1, 300, 600, 601)))
            self.report_as_usual(router_id, executor_id)
            self._hand_back(owner_id, one, most, "lost")

    def _something(self, rng: random.Random) -> Attempt:
        """An attempt, mostly of a request that there is, mostly the current one."""
        known = self.model.pool.requests
        request_id = rng.choice(sorted(known)) if known and rng.random() < 0.9 else rng.choice(REQUESTS)
        attempt = known[request_id].attempt if request_id in known else 1
        return Attempt(request_id, max(0, attempt + rng.choice((0, 0, 0, 0, 1, -1))))

    # Time, crashes and routers ---------------------------------------------------------------------------------

    @rule(step_ms=steps_ms)
    def time_passes(self, step_ms: int) -> None:
        self.model.pool.now_ms += step_ms
        self.runner.run(self._set_clock())

    async def _set_clock(self) -> None:
        await self.redis.set(self.keys.key("executors:clock"), self.model.pool.now_ms - self.ahead_ms)

    @rule(router_id=router_ids, step_ms=st.sampled_from(STEPS_BACK_MS))
    def redis_clock_is_set_back(self, router_id: str, step_ms: int) -> None:
        """Between two calls: the ledger's clock goes on from where it was at the first."""
        self.renew(router_id)
        self.ahead_ms += step_ms
        self.runner.run(self._set_clock())
        self.renew(router_id)

    @rule(router_id=router_ids)
    def redis_is_emptied(self, router_id: str) -> None:
        self.runner.run(self._flush())
        self.model.flush()
        self.renew(router_id)

    async def _flush(self) -> None:
        """How far the clock was ahead is forgotten, too."""
        await self.redis.delete(*self.keys.for_script(()))
        self.model.pool.now_ms -= self.ahead_ms
        self.ahead_ms = 0

    @rule(router_id=router_ids)
    def renew(self, router_id: str) -> None:
        self.runner.run(self.stores[router_id].renew())
        self.model.register(router_id)
        self._compare_told()

    @rule(router_id=router_ids)
    def forget_who_else_is_there(self, router_id: str) -> None:
        self.stores[router_id]._peers = frozenset()

    @rule(router_id=router_ids)
    def reap(self, router_id: str) -> None:
        self._do(router_id, self.stores[router_id].reap, lambda: self.model.reap(router_id))

    @rule(router_id=router_ids)
    def everybody_attends(self, router_id: str) -> None:
        """Advances second by second, as a living router does, until the silent peers are gone."""
        for _ in range(7):
            self.time_passes(1000)
            self.reap(router_id)

    # Requests --------------------------------------------------------------------------------------------------

    @rule(router_id=router_ids, demand=demands, is_reply_lost=st.booleans())
    def submit(self, router_id: str, demand: Demand, is_reply_lost: bool = False) -> None:
        store, model = self.stores[router_id], self.model
        self.demands[demand.request_id] = demand
        self._do(router_id, lambda: store.submit(demand), lambda: model.submit(router_id, demand), is_reply_lost)

    @rule(choices=st.data(), in_its_name=st.booleans())
    def submit_again(self, choices: st.DataObject, in_its_name: bool) -> None:
        """As it was, or as one whose owner has seen its last attempt come to nothing."""
        known = self.model.pool.requests
        if known:
            request = known[choices.draw(st.sampled_from(sorted(known)))]
            router_id = request.owner_id if in_its_name and request.owner_id else choices.draw(router_ids)
            self.submit(router_id, dataclasses.replace(request.demand, digest=request.digest or "as asked"))

    @rule(router_id=router_ids, choices=st.data(), is_reply_lost=st.booleans())
    def settle(self, router_id: str, choices: st.DataObject, is_reply_lost: bool) -> None:
        self._settle(router_id, choices.draw(st.lists(self._endings(), min_size=1, max_size=3)), is_reply_lost)

    @rule(router_id=router_ids, executor_id=executor_ids)
    def settle_as_usual(self, router_id: str, executor_id: str) -> None:
        """The first of what an executor holds ends, after half of what it might have said."""
        for one in self._placed_on(executor_id)[:1]:
            demand = self.model.pool.requests[one.request_id].demand
            ending = Ending(one.request_id, one.attempt, demand.prompt_tokens, demand.max_tokens // 2, by_itself=True)
            self._settle(router_id, [ending])

    def _settle(self, router_id: str, endings: list[Attempt] | list[Ending], is_reply_lost: bool = False) -> None:
        store, model = self.stores[router_id], self.model
        self._do(router_id, lambda: store.settle(endings), lambda: model.settle(router_id, endings), is_reply_lost)

    @rule(router_id=router_ids, name=request_ids, is_own=st.booleans(), is_reply_lost=st.booleans())
    def cancel(self, router_id: str, name: str, is_own: bool, is_reply_lost: bool = False) -> None:
        store, model = self.stores[router_id], self.model
        decide = functools.partial(model.cancel, router_id, name, is_own)
        self._do(router_id, lambda: store.withdraw(name) if is_own else store.cancel(name), decide, is_reply_lost)

    @rule(router_id=router_ids, request_id=request_ids)
    def explain(self, router_id: str, request_id: str) -> None:
        self._do(
            router_id, lambda: self.stores[router_id].explain(request_id), lambda: explain(self.model.pool, request_id)
        )

    @rule(router_id=router_ids, choices=st.data())
    def verify(self, router_id: str, choices: st.DataObject) -> None:
        self._verify(router_id, choices.draw(st.lists(self._attempts(), max_size=4)))

    def _verify(self, router_id: str, waiting: list[Attempt]) -> None:
        store, model = self.stores[router_id], self.model
        self._do(router_id, lambda: store.find_forgotten(waiting), lambda: model.find_forgotten(router_id, waiting))

    @rule(router_id=router_ids, request_id=request_ids, is_reply_lost=st.booleans())
    def adopt(self, router_id: str, request_id: str, is_reply_lost: bool = False) -> None:
        store, model = self.stores[router_id], self.model
        self._do(router_id, lambda: store.adopt(request_id), lambda: model.adopt(router_id, request_id), is_reply_lost)

    @rule(router_id=router_ids, choices=st.data(), is_reply_lost=st.booleans())
    def clear_suspect(self, router_id: str, choices: st.DataObject, is_reply_lost: bool) -> None:
        self._clear_suspect(router_id, choices.draw(self._attempts()), is_reply_lost)

    def _clear_suspect(self, router_id: str, one: Attempt, is_reply_lost: bool = False) -> None:
        store, model, (name, attempt) = self.stores[router_id], self.model, (one.request_id, one.attempt)
        self._do(
            router_id,
            lambda: store.clear_suspect(name, attempt),
            lambda: model.clear_suspect(router_id, one),
            is_reply_lost,
        )

    @rule(
        router_id=router_ids, choices=st.data(), max_attempts=st.integers(1, 4), why=whys, is_reply_lost=st.booleans()
    )
    def hand_back(
        self, router_id: str, choices: st.DataObject, max_attempts: int, why: str, is_reply_lost: bool
    ) -> None:
        self._hand_back(router_id, choices.draw(self._attempts()), max_attempts, why, is_reply_lost)

    def _hand_back(
        self, router_id: str, one: Attempt, max_attempts: int, why: str, is_reply_lost: bool = False
    ) -> None:
        output, progressed = one.attempt % 2 * 5, why == "lost after tokens"
        # More with most attempts, up to the end; now and then the router does not say.
        blocks, known = None, self.model.pool.requests.get(one.request_id)
        if known and one.attempt % 5:
            blocks = min(known.demand.blocks, known.placement_blocks + one.attempt % 3)

        def call() -> Coroutine[Any, Any, Any]:
            return self.stores[router_id].hand_back(
                one.request_id,
                one.attempt,
                max_attempts,
                rejected=why == "rejected",
                preempted=why == "preempted",
                output_tokens=output,
                progressed=progressed,
                stood_still=why == "stood still",
                placement_blocks=blocks,
            )

        def decide() -> Any:
            return self.model.hand_back(router_id, one, max_attempts, why, output, progressed, blocks)

        self._do(router_id, call, decide, is_reply_lost)

    # Reports ---------------------------------------------------------------------------------------------------

    @rule(router_id=router_ids, executor_id=executor_ids)
    def report_as_usual(self, router_id: str, executor_id: str) -> None:
        """The executor holds what the ledger has placed there."""
        last = self.model.pool.executors.get(executor_id)
        generation, seq = (last.report.generation, last.report.seq + 1) if last else (5, 1)
        held = self._placed_on(executor_id)
        self._report(
            router_id,
            ExecutorReport(
                executor_id,
                generation,
                seq,
                10,
                10,
                3,
                True,
                held,
                step_ms=20,
                prefill_tokens_per_s=1000,
                output_tokens_per_s=100,
                num_standby=seq % 3,
                ends_at_reservation=seq % 4 > 0,
                **served_adapters(seq % 5 + ord(executor_id)),
            ),
        )

    @rule(
        router_id=router_ids,
        executor_id=executor_ids,
        budget=st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(0, 4)),
        accepting=st.sampled_from((True, True, True, False)),
        new_generation=st.sampled_from((0, 0, 0, 0, 1, -1)),
        new_seq=st.sampled_from((1, 1, 1, 0, -1)),
        quantile=st.sampled_from((1.0, 0.9, 0.5)),
        adapters=st.integers(0, 63).map(served_adapters),
        choices=st.data(),
        is_reply_lost=st.booleans(),
    )
    def report(
        self,
        router_id: str,
        executor_id: str,
        budget: tuple[int, int, int],
        accepting: bool,
        new_generation: int,
        new_seq: int,
        quantile: float,
        adapters: dict[str, Any],
        choices: st.DataObject,
        is_reply_lost: bool,
    ) -> None:
        last = self.model.pool.executors.get(executor_id)
        generation = (last.report.generation if last else 5) + new_generation
        seq = max(0, (last.report.seq if last else 0) + new_seq)
        blocks, overrun, sequences = budget
        held = choices.draw(self._held(executor_id))
        report = ExecutorReport(
            executor_id, generation, seq, blocks, blocks + overrun, sequences, accepting, held, quantile, **adapters
        )
        self._report(router_id, report, is_reply_lost)

    def _report(self, router_id: str, report: ExecutorReport, is_reply_lost: bool = False) -> None:
        store, model = self.stores[router_id], self.model
        self._do(router_id, lambda: store.report(report), lambda: model.report(router_id, report), is_reply_lost)

    @rule(tenant=st.sampled_from(("plain", "heavy")), max_tokens=st.sampled_from((16, 64)), output=st.integers(1, 64))
    def lengths_are_learned(self, tenant: str, max_tokens: int, output: int) -> None:
        """Many completions of another time."""
        lengths = self.model.pool.lengths
        for _ in range(40):
            lengths.learn(tenant, max_tokens, min(max_tokens, output))
        for (name, size), one in lengths.histograms.items():
            content = {"count": one.count, "bins": one.bins}
            self.runner.run(write_histogram(self.redis, self.keys, f"{name}\0{size}", content))

    # What to call with -----------------------------------------------------------------------------------------

    def _attempts(self) -> st.SearchStrategy[Attempt]:
        """Mostly current ones."""
        anything = st.builds(Attempt, request_ids, st.integers(0, 3))
        current = [Attempt(name, one.attempt) for name, one in sorted(self.model.pool.requests.items())]
        return st.sampled_from(current) | anything if current else anything

    def _endings(self) -> st.SearchStrategy[Ending]:
        used = st.tuples(st.integers(0, 60), st.integers(0, 64)) | st.just((None, None))
        return st.builds(
            lambda one, used, *how: Ending(one.request_id, one.attempt, used[0], used[1], *how),
            self._attempts(),
            used,
            st.booleans(),
            st.booleans(),
        )

    def _held(self, executor_id: str) -> st.SearchStrategy[tuple[HeldSequence, ...]]:
        """What is placed there, without some and with others."""
        placed = self._placed_on(executor_id)
        adapters = st.sampled_from(ASKED_ADAPTERS)
        anything = st.builds(HeldSequence, request_ids, st.integers(1, 4), st.integers(1, 4), adapters)
        some = st.lists(st.sampled_from(placed), unique=True) if placed else st.just([])
        others = st.lists(anything, max_size=1)
        return st.one_of(
            st.just(placed),
            st.tuples(some, others).map(lambda two: tuple({one.request_id: one for one in two[0] + two[1]}.values())),
        )

    def _placed_on(self, executor_id: str) -> tuple[HeldSequence, ...]:
        pool = self.model.pool
        return tuple(
            HeldSequence(name, pool.requests[name].attempt, pool.requests[name].demand.blocks)
            for name in pool.placed_on(executor_id)
        )

    # Comparisons -----------------------------------------------------------------------------------------------

    def _do(self, router_id: str, call: Operation, decide: Callable[[], Any], is_reply_lost: bool = False) -> None:
        """Compares what comes of a call; after a lost reply, what comes of calling again."""
        if is_reply_lost:
            self.runner.run(call())
            decide()
            self.told[router_id].clear()
            self.model.pool.told.pop(router_id, None)
        result, expected = self.runner.run(call()), decide()
        assert (result, is_suspect(result)) == (expected, is_suspect(expected))
        self._compare_told()

    def _compare_told(self) -> None:
        """Every router was told what the model says, by reply or by mailbox; in which order across both is open."""
        for name, by_mailbox in zip(ROUTERS, self.runner.run(self._read_mailboxes()), strict=True):
            assert Counter(self.told[name] + by_mailbox) == Counter(self.model.pool.told.pop(name, []))
            self.told[name].clear()

    async def _read_mailboxes(self) -> list[list[LedgerEvent]]:
        return await asyncio.gather(*(self.mailboxes[name].read() for name in ROUTERS))

    @invariant()
    def redis_holds_what_the_model_holds(self) -> None:
        compare(self.runner.run(read_records(self.redis, self.keys)), self.model.pool)
