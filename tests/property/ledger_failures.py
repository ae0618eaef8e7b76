"""Failures against a request in plain Python. Part of `ledger_model`."""

from __future__ import annotations

from tests.property.ledger_pool import Pool, Request, Undecided

RELAY_MS = 600  # a report may come so late


def record_failure(pool: Pool, request: Request, *, progressed: bool, is_stall: bool = False) -> None:
    """A placement came to nothing: counted once. Who had the request again had not died; a token clears all."""
    if progressed:
        clear_failures(request)
        return
    if request.counted == request.attempt:
        return
    was = request.placement
    assert was
    failure = Undecided(was.executor_id, was.generation, pool.now_ms, is_stall)
    others = [
        one for one in request.undecided if (one.executor_id, one.generation) != (was.executor_id, was.generation)
    ]
    request.failures += 1 - (len(request.undecided) - len(others))
    request.undecided = [*others, failure]
    request.counted = request.attempt


def clear_failures(request: Request) -> None:
    """Nothing is held against it any more."""
    request.failures, request.undecided = 0, []


def decide_failures(pool: Pool, request: Request) -> None:
    """Decides what can be decided; a failure whose executor died stands, one whose executor lives is removed."""
    verdicts = [(one, _has_died(pool, one)) for one in request.undecided]
    request.failures -= sum(verdict is False for _, verdict in verdicts)
    request.undecided = [one for one, verdict in verdicts if verdict is None]


def _has_died(pool: Pool, failure: Undecided) -> bool | None:
    """Whether that start of the executor is over; None while it was not heard of since, or has stalled and accepts
    nothing since."""
    executor = pool.executors.get(failure.executor_id)
    if executor is None or executor.report.generation != failure.generation:
        return True
    is_alive = executor.report.accepting or not failure.stalled
    return False if is_alive and executor.last_report_ms > failure.at_ms + RELAY_MS else None
