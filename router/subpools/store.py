"""The sub-pools of one model: `model#0`, `model#1`, …, each with executors, queue and ledger of its own.

Redis runs the scripts of a pool one after the other. Sub-pools have different hash tags, so they are on different
nodes of a cluster, or on several servers, and their scripts run at the same time. `SubPoolStore` is to its users what
the `AdmissionStore` of a single pool is. It passes each call to the sub-pool that it concerns:

- An executor belongs to one sub-pool, by its id (`inflight.router.subpools.assignment`).
- A new request goes where `inflight.router.subpools.choice` says, and to another sub-pool if that one refuses it. If a
  client can name it, this router claims the id first (`inflight.router.subpools.claims`): a request is in one ledger
  only.
- Later calls go to the sub-pool that has the request. This router remembers it for its own requests; for others it
  reads the claim, and else asks all sub-pools.

A sub-pool whose Redis does not answer delays no other: ends for it wait here, and its reports are not waited for.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, Unpack

from inflight.common.errors import Reason, RequestError
from inflight.router.store.store import AdmissionStore, SubmitOutcome
from inflight.router.store.types import (
    Adopted,
    Attempt,
    Cancelled,
    CancelOutcome,
    CancelRequested,
    Demand,
    Dropped,
    Duplicate,
    Ending,
    ExecutorReport,
    Explanation,
    HandBackDetails,
    HandBackRefusal,
    LeaseLapsed,
    LedgerState,
    Lost,
    Placement,
    PoolListener,
    Queued,
    Refused,
    ReportOutcome,
    Snapshot,
    StoreEvent,
    TakenOver,
    TenantLimits,
)
from inflight.router.subpools.assignment import home_of, merged, open_to, share_of_limits, without_bounds
from inflight.router.subpools.choice import SubPoolChoice
from inflight.router.subpools.claims import Claims

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Requests whose sub-pool this router remembers. It asks for those that are forgotten.
MAX_REMEMBERED = 200_000
RETRY_S = 0.5
RETRY_AFTER_MS = 1_000
# Between the two steps of a move, if Redis answers.
MOVE_S = 0.05
RENEW_CLAIMS_S = 5.0
MAX_RENEWED_AT_ONCE = 32

# The id that a router makes for a request without one, and of its choices.
MADE_BY_ROUTER = re.compile(r"(?:.*/)?[0-9a-f]{32}(?:~\d+)?")

# The most informative refusal is passed on.
REFUSALS = (
    Reason.RATE_LIMITED,
    Reason.QUEUE_FULL,
    Reason.DEADLINE_UNMEETABLE,
    Reason.NEVER_FITS,
    Reason.NO_EXECUTOR,
)
# After so many sub-pools whose queue is full or too slow no other is asked.
MAX_FULL = 3
FULL = (Reason.QUEUE_FULL, Reason.DEADLINE_UNMEETABLE)
STATES = (LedgerState.PLACED, LedgerState.WAITING, LedgerState.LOST, LedgerState.ENDED)


class SubPoolStore:
    """One router's view of the sub-pools of a model. `open_store` returns the store of a sub-pool by its number; the
    events of all of them go to `on_event`. Methods are those of `AdmissionStore`, which documents them."""

    def __init__(
        self,
        num_subpools: int,
        open_store: Callable[[int, Callable[[StoreEvent], None]], AdmissionStore],
        claims: Claims,
        on_event: Callable[[StoreEvent], None],
        choice: SubPoolChoice | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stores = [open_store(number, partial(self._on_event, number)) for number in range(num_subpools)]
        self.router_id = self.stores[0].router_id
        self._claims = claims
        self._clock = clock
        self._deliver = on_event
        self.choice = choice or SubPoolChoice(num_subpools)
        self._where: OrderedDict[str, int] = OrderedDict()
        # Requests that are on their way to another sub-pool: calls about them wait.
        self._moving: dict[str, asyncio.Future[None]] = {}
        # Own claims, with the time at which each was written.
        self._claimed_s: OrderedDict[str, float] = OrderedDict()
        self._unsettled: defaultdict[int, list[Attempt | Ending]] = defaultdict(list)
        # Requests with ends that a sub-pool does not know yet because it is away, and the calls that tell it.
        self._late: set[str] = set()
        self._settling_late: set[asyncio.Task[int]] = set()
        self._reporting: dict[int, asyncio.Task[list[ReportOutcome]]] = {}

    async def run(self) -> None:
        """Runs the stores of all sub-pools until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for store in self.stores:
                tasks.create_task(store.run())
            tasks.create_task(self._renew_claims())
            tasks.create_task(self._settle_again())

    async def aclose(self) -> None:
        await self.settle(())
        await asyncio.gather(*(store.aclose() for store in self.stores))

    # Requests --------------------------------------------------------------------------------------------------

    async def submit(self, demand: Demand) -> SubmitOutcome:
        """Submits to the sub-pool that has the request, else to the chosen one, and to others if that one refuses."""
        await self._moved(demand.request_id)
        if demand.request_id in self._late:  # it could get the placement that is about to end
            text = "an earlier end of this request is not known to the admission store yet"
            raise RequestError(Reason.STORE_UNAVAILABLE, text, retry_after_ms=RETRY_AFTER_MS)
        allowed = self.open_to(demand)
        order = await self._order(demand, allowed)
        asked = replace(demand, limits=without_bounds(demand.limits), num_choices=0) if demand.is_served else demand
        asked = replace(asked, limits=share_of_limits(asked.limits, len(allowed)))
        refusals: list[Refused] = []
        for index, number in enumerate(order):
            # The sub-pool that has refused the request does not have it. Another router may have it by now.
            if index and not await self._claim_moves(demand, order[index - 1], number):
                break
            outcome = await self._submit_to(number, asked)
            if not isinstance(outcome, Refused) or outcome.reason is Reason.TAKEN_OVER:
                return outcome
            refusals.append(outcome)
            if sum(refused.reason in FULL for refused in refusals) == MAX_FULL:
                break
        return min(refusals, key=lambda refused: REFUSALS.index(refused.reason))

    async def _claim_moves(self, demand: Demand, source: int, target: int) -> bool:
        """Moves the claim of a request, if it has one. Returns False if that is not this router's."""
        return not self._is_claimed(demand) or await self._claims.move(demand.request_id, source, target)

    async def _order(self, demand: Demand, allowed: Sequence[int]) -> list[int]:
        """Returns the sub-pools to which the request may go, in the order in which they are asked."""
        known = self._where.get(demand.request_id)
        order = self.order_for(demand, allowed)
        if not self._is_claimed(demand):
            return order if known is None else _first(known, order)
        chosen = order[0] if known is None else known
        found = await self._claims.claim(demand.request_id, chosen, takes_over=not demand.is_served)
        self._claimed_s[demand.request_id] = self._clock()
        self._claimed_s.move_to_end(demand.request_id)
        return _first(found, order)

    async def _submit_to(self, number: int, demand: Demand) -> SubmitOutcome:
        self._remember(demand.request_id, number)  # also if the reply is lost
        outcome = await self._heard(number, self.stores[number].submit(demand))
        if isinstance(outcome, Refused | Duplicate | Dropped):
            self._where.pop(demand.request_id, None)
        else:
            self.choice.submitted(demand, number, is_queued=isinstance(outcome, Queued))
        return outcome

    async def check_rates(
        self, tenant: str, limits: TenantLimits, tokens: int, request_id: str = "", *, takes: bool = False
    ) -> Refused | None:
        """Returns a refusal if each sub-pool that the tenant uses refuses its part."""
        allowed = open_to(tenant, limits, len(self.stores))
        share = share_of_limits(limits, len(allowed))
        refused: Refused | None = None
        for number in allowed:
            store = self.stores[number]
            refused = await self._heard(number, store.check_rates(tenant, share, tokens, request_id, takes=takes))
            if refused is None:
                return None
        return refused

    async def settle(self, endings: Sequence[Attempt | Ending]) -> int:
        """Ends placements. Those of a sub-pool that does not answer are settled later."""
        for ending in endings:
            number = self._where.pop(ending.request_id, None)
            for each in range(len(self.stores)) if number is None else (number,):
                self._unsettled[each].append(ending)
        num_settled = await asyncio.gather(*(self._settle_at(number) for number in tuple(self._unsettled)))
        return sum(num_settled)

    async def _settle_at(self, number: int) -> int:
        endings = self._unsettled.pop(number, [])
        settling = asyncio.create_task(self._settle_or_keep(number, endings))
        if self.choice.loads[number].is_away:
            self._settling_late.add(settling)
            settling.add_done_callback(self._settling_late.discard)
            self._late.update(ending.request_id for ending in endings)
            return 0
        return await settling

    async def _settle_or_keep(self, number: int, endings: list[Attempt | Ending]) -> int:
        try:
            num_settled = await self._heard(number, self.stores[number].settle(endings))
        except RequestError as error:
            logger.debug("%d ends cannot be settled in sub-pool %d yet: %s", len(endings), number, error)
            self._unsettled[number] = endings + self._unsettled[number]
            self._late.update(ending.request_id for ending in endings)
            return 0
        self._late.difference_update(ending.request_id for ending in endings)
        return num_settled

    async def _settle_again(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            if self._unsettled:
                await self.settle(())

    async def cancel(self, request_id: str, *, is_own: bool = False) -> CancelOutcome:
        """Cancels in the sub-pool that has the request."""

        async def cancel_in(store: AdmissionStore) -> CancelOutcome:
            return await store.cancel(request_id, is_own=is_own)

        def rank(outcome: CancelOutcome) -> int:
            return len(STATES) if outcome.state is None else STATES.index(outcome.state)

        outcome = await self._ask(request_id, cancel_in, rank, len(STATES))
        if outcome.state is not LedgerState.PLACED:
            self._where.pop(request_id, None)
        return outcome

    async def hand_back(
        self, request_id: str, attempt: int, max_attempts: int, **details: Unpack[HandBackDetails]
    ) -> Placement | Queued | Dropped | HandBackRefusal:
        """Hands back in the sub-pool that has the request."""

        async def hand_back_in(store: AdmissionStore) -> Placement | Queued | Dropped | HandBackRefusal:
            return await store.hand_back(request_id, attempt, max_attempts, **details)

        return await self._ask(request_id, hand_back_in, lambda found: int(found is HandBackRefusal.UNKNOWN), 1)

    async def adopt(self, request_id: str) -> Adopted | LedgerState | Refused | None:
        """Adopts from the sub-pool that has the request."""

        async def adopt_in(store: AdmissionStore) -> Adopted | LedgerState | Refused | None:
            return await store.adopt(request_id)

        def rank(found: Adopted | LedgerState | Refused | None) -> int:
            if isinstance(found, Adopted):
                return int(found.ended)
            return 3 if found is None else 2

        return await self._ask(request_id, adopt_in, rank, 3)

    async def absolve(self, request_id: str, attempt: int) -> None:
        """Clears a suspect in the sub-pool that has it."""

        async def absolve_in(store: AdmissionStore) -> None:
            await store.absolve(request_id, attempt)

        await self._ask(request_id, absolve_in, lambda _: 0, 1)

    async def explain(self, request_id: str) -> Explanation | None:
        """Returns the state of a request in the sub-pool that has it."""

        async def explain_in(store: AdmissionStore) -> Explanation | None:
            return await store.explain(request_id)

        def rank(found: Explanation | None) -> int:
            return len(STATES) if found is None else STATES.index(found.state)

        return await self._ask(request_id, explain_in, rank, len(STATES))

    async def find_forgotten(self, waiting: Sequence[Attempt]) -> frozenset[str]:
        """Asks each sub-pool for those requests that it should have. One that does not answer has forgotten none. A
        request whose sub-pool this router has forgotten, because it has too many, is not asked for."""
        by_number: defaultdict[int, list[Attempt]] = defaultdict(list)
        for one in waiting:
            number = self._where.get(one.request_id)
            if number is not None and one.request_id not in self._moving:
                by_number[number].append(one)

        async def find(number: int, asked: Sequence[Attempt]) -> frozenset[str]:
            return await self._heard(number, self.stores[number].find_forgotten(asked))

        found = await asyncio.gather(*(find(*item) for item in by_number.items()), return_exceptions=True)
        return frozenset(request_id for ids in _answers(found) for request_id in ids)

    # Moves -----------------------------------------------------------------------------------------------------

    def order_for(self, demand: Demand, allowed: Sequence[int]) -> list[int]:
        """Returns the allowed sub-pools in the order in which a new request asks them."""
        self.record_loads()
        return self.choice.order_for(demand, allowed)

    def record_loads(self) -> None:
        """Takes the loads that the sub-pools have told since."""
        for number, store in enumerate(self.stores):
            if store.load is not None and store.load is not self.choice.loads[number].told:
                self.choice.record_load(number, store.load)  # so it is not away

    def open_to(self, demand: Demand) -> tuple[int, ...]:
        """Returns the sub-pools that the request may use."""
        return open_to(demand.tenant, demand.limits, len(self.stores))

    def where(self, request_id: str) -> int | None:
        """Returns the sub-pool of a request of this router."""
        return self._where.get(request_id)

    def room_by_subpool(self) -> dict[int, int]:
        """Returns the idle sub-pools, with this router's share of the executors that have room there."""
        self.record_loads()
        return {
            number: -(-load.told.num_with_room // load.told.num_routers)
            for number, load in enumerate(self.choice.loads)
            if load.is_idle
        }

    def has_executors(self, number: int) -> bool:
        """Returns whether the sub-pool has an executor, or cannot be asked."""
        load = self.choice.loads[number]
        return load.is_away or load.told.num_executors > 0

    async def take_out(self, demand: Demand, target: int) -> bool:
        """Takes a request of this router out of its queue, so that its next submit goes to another sub-pool. Returns
        False if it stays where it is: it was placed meanwhile, or another router has it.

        Until this is known, calls about the request wait. Raises `RequestError` if that leaves nothing changed.
        """
        request_id, source = demand.request_id, self._where.get(demand.request_id)
        if source is None or source == target or request_id in self._moving:
            return False
        moving = self._moving[request_id] = asyncio.get_running_loop().create_future()
        try:
            if not await self._claim_moves(demand, source, target):
                return False
            found = await self._take_out_surely(request_id, source)
            if found is None or found.state is LedgerState.WAITING:
                self._remember(request_id, target)
                return True
            await self._stay(demand, source, target, found)
            return False
        finally:
            del self._moving[request_id]
            moving.set_result(None)

    async def _take_out_surely(self, request_id: str, source: int) -> CancelOutcome | None:
        """Returns the outcome, or None if an earlier call without an answer has done it."""
        has_missed = False
        while True:
            try:
                found = await self._heard(source, self.stores[source].take_out(request_id))
            except RequestError as error:
                logger.debug("%s cannot be moved yet: %s", request_id, error)
                has_missed = True
                await asyncio.sleep(RETRY_S)
            else:
                return None if has_missed and found.state is None else found

    async def _stay(self, demand: Demand, source: int, target: int, found: CancelOutcome) -> None:
        """Moves the claim back. If another router has claimed the request meanwhile, it runs there, and not here."""
        if not self._is_claimed(demand):
            return
        while True:
            try:
                is_own = await self._claims.move(demand.request_id, target, source)
            except RequestError as error:
                logger.debug("the claim of %s cannot be moved yet: %s", demand.request_id, error)
                await asyncio.sleep(RETRY_S)
            else:
                break
        if not is_own and found.placement is not None:
            self._deliver(CancelRequested(demand.request_id, found.placement.attempt))

    # Executors and leases --------------------------------------------------------------------------------------

    async def report_all(self, reports: Sequence[ExecutorReport]) -> list[ReportOutcome]:
        """Relays reports, each to the sub-pool of its executor. A sub-pool that is away is not waited for; its reports
        count as known."""
        by_number: defaultdict[int, list[ExecutorReport]] = defaultdict(list)
        for report in reports:
            by_number[home_of(report.executor_id, len(self.stores))].append(report)
        found = await asyncio.gather(*(self._report_to(*item) for item in by_number.items()), return_exceptions=True)
        outcomes: dict[str, ReportOutcome] = {}
        for each, asked in zip(found, by_number.values(), strict=True):
            if not isinstance(each, BaseException):
                outcomes.update(zip((report.executor_id for report in asked), each, strict=True))
            elif len(by_number) == 1 or not isinstance(each, RequestError):
                raise each
        return [outcomes.get(report.executor_id, ReportOutcome(taken=False)) for report in reports]

    async def _report_to(self, number: int, reports: Sequence[ExecutorReport]) -> list[ReportOutcome]:
        if not self.choice.loads[number].is_away:
            return await self._heard(number, self.stores[number].report_all(reports))
        before = self._reporting.get(number)
        if before is None or before.done():
            task = asyncio.create_task(self._heard(number, self.stores[number].report_all(reports)))
            task.add_done_callback(_ignore_failure)
            self._reporting[number] = task
        return [ReportOutcome(taken=False)] * len(reports)

    def listen(self, listener: PoolListener) -> None:
        """Passes what the sub-pools tell to the listener: the routers that any of them knows."""
        peers: list[frozenset[str]] = [frozenset()] * len(self.stores)
        for number, store in enumerate(self.stores):
            store.listen(_Listener(number, peers, listener))

    async def snapshot(self, max_tenant_queues: int = 0) -> Snapshot:
        """Returns the state of all sub-pools that answer. Raises `RequestError` if none does."""
        calls = (self._heard(number, store.snapshot(max_tenant_queues)) for number, store in enumerate(self.stores))
        return merged(_answers(await asyncio.gather(*calls, return_exceptions=True)), max_tenant_queues)

    # How a sub-pool is asked -----------------------------------------------------------------------------------

    async def _ask(
        self, request_id: str, ask: Callable[[AdmissionStore], Awaitable[T]], rank: Callable[[T], int], unknown: int
    ) -> T:
        """Asks the sub-pool that has the request; if that is not known, or it is not there, asks all of them. Returns
        the answer of the lowest rank; `unknown` is that of a sub-pool that does not know the request."""
        await self._moved(request_id)
        number = self._where.get(request_id)
        answer = await self._ask_once(request_id, number, ask, rank, unknown)
        if rank(answer) == unknown and number is None:  # another router may be moving it
            await asyncio.sleep(MOVE_S)
            answer = await self._ask_once(request_id, None, ask, rank, unknown)
        return answer

    async def _ask_once(
        self,
        request_id: str,
        number: int | None,
        ask: Callable[[AdmissionStore], Awaitable[T]],
        rank: Callable[[T], int],
        unknown: int,
    ) -> T:
        if number is None and not MADE_BY_ROUTER.fullmatch(request_id):
            number = await self._claims.find(request_id)
        if number is not None:
            answer = await self._heard(number, ask(self.stores[number]))
            if rank(answer) < unknown:
                return answer
        calls = (self._heard(each, ask(store)) for each, store in enumerate(self.stores))
        found = await asyncio.gather(*calls, return_exceptions=True)
        answer = min(_answers(found), key=rank)
        if rank(answer) == unknown:  # perhaps it is with one that does not answer
            for each in found:
                if isinstance(each, RequestError):
                    raise each
        return answer

    async def _heard(self, number: int, call: Awaitable[T]) -> T:
        """Records whether a sub-pool answers."""
        try:
            answer = await call
        except RequestError:
            self.choice.loads[number].is_away = True
            raise
        self.choice.loads[number].is_away = False
        return answer

    async def _moved(self, request_id: str) -> None:
        while (moving := self._moving.get(request_id)) is not None:
            await asyncio.shield(moving)

    def _is_claimed(self, demand: Demand) -> bool:
        """Returns whether a client can name the request in another submit."""
        return bool(demand.digest) or not MADE_BY_ROUTER.fullmatch(demand.request_id)

    async def _renew_claims(self) -> None:
        """Writes the claims of requests that are still served again, before they lapse."""
        while True:
            await asyncio.sleep(RENEW_CLAIMS_S)
            due_s = self._clock() - self._claims.renew_after_s
            while due := self._claims_due(due_s):
                calls = (self._claims.claim(one, self._where[one], takes_over=False) for one in due)
                await asyncio.gather(*calls, return_exceptions=True)

    def _claims_due(self, due_s: float) -> list[str]:
        """Returns requests of this router whose claims were written before then, a bounded number; drops others."""
        due: list[str] = []
        while self._claimed_s and next(iter(self._claimed_s.values())) <= due_s and len(due) < MAX_RENEWED_AT_ONCE:
            request_id, _ = self._claimed_s.popitem(last=False)
            if request_id in self._where:
                self._claimed_s[request_id] = self._clock()
                due.append(request_id)
        return due

    def _remember(self, request_id: str, number: int) -> None:
        self._where[request_id] = number
        self._where.move_to_end(request_id)
        while len(self._where) > MAX_REMEMBERED:
            self._where.popitem(last=False)

    def _on_event(self, number: int, event: StoreEvent) -> None:
        """Passes an event on, unless this router has moved the request to another sub-pool since."""
        if isinstance(event, LeaseLapsed):
            self._deliver(event)
            return
        if self._where.get(event.request_id, number) != number:
            if isinstance(event, Placement | Lost):
                self._unsettled[number].append(Ending(event.request_id, event.attempt, cancelled=True))
            return
        if isinstance(event, Cancelled | Dropped | TakenOver):
            self._where.pop(event.request_id, None)
        else:
            self._remember(event.request_id, number)
        self._deliver(event)


class _Listener:
    """What one sub-pool tells of its routers and executors. Implements `PoolListener`."""

    def __init__(self, number: int, peers: list[frozenset[str]], listener: PoolListener) -> None:
        self._number = number
        self._peers = peers
        self._listener = listener

    def on_routers(self, peers: frozenset[str]) -> None:
        self._peers[self._number] = peers
        self._listener.on_routers(frozenset().union(*self._peers))

    def on_report_overdue(self, executor_id: str, silent_s: float) -> None:
        if home_of(executor_id, len(self._peers)) == self._number:
            self._listener.on_report_overdue(executor_id, silent_s)


def _first(number: int, order: Sequence[int]) -> list[int]:
    return [number, *(other for other in order if other != number)]


def _answers(found: Sequence[T | BaseException]) -> list[T]:
    """Returns the answers without the failures. Raises the first one if there is no answer, or if it is not a
    `RequestError`."""
    failures = [each for each in found if isinstance(each, BaseException)]
    for failure in failures:
        if not isinstance(failure, RequestError):
            raise failure
    answers = [each for each in found if not isinstance(each, BaseException)]
    if failures and not answers:
        raise failures[0]
    return answers


def _ignore_failure(task: asyncio.Task[list[ReportOutcome]]) -> None:
    if not task.cancelled():
        task.exception()  # the store logs its outage
