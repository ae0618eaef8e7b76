"""The ledger of a pool, as one router uses it: the pool's queues and the reservations on its executors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Unpack

from inflight.router.ledger.types import (
    AdoptOutcome,
    Attempt,
    CancelOutcome,
    ChargeOutcome,
    DayUsage,
    Demand,
    Ending,
    ExecutorReport,
    ExecutorUsage,
    Explanation,
    HandBackDetails,
    HandBackOutcome,
    LedgerEvent,
    PoolEvents,
    Refused,
    ReportOutcome,
    Snapshot,
    SubmitOutcome,
    TenantLimits,
)

# Gets each event exactly once, possibly before the call that caused the event returns. It settles a `Placement` of a
# request that the router no longer serves.
OnEvent = Callable[[LedgerEvent], None]


class Ledger(Protocol):
    """One router's view of one pool's ledger, implemented by `inflight.router.ledger.redis_ledger.RedisLedger`.

    Calls raise `RequestError` if the ledger does not answer.
    """

    @property
    def router_id(self) -> str:
        """The id of this router, new at every start."""

    async def run(self) -> None:
        """Delivers events and renews this router's lease, until cancelled. Also continues while the ledger does not
        answer."""

    async def aclose(self) -> None:
        """Waits for operations whose callers were cancelled."""

    def listen(self, listener: PoolEvents) -> None:
        """Sets the listener for what the periodic calls report about the pool."""

    # Requests

    async def submit(self, demand: Demand) -> SubmitOutcome:
        """Enqueues a request, and places it at once if its turn has come. This router becomes its owner.

        A submit with a known id and the same digest is a repeat. This router then becomes the owner of the request in
        its current state. For an ended request the result is `Adopted` with `ended`; but a request that was cancelled
        or never placed starts again.

        Cancelling the call withdraws the request. After STORE_UNAVAILABLE the request may be in the queue nevertheless.
        The caller then repeats the call, or settles the placement when it arrives.
        """

    async def check_rates(
        self, tenant: str, limits: TenantLimits, tokens: int, request_id: str = "", *, takes: bool = False
    ) -> Refused | None:
        """Returns why the tenant's rates refuse a request of `tokens` tokens now, or None. Consumes from the rates only
        if `takes`. A repeat of the known request `request_id` is not refused."""

    async def withdraw(self, request_id: str) -> CancelOutcome:
        """Cancels a request of this router whose client has left. If another live router owns the request by now,
        because the client reconnected there, the request counts as unknown."""

    async def cancel(self, request_id: str) -> CancelOutcome:
        """Ends a waiting request of any owner. Asks the owner of a placed request to cancel it."""

    async def settle(self, endings: Sequence[Attempt | Ending]) -> int:
        """Ends placements and releases their reservations. Ignores stale placements. Returns how many it ended."""

    async def hand_back(
        self, request_id: str, attempt: int, max_attempts: int, **details: Unpack[HandBackDetails]
    ) -> HandBackOutcome:
        """Returns a failed placement to the ledger. If attempts are left, the request waits at its former position.

        UNDECIDED: whether attempts are left depends on whether executors died. This is known within seconds, so the
        caller calls again.
        """

    async def adopt(self, request_id: str) -> AdoptOutcome:
        """Makes this router the owner of a placed request, so that it can attach to its executor. None: unknown id.
        Refused: it is a choice of a request whose first choice another router has taken over.

        A WAITING or LOST request is not changed: only a router that has its prompt can continue it, by a submit. ENDED:
        the request has ended, and it was never placed or its executor is not known.
        """

    async def clear_suspect(self, request_id: str, attempt: int) -> None:
        """Clears the suspicion of a request whose placement has produced a token. Its earlier losses no longer
        count."""

    async def find_forgotten(self, waiting: Sequence[Attempt]) -> frozenset[str]:
        """Returns those of this router's waiting requests that the ledger does not have in its queue. The caller
        submits them again.

        `waiting` has at most 256 requests, each with the last attempt that the router knows of. With `ANY_ATTEMPT` the
        result includes a request that was placed or lost meanwhile.
        """

    async def explain(self, request_id: str) -> Explanation | None:
        """Returns the state of a request and what it waits for; None for an unknown id."""

    # The pool

    async def report_all(self, reports: Sequence[ExecutorReport]) -> list[ReportOutcome]:
        """Relays reports of several executors in one call. Returns their outcomes in the same order. Safe to repeat,
        from any router."""

    async def charge(self, usage: ExecutorUsage) -> ChargeOutcome:
        """Books what accounts have used of an executor. Safe to repeat, from any router, in any order: each figure is
        the total since the executor's start, of which the ledger adds what it has not counted yet."""

    async def usage(self, day: int) -> DayUsage:
        """Returns what all accounts used on a day, in days since 1970."""

    async def snapshot(self, max_tenant_queues: int = 0) -> Snapshot:
        """Returns the state of the pool, with the queues of at most `max_tenant_queues` tenants."""
