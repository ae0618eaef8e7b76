"""A modelled router's view of several sub-pools: the real `SubPoolStore`, its claims and moves, in virtual time.

`SubPoolLedger` is to a modelled router what `inflight.bench.simulation.ledger.Ledger` is with one pool. The coroutines
of `inflight.router.subpools` and `inflight.router.dispatch.moves` run on the router's `VirtualLoop`; what they await
are callbacks of the ledgers of the sub-pools, so a router may vanish wherever they wait.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, Unpack, cast

from inflight.bench.redis.wire import command
from inflight.bench.simulation.ledger import HandBackOutcome, Ledger, OnFailure, SubmitOutcome
from inflight.bench.simulation.store_link import StoreLink
from inflight.bench.timeline.timeline import US_PER_MS, Process
from inflight.bench.timeline.virtual_loop import VirtualLoop
from inflight.common.errors import Reason, RequestError
from inflight.router.dispatch.moves import Moves
from inflight.router.dispatch.waiting_audit import WaitingRequests
from inflight.router.store.ledgers import Ledgers
from inflight.router.store.settings import StoreSettings
from inflight.router.store.store import AdmissionStore
from inflight.router.store.types import (
    Attempt,
    CancelOutcome,
    Demand,
    Ending,
    ExecutorReport,
    HandBackDetails,
    PoolListener,
    PoolLoad,
    ReportOutcome,
    StoreEvent,
)
from inflight.router.subpools.assignment import share_of_settings
from inflight.router.subpools.choice import SubPoolChoice
from inflight.router.subpools.claims import Claims
from inflight.router.subpools.ledgers import RENEW_INTERVAL_MS
from inflight.router.subpools.store import SubPoolStore

T = TypeVar("T")


class SubPoolLedger:
    """One router's view of all sub-pools. Each operation answers by exactly one of its callbacks, later."""

    def __init__(
        self,
        links: Sequence[StoreLink],
        process: Process,
        router_id: str,
        settings: StoreSettings,
        on_event: Callable[[StoreEvent], None],
        requests: WaitingRequests,
    ) -> None:
        self.router_id = router_id
        self._loop = loop = VirtualLoop(links[0].timeline, process)  # type: ignore[abstract]
        share = share_of_settings(settings, len(links))
        self.stores: list[VirtualStore] = []

        def open_store(number: int, on_event: Callable[[StoreEvent], None]) -> AdmissionStore:
            store = VirtualStore(loop, Ledger(links[number], process, router_id, share, on_event))
            self.stores.append(store)
            return cast(AdmissionStore, store)

        homes = [(cast(Ledgers, _Server(loop, link, process)), link.keys) for link in links]
        claims = Claims(homes, router_id, share)
        choice = SubPoolChoice(len(links), random.Random(router_id))
        self.store = SubPoolStore(len(links), open_store, claims, on_event, choice, clock=loop.time)
        self._moves = Moves(requests, self.store, clock=loop.time)

    def start(self, phase_us: int) -> None:
        """Renews, reaps and moves from now on; `phase_us` keeps routers apart."""
        for store in self.stores:
            store.ledger.start(phase_us, RENEW_INTERVAL_MS * US_PER_MS)
        self._loop.start(self._run(), lambda result: None)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.store.run())
            tasks.create_task(self._moves.run())

    def close(self) -> None:
        """The router is gone."""
        self._loop.close()
        for store in self.stores:
            store.ledger.close()

    @property
    def num_moved(self) -> int:
        """Requests that this router has taken out of a queue so that they wait in another."""
        return sum(store.num_taken_out for store in self.stores)

    def submit(self, demand: Demand, on_result: Callable[[SubmitOutcome], None], on_failure: OnFailure) -> None:
        self._ask(lambda: self.store.submit(demand), on_result, on_failure)

    def settle(self, endings: Sequence[Ending], on_result: Callable[[int], None], on_failure: OnFailure) -> None:
        self._ask(lambda: self.store.settle(endings), on_result, on_failure)

    def cancel(
        self, request_id: str, is_own: bool, on_result: Callable[[CancelOutcome], None], on_failure: OnFailure
    ) -> None:
        self._ask(lambda: self.store.cancel(request_id, is_own=is_own), on_result, on_failure)

    def hand_back(
        self,
        request_id: str,
        attempt: int,
        max_attempts: int,
        details: HandBackDetails,
        on_result: Callable[[HandBackOutcome], None],
        on_failure: OnFailure,
    ) -> None:
        self._ask(lambda: self.store.hand_back(request_id, attempt, max_attempts, **details), on_result, on_failure)

    def absolve(self, request_id: str, attempt: int) -> None:
        self._ask(lambda: self.store.absolve(request_id, attempt), lambda result: None, lambda: None)

    def report_all(
        self,
        reports: Sequence[ExecutorReport],
        on_result: Callable[[Sequence[ReportOutcome]], None],
        on_failure: OnFailure,
    ) -> None:
        self._ask(lambda: self.store.report_all(reports), on_result, on_failure)

    def listen(self, listener: PoolListener) -> None:
        self.store.listen(listener)

    def find_forgotten(
        self,
        waiting: Sequence[Attempt],
        on_result: Callable[[frozenset[str]], None],
        on_failure: OnFailure | None = None,
    ) -> None:
        self._ask(lambda: self.store.find_forgotten(waiting), on_result, on_failure or (lambda: None))

    def _ask(self, call: Callable[[], Awaitable[Any]], on_result: Callable[[Any], None], on_failure: OnFailure) -> None:
        async def ask() -> Callable[[], None]:
            try:
                result = await call()
            except RequestError as error:
                if error.reason is not Reason.STORE_UNAVAILABLE:
                    raise
                return on_failure
            return lambda: on_result(result)

        self._loop.start(ask(), lambda answer: answer())


