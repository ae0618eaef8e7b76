"""Strikes against a request in plain Python. Part of `ledger_model`."""

from __future__ import annotations

from tests.property.ledger_pool import Blamed, Pool, Request

RELAY_MS = 600  # a report may come so late


def strike(pool: Pool, request: Request, *, progressed: bool, is_stall: bool = False) -> None:
    """A placement came to nothing: counted once. Who had the request again had not died; a token clears all."""
    if progressed:
        forgive(request)
        return
    if request.counted == request.attempt:
        return
    was = request.placement
    assert was
    blamed = Blamed(was.executor_id, was.generation, pool.now_ms, is_stall)
    others = [one for one in request.blamed if (one.executor_id, one.generation) != (was.executor_id, was.generation)]
    request.strikes += 1 - (len(request.blamed) - len(others))
    request.blamed = [*others, blamed]
    request.counted = request.attempt


def forgive(request: Request) -> None:
    """Nothing is held against it any more."""
    request.strikes, request.blamed = 0, []


def judge(pool: Pool, request: Request) -> None:
    """Decides what can be decided; who has died is blamed no more, and the strike stands."""
    verdicts = [(one, _has_died(pool, one)) for one in request.blamed]
    request.strikes -= sum(verdict is False for _, verdict in verdicts)
    request.blamed = [one for one, verdict in verdicts if verdict is None]


def _has_died(pool: Pool, blamed: Blamed) -> bool | None:
    """Whether that start of the executor is over; None while it was not heard of since, or has stalled and accepts
    nothing since."""
    executor = pool.executors.get(blamed.executor_id)
    if executor is None or executor.report.generation != blamed.generation:
        return True
    is_alive = executor.report.accepting or not blamed.stalled
    return False if is_alive and executor.last_report_ms > blamed.at_ms + RELAY_MS else None
