"""Comparison of Redis with the model, and of its records with each other: every sum, index and order."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.router.ledger.types import LedgerState
from tests.property.ledger_pool import SILENT_MS, Pool, Undecided
from tests.property.store_records import Records

CLASSES = (1, 2, 3)


def compare(records: Records, pool: Pool) -> None:
    """Fails where they differ."""
    _compare_requests(records, pool)
    _compare_endings(records, pool)
    _compare_queues(records, pool)
    _compare_executors(records, pool)
    _compare_tenants(records, pool)
    _compare_state(records, pool)


def _compare_requests(records: Records, pool: Pool) -> None:
    found = records.of("requests")
    assert found.keys() == pool.requests.keys()
    for name, request in pool.requests.items():
        record, placement = found[name], request.placement
        assert request.state
        assert (record["state"], record["owner"]) == (request.state.value, request.owner_id)
        assert (record["attempt"], record["failures"]) == (request.attempt, request.failures)
        assert record["counted"] == request.counted
        assert [Undecided(**one) for one in record["undecided"] or ()] == request.undecided
        assert record["digest"] == ("?" if request.digest is None else request.digest)
        assert (record["class"], record["output"], record["passed"]) == (
            request.class_,
            request.output,
            request.passed,
        )
        assert (record["blocks"], record["placement_blocks"]) == (request.blocks, request.placement_blocks)
        assert (record["claim"] or None) == request.claim
        assert record["adapter"] == request.demand.adapter
        assert (record["charge"] if record["charged"] else None) == _near(request.charge)
        if request.state is LedgerState.PLACED and placement:
            assert (record["executor_id"], record["generation"]) == (placement.executor_id, placement.generation)
            assert (record["reserved"], record["placed_ms"]) == (request.reserved, request.placed_ms)
            assert record["adopted"] == request.is_adopted


def _compare_endings(records: Records, pool: Pool) -> None:
    oldest_ms = pool.now_ms - pool.settings.remember_ended_ms
    remembered = {name: at for name, at in records.scores("ended").items() if at >= oldest_ms}
    assert remembered == {name: at for name, at in pool.ended_ms.items() if pool.is_tombstoned(name)}
    assert not remembered.keys() & records.of("requests").keys()
    assert records.of("endings").keys() <= records.scores("ended").keys()
    assert {name: one for name, one in records.of("endings").items() if name in remembered} == {
        name: {
            "executor_id": one.placement.executor_id if one.placement else "",
            "generation": one.placement.generation if one.placement else 0,
            "attempt": one.attempt,
            "digest": "?" if one.digest is None else one.digest,
            "cancelled": one.was_cancelled,
        }
        for name, one in pool.endings.items()
        if name in remembered
    }


def _compare_queues(records: Records, pool: Pool) -> None:
    queues = [
        (class_, tenant, name)
        for class_ in CLASSES
        for tenant in sorted({one.demand.tenant for one in pool.requests.values()})
        for name in pool.line(tenant, class_)
    ]
    assert records.queue() == queues
    ageing = {name: pool.requests[name].age_ms for name in pool.waiting() if pool.requests[name].class_ > 1}
    assert records.scores("ageing") == ageing
    lost = {name: one.lost_ms for name, one in pool.requests.items() if one.state is LedgerState.LOST}
    assert records.scores("lost") == lost
    placed = {f"{one}\0{pool.requests[n].attempt}\0{n}" for one in pool.executors for n in pool.placed_on(one)}
    assert records.scores("placements").keys() == placed
    assert records.scores("preemptible").keys() == {
        name for name, one in pool.requests.items() if one.state is LedgerState.PLACED and one.may_be_preempted
    }


def _compare_executors(records: Records, pool: Pool) -> None:
    found, claimed = records.of("executors"), pool.claimed()
    assert found.keys() == pool.executors.keys()
    for name, executor in pool.executors.items():
        record, report = found[name], executor.report
        assert (record["reserved_blocks"], record["reserved_sequences"]) == pool.reserved(name)
        assert (record["generation"], record["seq"]) == (report.generation, report.seq)
        assert (record["last_report_ms"], record["audited_ms"]) == (executor.last_report_ms, executor.audited_ms)
        assert (record["suspended"], record["audit_due"]) == (executor.suspended, False)
        assert (record["claim"] or None) == claimed.get(name)
        assert record["prefilled_ms"] == _moment(executor.prefilled_ms)
        assert record["has_suspect"] == bool(pool.suspects_on(name))
        assert record["num_adapter_slots"] == report.num_adapter_slots
        assert record["pins"] == pool.pins(name)
    assert records.of("adapters").keys() == {
        name for name, one in pool.executors.items() if one.report.num_adapter_slots
    }
    assert records.scores("sizes") == {name: one.report.total_blocks for name, one in pool.executors.items()}
    assert records.scores("reports") == {name: one.last_report_ms for name, one in pool.executors.items()}
    live = {name for name, one in pool.executors.items() if pool.now_ms - one.last_report_ms <= SILENT_MS}
    room = {name: at for name, at in records.scores("room").items() if name in live}
    assert room == {name: -pool.free(name)[0] for name in pool.open_executors()}
    assert records.scores("routers") == pool.routers


def _compare_tenants(records: Records, pool: Pool) -> None:
    found = records.of("tenants")
    assert found.keys() == pool.tenants.keys()
    for name, tenant in pool.tenants.items():
        record, waiting = found[name], pool.waiting(name)
        assert record["waiting_by_class"] == [len(pool.waiting(name, class_)) for class_ in CLASSES]
        assert (record["waiting"], record["running"]) == (len(waiting), pool.running(name))
        assert record["tokens"] == [pool.tokens_waiting(pool.waiting(name, class_)) for class_ in CLASSES]
        assert record["bytes"] == pool.bytes_waiting(waiting)
        assert (record["active"], record["weight"]) == (tenant.is_active, tenant.limits.weight)
        assert record["output_share"] == pytest.approx(tenant.output_share)
        assert record["correction"] == pytest.approx(tenant.correction)
        floor = 0 if tenant.is_active else pool.floor  # who is away will be lifted
        assert max(floor, record["counter"]) == pytest.approx(max(floor, tenant.counter))
        assert max(pool.now_ms, record["request_ms"]) == _moment(max(pool.now_ms, tenant.requests.full_ms))
        assert max(pool.now_ms, record["token_ms"]) == _moment(max(pool.now_ms, tenant.tokens.full_ms))
    for class_ in CLASSES:
        assert records.scores(f"active:{class_}") == pytest.approx(pool.active(class_))


def _compare_state(records: Records, pool: Pool) -> None:
    state: dict[str, Any] = records.of("state")
    if not state:
        assert not pool.requests
        return
    waiting, estimates = pool.waiting(), pool.estimates
    assert (state["waiting"], state["bytes"]) == (len(waiting), pool.bytes_waiting(waiting))
    assert state["tokens"] == [pool.tokens_waiting(pool.waiting(class_=class_)) for class_ in CLASSES]
    assert state["floor"] == pytest.approx(pool.floor)
    assert [(one["id"], one["executor_id"], one["class"]) for one in state["claims"]] == [
        (name, pool.requests[name].claim, pool.requests[name].class_) for name in pool.claims
    ]
    assert (state["moving_ms"], state["moved_tokens"]) == (_near(estimates.moving_ms), _near(estimates.moved_tokens))
    assert (state["prefill_speed"] or None) == _near(estimates.prefill_speed)
    assert state["standby"] == pytest.approx(estimates.standby)
    assert (state["output_speed"] or None) == _near(estimates.output_speed)
    assert (state["num_estimates"], state["correction"], state["error"]) == (
        estimates.num_estimates,
        pytest.approx(estimates.correction),
        pytest.approx(estimates.error),
    )
    histograms = {f"{tenant}\0{size}": one for (tenant, size), one in pool.lengths.histograms.items()}
    assert {name: one["bins"] for name, one in records.of("lengths").items()} == {
        name: pytest.approx(one.bins) for name, one in histograms.items()
    }


def _moment(at_ms: float) -> Any:
    """A time, to a microsecond: of the ledger's clock the millionth part would be seconds."""
    return pytest.approx(at_ms, rel=0, abs=1e-3)


def _near(value: float | None) -> Any:
    return None if value is None else pytest.approx(value)