class VirtualStore:
    """One sub-pool as `SubPoolStore` sees it: the methods of `AdmissionStore` that it uses, over callbacks."""

    def __init__(self, loop: VirtualLoop, ledger: Ledger) -> None:
        self.ledger = ledger
        self.router_id = ledger.router_id
        self.num_taken_out = 0
        self._loop = loop

    @property
    def load(self) -> PoolLoad | None:
        return self.ledger.load

    async def run(self) -> None:
        """Waits for ever: the ledger renews, reaps and reads its mailbox by itself."""
        await self._loop.create_future()

    async def aclose(self) -> None:
        """Does nothing: no call is cancelled."""

    async def submit(self, demand: Demand) -> SubmitOutcome:
        return await self._answer(lambda answer, fail: self.ledger.submit(demand, answer, fail))

    async def settle(self, endings: Sequence[Attempt | Ending]) -> int:
        ended = [one if isinstance(one, Ending) else Ending(one.request_id, one.attempt) for one in endings]
        return await self._answer(lambda answer, fail: self.ledger.settle(ended, answer, fail))

    async def cancel(self, request_id: str, *, is_own: bool = False) -> CancelOutcome:
        return await self._answer(lambda answer, fail: self.ledger.cancel(request_id, is_own, answer, fail))

    async def take_out(self, request_id: str) -> CancelOutcome:
        answered: asyncio.Future[CancelOutcome] = self._loop.create_future()
        self.ledger.take_out(request_id, answered.set_result, lambda: answered.set_exception(_unavailable()))
        found = await answered
        self.num_taken_out += 1
        return found

    async def hand_back(
        self, request_id: str, attempt: int, max_attempts: int, **details: Unpack[HandBackDetails]
    ) -> HandBackOutcome:
        return await self._answer(
            lambda answer, fail: self.ledger.hand_back(request_id, attempt, max_attempts, details, answer, fail)
        )

    async def absolve(self, request_id: str, attempt: int) -> None:
        self.ledger.absolve(request_id, attempt)

    async def report_all(self, reports: Sequence[ExecutorReport]) -> Sequence[ReportOutcome]:
        return await self._answer(lambda answer, fail: self.ledger.report_all(reports, answer, fail))

    async def find_forgotten(self, waiting: Sequence[Attempt]) -> frozenset[str]:
        return await self._answer(lambda answer, fail: self.ledger.find_forgotten(waiting, answer, fail))

    def listen(self, listener: PoolListener) -> None:
        self.ledger.listen(listener)

    async def _answer(self, ask: Callable[[Callable[[T], None], OnFailure], None]) -> T:
        answered: asyncio.Future[T] = self._loop.create_future()
        ask(answered.set_result, lambda: answered.set_exception(_unavailable()))
        return await answered


class _Server:
    """The Redis of a sub-pool, for the scripts of claims: what `Claims` uses of
    `inflight.router.store.ledgers.Ledgers`."""

    def __init__(self, loop: VirtualLoop, link: StoreLink, process: Process) -> None:
        self._loop = loop
        self._link = link
        self._process = process

    @asynccontextmanager
    async def turn(self, kind: str) -> AsyncIterator[None]:
        """Every call has its turn at once."""
        yield

    async def run_source(self, source: str, keys: Sequence[str], *args: str | int) -> Any:
        answered: asyncio.Future[Any] = self._loop.create_future()
        self._link.send(
            "",
            command("EVAL", source, len(keys), *keys, *args),
            lambda raw: self._process.run(answered.set_result, raw),
            lambda: self._process.run(answered.set_exception, _unavailable()),
        )
        return await answered


def _unavailable() -> RequestError:
    return RequestError(Reason.STORE_UNAVAILABLE, "Redis is away")
