"""The ledger in Redis, shared by all routers.

The scripts (`scripts/*.lua`) make all decisions, atomically. This module calls them and delivers their results. It
keeps no copy of the ledger. A call passes three layers:

1. Batch (`Batches`): submits, cancels and hand-backs that arrive while calls are in flight share the next call.
2. Repeat (`_repeat`, `_repeat_batch`): a call that stopped at a bound is repeated (`scripts/shared/records.lua` says
   when), then boarding continues. A failed call is not repeated here.
3. Call (`_call`): one call of a script, whose events are delivered.

Every operation runs in its own shielded task. A gRPC handler may be cancelled at any moment, and a reply can contain
placements of other requests. Such a reply must not be lost, and must not reach another caller.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, Unpack

from inflight.common.errors import RequestError
from inflight.router.ledger.calls import Batches, Outage, Turns
from inflight.router.ledger.codec import (
    CANCEL,
    Argument,
    Reply,
    charge_args,
    hand_back_args,
    parse_account,
    parse_adopt,
    parse_cancel,
    parse_charge,
    parse_explain,
    parse_hand_back,
    parse_outcomes,
    parse_overdue_reports,
    parse_rates,
    parse_reply,
    parse_reports,
    parse_snapshot,
    parse_submit,
    rates_args,
    report_args,
    settle_args,
    submit_args,
    verify_args,
)
from inflight.router.ledger.connection import NotSent, RedisClient, answered, close, unavailable
from inflight.router.ledger.functions import Library, ScriptCalls, load_scripts
from inflight.router.ledger.keys import NUM_CLASSES, PoolKeys
from inflight.router.ledger.ledger import OnEvent
from inflight.router.ledger.mailbox import LedgerClock, Mailbox, OwnershipFilter
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    AccountUsage,
    AdoptOutcome,
    Attempt,
    CancelOutcome,
    ChargeOutcome,
    DayUsage,
    Demand,
    Dropped,
    Ending,
    ExecutorReport,
    ExecutorUsage,
    Explanation,
    HandBackDetails,
    HandBackOutcome,
    LeaseLapsed,
    LedgerCall,
    Placement,
    PoolEvents,
    Queued,
    Refused,
    ReportOutcome,
    Snapshot,
    SubmitOutcome,
    TenantLimits,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ROUNDS = 64
# A call with this many occupies Redis for about a millisecond.
MAX_SETTLED_PER_CALL = 16
MAX_CHARGED_PER_CALL = 64
MAX_USAGE_PER_CALL = 256

# Scripts that must not run after their caller has stopped waiting: by then another router may own the request, or the
# client may have repeated it. An argument says until when the caller waits. In `submit` and `cancel` it precedes the
# requests.
TIMELY = frozenset({"submit", "cancel", "adopt"})
# The outcomes of `submit` and `adopt` that make the caller the owner of a request.
OWNED = frozenset({"PLACED", "QUEUED", "ADOPTED"})
# Scripts that no single request causes. Their calls take no turns: there is at most one call of each at a time.
UNPROMPTED = frozenset({"settle", "report", "renew", "reap"})

OwnEvent = Placement | Dropped


@dataclass(slots=True)
class _Operation:
    """One operation in progress: the mailboxes that its calls pass, and the events of its own requests."""

    mailboxes: set[str]
    own_ids: frozenset[str]
    own_events: dict[str, OwnEvent] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments for one request of a script that handles several requests."""

    request_id: str
    args: Sequence[Argument]


_Answer = tuple[Reply, OwnEvent | None]


