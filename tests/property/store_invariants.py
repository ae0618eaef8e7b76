"""Invariants among the pool's records, at every moment and after any call, without a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.property.store_records import Records

CLASSES = (1, 2, 3)


def check(records: Records, budget_blocks: float) -> None:
    """Fails where two records disagree, or more is reserved than there is."""
    requests, tombstones = records.of("requests"), records.scores("ended")
    in_state = {
        state: {name: one for name, one in requests.items() if one["state"] == state}
        for state in ("WAITING", "PLACED", "LOST")
    }
    assert sum(map(len, in_state.values())) == len(requests)
    assert not requests.keys() & tombstones.keys()
    assert records.scores("lost").keys() == in_state["LOST"].keys()
    _check_queues(records, in_state["WAITING"])
    _check_reservations(records, in_state["PLACED"], budget_blocks)
    _check_tenants(records, in_state["WAITING"], in_state["PLACED"])


def check_step(before: Records, after: Records) -> None:
    """Fails where a request went back to an attempt that was spent. Not across a loss of everything."""
    was, ended = before.of("requests"), before.of("endings")
    for name, request in after.of("requests").items():
        spent = was.get(name) or ended.get(name)
        if spent is None:
            continue
        assert request["attempt"] >= spent["attempt"]
        if request["state"] == "PLACED" and request["attempt"] == spent["attempt"]:
            assert spent.get("state") == "PLACED"
            assert all(request[field] == spent[field] for field in ("executor_id", "generation"))


def _check_queues(records: Records, waiting: dict[str, Any]) -> None:
    assert Counter(records.queue()) == Counter((one["class"], one["tenant"], name) for name, one in waiting.items())
    assert records.scores("ageing").keys() == {name for name, one in waiting.items() if one["class"] > 1}
    state = records.of("state")
    sums = [sum(_tokens(one) for one in waiting.values() if one["class"] == class_) for class_ in CLASSES]
    assert state.get("waiting", 0) == len(waiting)
    assert state.get("bytes", 0) == sum(one["bytes"] for one in waiting.values())
    assert (state.get("waiting_by_class") or [0, 0, 0]) == [
        sum(one["class"] == class_ for one in waiting.values()) for class_ in CLASSES
    ]
    assert (state.get("tokens") or [0, 0, 0]) == sums
    claims = {one["id"]: one["executor_id"] for one in state.get("claims") or []}
    assert claims == {name: one["claim"] for name, one in waiting.items() if one.get("claim")}
    executors = records.of("executors")
    assert {name: one["claim"] for name, one in executors.items() if one.get("claim")} == {
        executor_id: name for name, executor_id in claims.items() if executor_id in executors
    }


def _check_reservations(records: Records, placed: dict[str, Any], budget_blocks: float) -> None:
    executors = records.of("executors")
    assert records.scores("placements").keys() == {
        f"{one['executor_id']}\0{one['attempt']:.0f}\0{name}" for name, one in placed.items()
    }
    assert {one["executor_id"] for one in placed.values()} <= executors.keys()
    for executor_id, executor in executors.items():
        there = [one for one in placed.values() if one["executor_id"] == executor_id]
        assert executor["reserved_blocks"] == sum(one["reserved"] for one in there)
        assert executor["reserved_sequences"] == sum(one["sequences"] for one in there)
        assert executor["reserved_blocks"] <= budget_blocks
        suspects = [one for one in there if one["failures"]]
        assert len(suspects) == executor["has_suspect"]


def _check_tenants(records: Records, waiting: dict[str, Any], placed: dict[str, Any]) -> None:
    tenants = records.of("tenants")
    requests = [*waiting.values(), *placed.values()]
    assert {one["tenant"] for one in requests} <= tenants.keys()
    for name, tenant in tenants.items():
        own = [one for one in waiting.values() if one["tenant"] == name]
        running = sum(one["sequences"] for one in placed.values() if one["tenant"] == name)
        assert (tenant["waiting"], tenant["running"]) == (len(own), running)
        assert tenant["tokens"] == [sum(_tokens(one) for one in own if one["class"] == class_) for class_ in CLASSES]
        assert tenant["bytes"] == sum(one["bytes"] for one in own)
        assert tenant["waiting_by_class"] == [sum(one["class"] == class_ for one in own) for class_ in CLASSES]
        assert tenant["active"] == (bool(own) and running < tenant["max_running"])
    for number, class_ in enumerate(CLASSES):
        active = {name for name, one in tenants.items() if one["active"] and one["waiting_by_class"][number]}
        assert records.scores(f"active:{class_}").keys() == active


def _tokens(request: dict[str, Any]) -> float:
    tokens = request["prompt"] + request["max"]
    is_last = request["placement_blocks"] >= request["blocks"]
    return float(tokens if is_last else min(tokens, request["placement_blocks"] * request["block_size"]))
