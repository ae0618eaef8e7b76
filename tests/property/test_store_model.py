"""The store on a real Redis decides as the plain model does, whatever is called in whatever order at whatever time.

Three routers call their own stores; after every call the result, what each router was told, and everything in Redis are
compared with the model. Time is an argument: the scripts run with a clock that the test sets.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from router.store.connection import connect
from router.store.keys import POOL_KEYS
from router.store.lua import load_scripts
from router.store.mailbox import Mailbox
from router.store.settings import StoreSettings
from router.store.store import AdmissionStore
from router.store.types import Attempt, Demand, ExecutorReport, HeldSequence, RequestState, StoreEvent
from tests.property.ledger_model import SILENT_MS, TOMBSTONE_MS, Ledger
from tests.store_pool import STEERED_CLOCK

SETTINGS = StoreSettings(max_queue_requests=5)
ROUTERS = ("a", "b", "c")
EXECUTORS = ("x", "y", "z")
REQUESTS = tuple(f"r:{number}" for number in range(40))

router_ids = st.sampled_from(ROUTERS)
request_ids = st.sampled_from(REQUESTS)
demands = st.builds(
    Demand,
    request_id=request_ids,
    priority_class=st.integers(1, 3),
    blocks=st.integers(1, 8),
    sequences=st.integers(1, 2),
    deadline_ms=st.none() | st.sampled_from((0, 500, 500, 3000)),
    last_attempt=st.sampled_from((0, 0, 0, 2)),
)
steps_ms = st.sampled_from((1, 50, 50, 300, 300, 500, 500, 999, 1000, 1999, 2001, 3001, 5001, 30_001, 60_001))

pool_numbers = itertools.count()


class StoreMachine(RuleBasedStateMachine):
    """Does everything twice: on the stores and on the model."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = connect(url, SETTINGS)
        self.model = Ledger(SETTINGS.max_queue_requests, now_ms=1_000_000)
        self.told: dict[str, list[StoreEvent]] = {name: [] for name in ROUTERS}
        pool = f"model-{next(pool_numbers)}"
        scripts = load_scripts(STEERED_CLOCK)
        self.stores = {
            name: AdmissionStore(self.redis, pool, name, SETTINGS, self.told[name].append, scripts) for name in ROUTERS
        }
        self.keys = self.stores["a"]._keys
        self.mailboxes = {name: Mailbox(self.redis, self.keys.mailbox(name), SETTINGS) for name in ROUTERS}
        self._set_clock()

    def teardown(self) -> None:
        self.runner.run(self.redis.aclose())
        self.runner.close()

    @initialize()
    def there_is_an_executor(self) -> None:
        self.report_as_usual("a", "x")

    @rule(seed=st.integers(0, 2**32))
    def a_while_passes(self, seed: int) -> None:
        """Many calls in the proportions of a bad day; drawn one by one, full lines would hardly come about."""
        rng = random.Random(seed)
        actions, weights = zip(*self._bad_day().items(), strict=True)
        for action in rng.choices(actions, weights, k=rng.randrange(30)):
            action(rng, rng.choice(ROUTERS), rng.choice(EXECUTORS))

    def _bad_day(self) -> dict[Callable[[random.Random, str, str], None], int]:
        return {
            self._submit_something: 10,
            lambda rng, router_id, executor_id: self.settle_as_usual(router_id, executor_id): 6,
            lambda rng, router_id, executor_id: self.report_as_usual(router_id, executor_id): 8,
            lambda rng, router_id, executor_id: self.time_passes(rng.randrange(1, 700)): 4,
            lambda rng, router_id, executor_id: self.time_passes(rng.choice((2001, 3001, 5001))): 1,
            lambda rng, router_id, executor_id: self.reap(router_id): 2,
            lambda rng, router_id, executor_id: self.renew(router_id): 1,
            lambda rng, router_id, executor_id: self.forget_who_else_is_there(router_id): 1,
            lambda rng, router_id, executor_id: self.cancel(router_id, self._something(rng).request_id): 2,
            lambda rng, router_id, executor_id: self._settle(router_id, [self._something(rng)]): 2,
            lambda rng, router_id, executor_id: self._hand_back(
                router_id, self._something(rng), 3, rng.random() < 0.5
            ): 4,
            self._report_something: 4,
        }

    def _submit_something(self, rng: random.Random, router_id: str, executor_id: str) -> None:
        request_id = rng.choice((f"new {self.model.num_arrivals}", rng.choice(REQUESTS)))
        deadline_ms = rng.choice((None, None, 1000))
        self.submit(router_id, Demand(request_id, rng.randint(1, 3), rng.randint(1, 8), rng.randint(1, 2), deadline_ms))

    def _report_something(self, rng: random.Random, router_id: str, executor_id: str) -> None:
        """Of a new generation now and then, not holding all that is placed there, and holding what is not."""
        last = self.model.executors.get(executor_id)
        generation, seq = (last.report.generation, last.report.seq + 1) if last else (5, 1)
        held = {one.request_id: one for one in self._placed_on(executor_id) if rng.random() < 0.7}
        other = self._something(rng)
        held[other.request_id] = HeldSequence(other.request_id, max(1, other.attempt), rng.randint(1, 4))
        generation += rng.choice((0, 0, 0, 0, 1, -1))
        accepting = rng.random() < 0.9
        self._report(
            router_id,
            ExecutorReport(executor_id, generation, seq, 9, rng.randint(7, 11), 3, accepting, tuple(held.values())),
        )

    def _something(self, rng: random.Random) -> Attempt:
        """An attempt, mostly of a request that there is, mostly the current one."""
        known = sorted(self.model.requests)
        request_id = rng.choice(known) if known and rng.random() < 0.9 else rng.choice(REQUESTS)
        attempt = self.model.requests[request_id].attempt if request_id in self.model.requests else 1
        return Attempt(request_id, max(0, attempt + rng.choice((0, 0, 0, 0, 1, -1))))

    # Time and routers ------------------------------------------------------------------------------------------

    @rule(step_ms=steps_ms)
    def time_passes(self, step_ms: int) -> None:
        self.model.now_ms += step_ms
        self._set_clock()

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
        self.runner.run(self.stores[router_id].reap())
        self.model.reap(router_id)
        self._compare_told()

    # Requests --------------------------------------------------------------------------------------------------

    @rule(router_id=router_ids, demand=demands)
    def submit(self, router_id: str, demand: Demand) -> None:
        found = self.runner.run(self.stores[router_id].submit(demand))
        assert found == self.model.submit(router_id, demand)
        self._compare_told()

    @rule(choices=st.data(), in_its_name=st.booleans())
    def submit_again(self, choices: st.DataObject, in_its_name: bool) -> None:
        known = sorted(self.model.requests)
        if known:
            request = self.model.requests[choices.draw(st.sampled_from(known))]
            router_id = request.owner_id if in_its_name and request.owner_id else choices.draw(router_ids)
            self.submit(router_id, request.demand)

    @rule(router_id=router_ids, choices=st.data())
    def settle(self, router_id: str, choices: st.DataObject) -> None:
        self._settle(router_id, choices.draw(st.lists(self._attempts(), min_size=1, max_size=3)))

    @rule(router_id=router_ids, executor_id=st.sampled_from(EXECUTORS))
    def settle_as_usual(self, router_id: str, executor_id: str) -> None:
        """The first of what an executor holds ends."""
        for one in self._placed_on(executor_id)[:1]:
            self._settle(router_id, [Attempt(one.request_id, one.attempt)])

    def _settle(self, router_id: str, attempts: list[Attempt]) -> None:
        found = self.runner.run(self.stores[router_id].settle(attempts))
        assert found == self.model.settle(router_id, attempts)
        self._compare_told()

    @rule(router_id=router_ids, request_id=request_ids)
    def cancel(self, router_id: str, request_id: str) -> None:
        found = self.runner.run(self.stores[router_id].cancel(request_id))
        assert found == self.model.cancel(router_id, request_id)
        self._compare_told()

    @rule(router_id=router_ids, choices=st.data(), max_attempts=st.integers(1, 4), rejected=st.booleans())
    def hand_back(self, router_id: str, choices: st.DataObject, max_attempts: int, rejected: bool) -> None:
        self._hand_back(router_id, choices.draw(self._attempts()), max_attempts, rejected)

    def _hand_back(self, router_id: str, one: Attempt, max_attempts: int, rejected: bool) -> None:
        store = self.stores[router_id]
        has_output = one.attempt % 2 == 0
        found = self.runner.run(
            store.hand_back(one.request_id, one.attempt, max_attempts, rejected=rejected, output_tokens=int(has_output))
        )
        expected = self.model.hand_back(router_id, one.request_id, one.attempt, max_attempts, rejected, has_output)
        assert found == expected
        self._compare_told()

    # Reports ---------------------------------------------------------------------------------------------------

    @rule(router_id=router_ids, executor_id=st.sampled_from(EXECUTORS))
    def report_as_usual(self, router_id: str, executor_id: str) -> None:
        """The executor holds what the ledger has placed there."""
        last = self.model.executors.get(executor_id)
        generation, seq = (last.report.generation, last.report.seq + 1) if last else (5, 1)
        held = self._placed_on(executor_id)
        self._report(router_id, ExecutorReport(executor_id, generation, seq, 10, 10, 3, accepting=True, held=held))

    @rule(
        router_id=router_ids,
        executor_id=st.sampled_from(EXECUTORS),
        budget=st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(0, 4)),
        accepting=st.sampled_from((True, True, True, False)),
        new_generation=st.sampled_from((0, 0, 0, 0, 1, -1)),
        new_seq=st.sampled_from((1, 1, 1, 0, -1)),
        choices=st.data(),
    )
    def report(
        self,
        router_id: str,
        executor_id: str,
        budget: tuple[int, int, int],
        accepting: bool,
        new_generation: int,
        new_seq: int,
        choices: st.DataObject,
    ) -> None:
        last = self.model.executors.get(executor_id)
        generation = (last.report.generation if last else 5) + new_generation
        seq = max(0, (last.report.seq if last else 0) + new_seq)
        blocks, overrun, sequences = budget
        held = choices.draw(self._held(executor_id))
        self._report(
            router_id,
            ExecutorReport(executor_id, generation, seq, blocks, blocks + overrun, sequences, accepting, held),
        )

    def _report(self, router_id: str, report: ExecutorReport) -> None:
        found = self.runner.run(self.stores[router_id].report(report))
        assert found == self.model.report(router_id, report)
        self._compare_told()

    # What to call with -----------------------------------------------------------------------------------------

    def _attempts(self) -> st.SearchStrategy[Attempt]:
        """Mostly current ones."""
        anything = st.builds(Attempt, request_ids, st.integers(0, 3))
        current = [Attempt(name, one.attempt) for name, one in sorted(self.model.requests.items())]
        return st.sampled_from(current) | anything if current else anything

    def _held(self, executor_id: str) -> st.SearchStrategy[tuple[HeldSequence, ...]]:
        """What is placed there, without some and with others."""
        placed = self._placed_on(executor_id)
        anything = st.builds(HeldSequence, request_ids, st.integers(1, 4), st.integers(1, 4))
        some = st.lists(st.sampled_from(placed), unique=True) if placed else st.just([])
        others = st.lists(anything, max_size=1)
        return st.one_of(
            st.just(placed),
            st.tuples(some, others).map(lambda two: tuple({one.request_id: one for one in two[0] + two[1]}.values())),
        )

    def _placed_on(self, executor_id: str) -> tuple[HeldSequence, ...]:
        requests = self.model.requests
        return tuple(
            HeldSequence(name, requests[name].attempt, requests[name].demand.blocks)
            for name in self.model.placed_on(executor_id)
        )

    # Comparisons -----------------------------------------------------------------------------------------------

    def _set_clock(self) -> None:
        async def set_clock() -> None:
            await self.redis.set(self.keys.key("executors:clock"), self.model.now_ms)

        self.runner.run(set_clock())

    def _compare_told(self) -> None:
        """Every router was told what the model says, by reply or by mailbox; in which order across both is open."""
        for name, by_mailbox in zip(ROUTERS, self.runner.run(self._read_mailboxes()), strict=True):
            assert Counter(self.told[name] + by_mailbox) == Counter(self.model.told.pop(name, []))
            self.told[name].clear()

    async def _read_mailboxes(self) -> list[list[StoreEvent]]:
        return await asyncio.gather(*(self.mailboxes[name].read() for name in ROUTERS))

    @invariant()
    def redis_holds_what_the_model_holds(self) -> None:
        kept = self.runner.run(self._read_all())
        self._compare_requests(kept)
        self._compare_executors(kept)

    def _compare_requests(self, kept: dict[str, Any]) -> None:
        model = self.model
        records = {name: json.loads(text) for name, text in kept["requests"].items()}
        assert records.keys() == model.requests.keys()
        for name, request in model.requests.items():
            record, placement = records[name], request.placement
            assert record["state"] == request.state.value
            assert record["owner"] == request.owner_id
            assert (record["attempt"], record["rejections"]) == (request.attempt, request.rejections)
            if placement:
                assert (record["executor_id"], record["generation"]) == (placement.executor_id, placement.generation)
        line = [member.partition(":")[2] for one in (1, 2, 3) for member, _ in kept[f"waiting:{one}"]]
        assert line == model.line()
        in_state = {state: {n for n, one in model.requests.items() if one.state is state} for state in RequestState}
        owned = {f"{model.requests[name].owner_id}\0{name}" for name in in_state[RequestState.WAITING]}
        assert {member for member, _ in kept["waiting_by_owner"]} == owned
        assert {name for name, _ in kept["lost"]} == in_state[RequestState.LOST]
        placed = {f"{one}\0{model.requests[n].attempt}\0{n}" for one in EXECUTORS for n in model.placed_on(one)}
        assert {member for member, _ in kept["placements"]} == placed
        remembered = {name: at for name, at in kept["ended"] if model.now_ms - at <= TOMBSTONE_MS}
        assert remembered == {name: at for name, at in model.ended_ms.items() if model.is_tombstoned(name)}
        assert not remembered.keys() & records.keys()

    def _compare_executors(self, kept: dict[str, Any]) -> None:
        model = self.model
        records = {name: json.loads(text) for name, text in kept["executors"].items()}
        assert records.keys() == model.executors.keys()
        for name, executor in model.executors.items():
            record, report = records[name], executor.report
            assert (record["reserved_blocks"], record["reserved_sequences"]) == model.reserved(name)
            assert (record["generation"], record["seq"]) == (report.generation, report.seq)
            assert (record["last_report_ms"], record["audited_ms"]) == (executor.last_report_ms, executor.audited_ms)
            assert (record["suspended"], record["audit_due"]) == (executor.suspended, False)
        assert dict(kept["sizes"]) == {name: one.report.total_blocks for name, one in model.executors.items()}
        assert dict(kept["reports"]) == {name: one.last_report_ms for name, one in model.executors.items()}
        live = {n for n, one in model.executors.items() if model.now_ms - one.last_report_ms <= SILENT_MS}
        free = {name: model.available(name) for name in live}
        assert {n: at for n, at in kept["room"] if n in live} == {n: -f[0] for n, f in free.items() if f and f[1] > 0}
        assert dict(kept["routers"]) == model.routers

    async def _read_all(self) -> dict[str, Any]:
        pipeline = self.redis.pipeline()
        hashes = ("executors", "requests")
        ordered = tuple(name for name in POOL_KEYS if name not in (*hashes, "arrivals", "attended"))
        for name in hashes:
            pipeline.hgetall(self.keys.key(name))
        for name in ordered:
            pipeline.zrange(self.keys.key(name), 0, -1, withscores=True)
        return dict(zip(hashes + ordered, await pipeline.execute(), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(600)  # to find a failure takes seconds, to shrink it minutes
def test_scripts_decide_as_the_model_does(redis_url: str) -> None:
    """Invariants tested: equal results, equal events, equal state; sums, indexes and states agree."""

    class StoreMachineOnRedis(StoreMachine):
        def __init__(self) -> None:
            super().__init__(redis_url)

    run_state_machine_as_test(
        StoreMachineOnRedis,
        settings=settings(
            max_examples=80,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
