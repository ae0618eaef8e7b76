"""Ownership of requests in plain Python: repeats, adoptions, and ended requests. Part of `ledger_model`."""

from __future__ import annotations

import dataclasses

from inflight.router.ledger.types import Adopted, Demand, Duplicate, LedgerState, Placement, TakenOver
from tests.property.ledger_pool import End, Pool, Request


def adopt(pool: Pool, router_id: str, name: str) -> Adopted | LedgerState | None:
    """Model of adopt.lua, behind the renewal of the lease."""
    request = pool.requests.get(name)
    if request is None:
        if not pool.is_tombstoned(name):
            return None
        end = pool.endings.get(name)
        return Adopted(end.placement, ended=True) if end and end.placement else LedgerState.ENDED
    if request.state is LedgerState.PLACED and request.placement:
        take_over(pool, router_id, request)
        request.is_adopted = True
        return Adopted(placement_of(request), ended=False)
    return request.state


def take_over(pool: Pool, router_id: str, request: Request) -> None:
    """Makes this router the owner; reports it to the earlier owner, if there was one."""
    if request.owner_id != router_id:
        if pool.lives(request.owner_id, router_id):
            pool.tell(request.owner_id, TakenOver(request.demand.request_id))
        request.owner_id = router_id


def placement_of(request: Request) -> Placement:
    """Where it is, with what its router must know of that."""
    assert request.placement
    return dataclasses.replace(request.placement, suspect=request.failures > 0)


def is_adopting(pool: Pool, request: Request, router_id: str, demand: Demand) -> bool:
    """Whether this is a repeat by another router, which may have the request, or by its own of what was lost."""
    is_own = request.owner_id == router_id
    is_free = is_own or not (demand.is_served and pool.lives(request.owner_id, router_id))
    return (not is_own or request.state is LedgerState.LOST) and _is_same(request, demand) and is_free


def is_own_repeat(request: Request, router_id: str, demand: Demand) -> bool:
    """Whether this is a repeat by the router whose it is: of the same digest or, without one, of the same arguments."""
    had = request.demand
    is_alike = (had.tenant, had.priority_class, had.deadline_ms, had.blocks, had.sequences) == (
        demand.tenant,
        demand.priority_class,
        demand.deadline_ms,
        demand.blocks,
        demand.sequences,
    )
    is_known_by_arguments = is_alike and request.digest == demand.digest == ""
    return request.owner_id == router_id and (_is_same(request, demand) or is_known_by_arguments)


def _is_same(request: Request, demand: Demand) -> bool:
    if not (demand.digest or demand.is_served) or request.digest is None:
        return bool(demand.digest or demand.is_served)
    return request.digest == demand.digest and request.demand.tenant in (demand.tenant, "")


def repeat_of_ended(end: End | None, demand: Demand) -> Adopted | Duplicate | int:
    """What becomes of a repeat of what has ended; a number is the attempt after which it starts again."""
    is_same = bool(demand.digest or demand.is_served) and (end is None or end.digest in (demand.digest, None))
    if is_same and end and not end.was_cancelled:
        assert end.placement
        return Adopted(end.placement, ended=True)
    if not is_same or demand.is_served:
        return Duplicate(LedgerState.ENDED)
    return end.attempt if end else 0