class RedisLedger:
    """One router's view of one pool. Implements `inflight.router.ledger.ledger.Ledger`.

    `redis` comes from `connect`. `router_id` is new at every start of the router, because its mailbox is read from the
    beginning. `on_event` must not raise. `on_call` is called after every call of a script, in the `contextvars` context
    of the caller. All users of `redis` share `turns`. `reader` reads the mailbox, for which `run` needs it.
    """

    def __init__(
        self,
        redis: RedisClient,
        pool: str,
        router_id: str,
        settings: LedgerSettings,
        on_event: OnEvent,
        scripts: Library | None = None,
        on_call: Callable[[LedgerCall], None] = lambda call: None,
        turns: Turns | None = None,
        reader: RedisClient | None = None,
    ) -> None:
        self._reader = reader
        self._turns = turns or Turns(settings)
        self._outage = Outage(pool, logger)
        self._keys = PoolKeys(pool)
        self.router_id = router_id
        self._settings = settings
        self._on_event = on_event
        self._on_call = on_call
        self._ownership = OwnershipFilter(on_event)
        self._clock = LedgerClock()
        self._calls = ScriptCalls(redis, scripts or load_scripts())
        self._peers: frozenset[str] = frozenset()
        self._listener: PoolEvents | None = None
        self._is_registered = False
        self._missed_reply = False
        self._operations: set[asyncio.Task[Any]] = set()
        self._submits = self._batches("submit")
        self._cancels = self._batches("cancel")
        self._hand_backs = self._batches("hand_back")

    async def run(self) -> None:
        """Reads the mailbox, renews the lease and reaps, until cancelled. Also continues while Redis is unavailable."""
        reader = self._reader
        assert reader is not None, "the mailbox has a reader"
        mailbox = Mailbox(reader, self._keys.mailbox(self.router_id), self._settings)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(mailbox.run(self._ownership.receive, self._outage.failed))
                group.create_task(_every(self.renew, self._settings.renew_interval_ms, jitter=0.1))
                group.create_task(_every(self.reap, self._settings.reap_interval_ms, jitter=0.5))
        finally:
            await close(reader)

    async def aclose(self) -> None:
        await asyncio.gather(*self._operations, return_exceptions=True)

    # Requests --------------------------------------------------------------------------------------------------

    async def submit(self, demand: Demand) -> SubmitOutcome:
        operation = self._start(self._submit(demand))
        try:
            return await asyncio.shield(operation)
        except asyncio.CancelledError:
            self._start(self._undo_submit(operation, demand.request_id))
            raise

    async def check_rates(
        self, tenant: str, limits: TenantLimits, tokens: int, request_id: str = "", *, takes: bool = False
    ) -> Refused | None:
        args = rates_args(tenant, limits, tokens, request_id, takes)
        reply = await self._detached(self._repeat("rates", *args))
        return parse_rates(reply)

    async def settle(self, endings: Sequence[Attempt | Ending]) -> int:
        return await self._detached(self._settle(endings))

    async def cancel(self, request_id: str) -> CancelOutcome:
        return await self._detached(self._cancel(request_id, is_own=False))

    async def withdraw(self, request_id: str) -> CancelOutcome:
        return await self._detached(self._cancel(request_id, is_own=True))

    async def hand_back(
        self, request_id: str, attempt: int, max_attempts: int, **details: Unpack[HandBackDetails]
    ) -> HandBackOutcome:
        args = hand_back_args(request_id, attempt, max_attempts, details)
        reply, event = await self._detached(self._hand_backs.add(_Asked(request_id, args)))
        if isinstance(event, Dropped):
            return event
        return event or parse_hand_back(request_id, reply)

    async def adopt(self, request_id: str) -> AdoptOutcome:
        reply = await self._detached(self._adopt(request_id))
        return parse_adopt(request_id, reply)

    async def clear_suspect(self, request_id: str, attempt: int) -> None:
        await self._detached(self._repeat("clear_suspect", request_id, attempt))

    async def find_forgotten(self, waiting: Sequence[Attempt]) -> frozenset[str]:
        reply = await self._detached(self._repeat("verify", *verify_args(waiting)))
        return frozenset(reply.values[0])

    async def explain(self, request_id: str) -> Explanation | None:
        reply = await self._detached(self._repeat("explain", request_id))
        return parse_explain(reply)

    # Executors and leases --------------------------------------------------------------------------------------

    async def report(self, report: ExecutorReport) -> ReportOutcome:
        """Relays an executor's report. Safe to repeat, from any router."""
        (outcome,) = await self.report_all([report])
        return outcome

    async def report_all(self, reports: Sequence[ExecutorReport]) -> list[ReportOutcome]:
        args = [arg for report in reports for arg in report_args(report, self._settings)]
        reply = await self._detached(self._repeat("report", *args))
        return parse_reports(reply)

    def listen(self, listener: PoolEvents) -> None:
        self._listener = listener

    async def renew(self) -> None:
        """Renews this router's lease. Updates the list of other live routers."""
        reply = await self._detached(self._repeat("renew"))
        peers = frozenset(reply.values[0]) - {self.router_id}
        has_changed, self._peers = peers != self._peers, peers
        if has_changed and self._listener is not None:
            self._listener.on_routers(peers)

    async def reap(self) -> None:
        """Removes executors and routers whose lease has lapsed. The number per call is bounded; the next call
        continues."""
        await self._detached(self._reap())

    async def snapshot(self, max_tenant_queues: int = 0) -> Snapshot:
        reply = await self._detached(self._repeat("snapshot", max_tenant_queues))
        return parse_snapshot(reply)

    # Usage ------------------------------------------------------------------------------------------------------

    async def charge(self, usage: ExecutorUsage) -> ChargeOutcome:
        return await self._detached(self._charge(usage))

    async def _charge(self, usage: ExecutorUsage) -> ChargeOutcome:
        outcomes = []
        by_day: dict[int, list[AccountUsage]] = {}
        for one in usage.totals:
            by_day.setdefault(one.account.day, []).append(one)
        for day, totals in by_day.items():
            for start in range(0, len(totals), MAX_CHARGED_PER_CALL):
                chunk = totals[start : start + MAX_CHARGED_PER_CALL]
                raw = await self._answer("charge", self._keys.usage(day), charge_args(usage, chunk))
                outcomes.append(parse_charge(raw, chunk))
        added = tuple(one for outcome in outcomes for one in outcome.added)
        first_days = frozenset[int]().union(*(outcome.first_days for outcome in outcomes))
        return ChargeOutcome(added, sum(outcome.num_left_out for outcome in outcomes), first_days)

    async def usage(self, day: int) -> DayUsage:
        found: dict[str, AccountUsage] = {}
        totals, _, since = self._keys.usage(day)
        cursor: Argument = 0
        while True:
            raw = await self._detached(self._answer("usage", [totals, since], [cursor, MAX_USAGE_PER_CALL]))
            cursor, accounts, *since_ms = raw
            for name, figures in accounts:
                found[name] = AccountUsage(parse_account(day, name), tuple(map(int, figures)))
            if cursor == "0":
                return DayUsage(tuple(found.values()), int(since_ms[0]) if since_ms and since_ms[0] else None)

    # Operations ------------------------------------------------------------------------------------------------

    async def _submit(self, demand: Demand) -> SubmitOutcome:
        assert 1 <= demand.priority_class <= NUM_CLASSES
        assert demand.blocks > 0
        assert demand.sequences > 0
        asked = _Asked(demand.request_id, submit_args(demand, self._settings))
        with self._ownership.during_call(demand.request_id):
            reply, event = await self._submits.add(asked)
            self._take_ownership(demand.request_id, reply)
        return event or parse_submit(demand.request_id, reply)

    async def _adopt(self, request_id: str) -> Reply:
        with self._ownership.during_call(request_id):
            reply = await self._repeat("adopt", request_id)
            self._take_ownership(request_id, reply)
        return reply

    def _take_ownership(self, request_id: str, reply: Reply) -> None:
        if reply.status in OWNED:
            self._ownership.take(request_id, reply.now_ms)

    async def _cancel(self, request_id: str, *, is_own: bool) -> CancelOutcome:
        reply, _ = await self._cancels.add(_Asked(request_id, CANCEL.of(request_id, is_own)))
        return parse_cancel(request_id, reply)

    async def _undo_submit(self, submit: asyncio.Task[Any], request_id: str) -> None:
        """Undoes a submit whose caller was cancelled. Nothing has been sent to an executor yet."""
        result = await submit
        placement = result if isinstance(result, Placement) else None
        if isinstance(result, Queued):
            placement = (await self._cancel(request_id, is_own=True)).placement
        if placement:
            async with self._turns.turn("settle"):
                await self._settle([Ending(request_id, placement.attempt, cancelled=True)])

    async def _settle(self, attempts: Sequence[Attempt | Ending]) -> int:
        num_settled = 0
        for start in range(0, len(attempts), MAX_SETTLED_PER_CALL):
            chunk = attempts[start : start + MAX_SETTLED_PER_CALL]
            reply = await self._repeat("settle", *settle_args(chunk))
            num_settled += reply.values[0]
        return num_settled

    async def _reap(self) -> None:
        operation = _Operation(set(self._peers), frozenset())
        for _ in range(MAX_ROUNDS):
            reply = await self._call(operation, "reap", ())
            if reply.status != "AGAIN":
                break
        if self._listener is not None:
            for executor_id, silent_s in parse_overdue_reports(reply):
                self._listener.on_report_overdue(executor_id, silent_s)
        await self._board(operation, reply)

    # How a script is called: batch, repeat, call ---------------------------------------------------------------

    def _batches(self, name: str) -> Batches[_Asked, _Answer]:
        """Returns the batches of a script that handles several requests per call."""
        return Batches(partial(self._repeat_batch, name), partial(self._turns.turn, name), self._start)

    async def _repeat_batch(self, name: str, asked: Sequence[_Asked]) -> list[_Answer]:
        """Calls a script for several requests until it is done with each. Then continues boarding until nothing more
        fits.

        Delivers events as they arrive. The placements and drops of these requests are returned with the replies
        instead.
        """
        # A submit rarely boards other requests: it tries only if there is room for its own. So other routers' mailboxes
        # are added to the call only when the script asks for them.
        mailboxes = set[str]() if name == "submit" else set(self._peers)
        operation = _Operation(mailboxes, frozenset(one.request_id for one in asked))
        outcomes: dict[int, Reply] = {}
        left = list(range(len(asked)))
        for _ in range(MAX_ROUNDS):
            args = [arg for index in left for arg in asked[index].args]
            reply = await self._call(operation, name, (*self._waits_until(name), *args))
            if reply.status != "LATE":
                outcomes.update(zip(left, parse_outcomes(reply), strict=True))
                left = [index for index in left if outcomes[index].status == "AGAIN"]
            if not left:
                await self._board(operation, reply)
                return [(outcomes[index], operation.own_events.get(one.request_id)) for index, one in enumerate(asked)]
        raise self._endless(name)

    async def _repeat(self, name: str, *args: Argument) -> Reply:
        """Calls a script until it is done, then continues boarding until nothing more fits. Takes a turn, unless the
        script is `UNPROMPTED`."""
        async with nullcontext() if name in UNPROMPTED else self._turns.turn(name):
            operation = _Operation(set(self._peers), frozenset())
            for _ in range(MAX_ROUNDS):
                reply = await self._call(operation, name, (*args, *self._waits_until(name)))
                if reply.status not in ("AGAIN", "LATE"):
                    await self._board(operation, reply)
                    return reply
            raise self._endless(name)

    def _endless(self, name: str) -> RequestError:
        endless = unavailable(self._settings, f"{name} found no end")
        self._outage.failed(endless.cause)
        return endless

    def _waits_until(self, name: str) -> tuple[Argument, ...]:
        """Returns the argument of `TIMELY` scripts that says until when the caller waits, on the ledger's clock. The
        argument is '' before the first reply. Returns no argument for other scripts."""
        if name not in TIMELY:
            return ()
        until_ms = self._clock.in_ms(self._settings.call_timeout_ms)
        return ("" if until_ms is None else until_ms,)

    async def _board(self, operation: _Operation, reply: Reply) -> None:
        """Continues boarding where a script stopped. If this fails, the next call of any router continues."""
        try:
            for _ in range(MAX_ROUNDS):
                if reply.is_complete:
                    return
                reply = await self._call(operation, "board", ())
        except RequestError as error:
            logger.debug("boarding stopped half-way: %s", error)

    async def _call(self, operation: _Operation, name: str, args: Sequence[Argument]) -> Reply:
        """Calls a script once and delivers the events of its reply."""
        keys = self._keys.for_script(tuple(sorted(operation.mailboxes)))
        try:
            reply = parse_reply(await self._answer(name, keys, [self.router_id, *args]))
        except RequestError as error:
            if not isinstance(error, NotSent):
                self._missed_reply = True  # the reply may have had placements, or said that the lease has lapsed
            raise
        self._clock.observe(reply.now_ms)
        operation.mailboxes.update(reply.missing)
        self._deliver(operation, reply)
        return reply

    async def _answer(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Calls a script once and returns its raw reply."""
        began, succeeded = time.monotonic(), False
        try:
            raw = await answered(self._calls.run(name, keys, args), self._settings)
            succeeded = True
        except RequestError as error:
            self._turns.missed()
            self._outage.failed(error.cause)
            raise
        finally:
            ended = time.monotonic()
            self._on_call(LedgerCall(name, ended, ended - began, succeeded))
        self._turns.heard()
        self._outage.answered()
        return raw

    def _deliver(self, operation: _Operation, reply: Reply) -> None:
        has_lapsed = self._is_registered and reply.registered
        if self._missed_reply or has_lapsed:
            self._on_event(LeaseLapsed(has_lapsed))
        self._is_registered = self._is_registered or reply.registered or self._missed_reply
        self._missed_reply = False
        for event in reply.events:
            if isinstance(event, OwnEvent) and event.request_id in operation.own_ids:
                operation.own_events[event.request_id] = event
            else:
                self._on_event(event)

    async def _detached(self, operation: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start(operation))

    def _start(self, operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(operation)
        self._operations.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._operations.discard(task)
        error = None if task.cancelled() else task.exception()
        if error and not isinstance(error, RequestError):
            logger.error("operation of the ledger failed", exc_info=error)


async def _every(operation: Callable[[], Awaitable[None]], interval_ms: int, jitter: float) -> None:
    """Runs the operation until cancelled, about every `interval_ms`."""
    while True:
        with suppress(RequestError):  # logged as an outage
            await operation()
        await asyncio.sleep(interval_ms / 1000 * random.uniform(1 - jitter, 1 + jitter))
