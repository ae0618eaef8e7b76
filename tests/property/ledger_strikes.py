"""What is held against a request, in plain Python. Part of `ledger_model`."""

from __future__ import annotations

from tests.property.ledger_pool import Blamed, Pool, Request

RELAY_MS = 600  # a report may come so late


def strike(pool: Pool, request: Request, *, progressed: bool, is_proven: bool = False) -> None:
    """A placement came to nothing. The strike before is looked at once more; a token clears all."""
    if progressed:
        request.strikes = 0
        return
    if request.strikes and _has_not_died(pool, request):
        request.strikes -= 1
    request.strikes += 1
    was = request.placement
    assert was
    request.blamed = None if is_proven else Blamed(was.executor_id, was.generation, pool.now_ms)


def _has_not_died(pool: Pool, request: Request) -> bool:
    """Whether that start of the executor was at work after the strike: it reported, or had the request again."""
    blamed, last = request.blamed, request.placement
    if blamed is None:
        return False
    if last and (last.executor_id, last.generation) == (blamed.executor_id, blamed.generation):
        return True
    executor = pool.executors.get(blamed.executor_id)
    if executor is None or executor.report.generation != blamed.generation:
        return False
    return executor.last_report_ms > blamed.at_ms + RELAY_MS
