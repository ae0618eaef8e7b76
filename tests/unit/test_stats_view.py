"""The view of a caller on other tenants, and its rate."""

from __future__ import annotations

import pytest

from inflight.router.auth.caller import ANYBODY, Caller
from inflight.router.ledger.types import ClassQueue, Snapshot, TenantQueue
from inflight.router.stats.source import SHARE, pause_after, seen_queues, seen_sequence
from inflight.v1 import stats_pb2

ANN = Caller(tenant="ann")
OPERATOR = Caller(tenant="ann", is_operator=True)
SNAPSHOT = Snapshot(
    (),
    (ClassQueue(2, 20), ClassQueue(7, 700), ClassQueue(0, 0)),
    tenant_queues=(
        TenantQueue(1, "bob", 2, 20, 5),
        TenantQueue(2, "ann", 1, 100, 10),
        TenantQueue(2, "bob", 3, 300, 30),
        TenantQueue(2, "cid", 1, 100, 20),
    ),
)

Row = tuple[int, str, int, int, int]


def rows(snapshot: Snapshot, caller: Caller) -> list[Row]:
    return [
        (one.priority, one.tenant, one.num_requests, one.num_tokens, one.longest_wait_ms)
        for one in seen_queues("m", snapshot, caller)
    ]


def test_an_operator_sees_every_tenant_and_what_was_not_told_apart() -> None:
    # Of seven requests five are of the tenants that were told.
    assert rows(SNAPSHOT, OPERATOR) == [
        (1, "bob", 2, 20, 5),
        (2, "", 2, 200, 0),
        (2, "ann", 1, 100, 10),
        (2, "bob", 3, 300, 30),
        (2, "cid", 1, 100, 20),
    ]
    assert rows(SNAPSHOT, ANYBODY) == rows(SNAPSHOT, OPERATOR)


def test_another_tenant_sees_its_own_and_the_rest_together() -> None:
    assert rows(SNAPSHOT, ANN) == [(1, "", 2, 20, 5), (2, "", 6, 600, 30), (2, "ann", 1, 100, 10)]


def test_whose_a_sequence_is_only_its_tenant_and_operators_see() -> None:
    held = stats_pb2.SequenceStats(request_id="bob/r1", seat=3, prompt_tokens=9)
    for caller in (OPERATOR, Caller(tenant="bob")):
        seen = seen_sequence(held, caller)
        assert (seen.request_id, seen.tenant, seen.seat, seen.prompt_tokens) == ("r1", "bob", 3, 9)
    hidden = seen_sequence(held, ANN)
    assert (hidden.request_id, hidden.tenant, hidden.seat, hidden.prompt_tokens) == ("", "", 3, 9)


def test_a_sequence_without_a_tenant_is_the_default_tenants() -> None:
    held = stats_pb2.SequenceStats(request_id="r1")
    assert seen_sequence(held, OPERATOR).tenant == "default"
    assert seen_sequence(held, Caller(tenant="default")).request_id == "r1"
    assert seen_sequence(held, ANN).request_id == ""


def test_watchers_are_told_less_often_where_their_messages_cost_too_much_together() -> None:
    assert pause_after(0.0001, 0.05, num_watchers=10) == 0.05
    assert pause_after(0.01, 0.05, num_watchers=10) == pytest.approx(1.0)
    took_s, num_watchers = 0.02, 200
    assert num_watchers * took_s / pause_after(took_s, 0.05, num_watchers) == pytest.approx(SHARE)
