"""Names of LoRA adapters in a router: what they stand for, and what ledger, executor and client are told."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from inflight.catalogue import decode_models
from inflight.common.errors import Reason, RequestError
from inflight.gateway.answers import model_objects
from inflight.router.config.tenants import parse_tenants
from inflight.router.dispatch.pools import Adapter, adapters_of
from inflight.router.executors.frame_checks import check_report
from inflight.router.executors.link import ExecutorLink
from inflight.router.ledger.types import (
    DEFAULT_TENANT,
    Dropped,
    DropReason,
    Explanation,
    LedgerState,
    Placement,
    Queued,
    Refused,
    ServedAdapter,
)
from inflight.router.request.executor_context import FrameError, context_of
from inflight.router.request.ids import ledger_id, prefix_hashes
from inflight.router.request.submit import keyed_request_id
from inflight.v1 import executor_pb2, inference_pb2
from tests.support.ledger.scripted_store import CallContext, ScriptedRouter, place, settled
from tests.support.stack.cluster import token_request

A, B, C = (letter * 64 for letter in "abc")
PROMPT = [1, 2, 3, 4] * 3


def report(*served: tuple[str, str, bool], draining: bool = False) -> executor_pb2.Report:
    """A report of adapters, each with name, hash and whether it is resident."""
    message = executor_pb2.Report(seq=1, total_blocks=32, draining=draining)
    for name, adapter_hash, resident in served:
        message.adapters.add(name=name, hash=adapter_hash, rank=8, resident=resident)
    return message


def serve(link: ExecutorLink, *served: tuple[str, str, bool], **fields: Any) -> None:
    """The executor of the link reports that it serves these."""
    link.receive(executor_pb2.ServeResponse(report=report(*served, **fields)))


@pytest.fixture
async def router() -> ScriptedRouter:
    """A router of the model m, of which one executor serves two adapters."""
    router = ScriptedRouter("m")
    serve(router.link("e0", "m", num_adapter_slots=2), ("sql", A, True), ("tone", B, False))
    return router


async def answered(router: ScriptedRouter, request: inference_pb2.GenerateRequest) -> RequestError:
    """The error of a request that the ledger refuses, if nothing before does."""
    router.stores["m"].answers.append(Refused(Reason.QUEUE_FULL))
    async with router.running():
        with pytest.raises(RequestError) as caught:
            await router.service.Generate(request, cast(Any, CallContext()))
    return caught.value


# --- what a name stands for


def test_content_that_most_executors_serve_is_chosen() -> None:
    rolling_out = [report(("sql", A, True)), report(("sql", B, True)), report(("sql", B, False))]
    assert adapters_of(rolling_out) == {"sql": Adapter("sql", B, 8, 2, 1)}


def test_executors_that_drain_do_not_count_unless_all_do() -> None:
    draining = [report(("sql", A, True), draining=True), report(("sql", A, True), draining=True)]
    assert adapters_of([*draining, report(("sql", B, False))])["sql"].hash == B
    assert adapters_of(draining)["sql"].hash == A


def test_every_order_of_reports_gives_the_same_choice() -> None:
    reports = [report(("sql", A, True)), report(("sql", B, True))]
    assert adapters_of(reports) == adapters_of(reversed(reports))


# --- what the ledger and the executor are told


@pytest.mark.parametrize("fields", [{"model": "m", "adapter_id": "sql"}, {"model": "m:sql"}, {"adapter_id": "sql"}])
async def test_ledger_is_told_of_the_adapters_content(router: ScriptedRouter, fields: dict[str, str]) -> None:
    assert (await answered(router, token_request(PROMPT, 2, **fields))).reason is Reason.QUEUE_FULL
    (demand,) = router.stores["m"].demands
    assert demand.adapter == A
    assert demand.prefix_hashes == prefix_hashes(PROMPT, 4, b"default\0" + b"\0" + A.encode())


async def test_prefixes_are_shared_neither_with_the_base_nor_with_another_adapter(router: ScriptedRouter) -> None:
    async with router.running():
        for adapter in ("", "sql", "tone"):
            router.stores["m"].answers.append(Refused(Reason.QUEUE_FULL))
            request = token_request(PROMPT, 2, adapter_id=adapter)
            with pytest.raises(RequestError):
                await router.service.Generate(request, cast(Any, CallContext()))
    names = [name for demand in router.stores["m"].demands for name in demand.prefix_hashes]
    assert len(names) == len(set(names)) > 3


async def test_request_keeps_the_content_of_its_admission(router: ScriptedRouter) -> None:
    (link,) = router.pools.by_name["m"].links
    router.stores["m"].answers.append(Queued(0))
    async with router.running():
        request = token_request([1], 2, request_id="r", adapter_id="sql")
        call = asyncio.create_task(router.service.Generate(request, cast(Any, CallContext())))
        await settled()
        serve(link, ("sql", C, True))
        router.stores["m"].tell(Placement("r", 1, "e0", 1))
        await settled()
        (submit,) = link._outbox.submits
        assert submit.adapter_hash == A
        attached = executor_pb2.SequenceAttached(request_id="r", attempt=1, submit=submit)
        assert context_of(attached).adapter_id == "sql"
        restored = router.service._preparation.restore(router.pools.by_name["m"], attached)
        assert restored.demand().adapter == A
        # Another router admitted it earlier, by the ledger, with other content.
        assert place(restored, Placement("r", 2, "e0", 1, adapter=B)).adapter_hash == B
        assert restored.demand().adapter == B
        router.stores["m"].tell(Dropped("r", DropReason.NEVER_FITS))
        call.cancel()
        await settled()


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_repeat_of_a_waiting_request_needs_no_name(is_allowed: bool) -> None:
    # Given a request of another router that waits with an adapter whose name no executor reports now
    served = '["sql"]' if is_allowed else "[]"
    router = ScriptedRouter("m", rules=parse_tenants(f"[tenants.default]\nadapters = {served}", frozenset("m")))
    link = router.link("e0", "m", num_adapter_slots=2)
    store, name = router.stores["m"], ledger_id(DEFAULT_TENANT, keyed_request_id(DEFAULT_TENANT, "k"))
    store.explanations[name] = Explanation(LedgerState.WAITING)
    store.answers.append(Queued(0))
    async with router.running():
        request = token_request([1], 2, idempotency_key="k", adapter_id="sql")
        call = asyncio.create_task(router.service.Generate(request, cast(Any, CallContext())))
        await settled()
        if not is_allowed:
            with pytest.raises(RequestError, match="has no adapter 'sql'"):
                await call
            return
        # Then it is placed with the content of its admission
        store.tell(Placement(name, 1, "e0", 1, adapter=A))
        await settled()
        assert [submit.adapter_hash for submit in link._outbox.submits] == [A]
        call.cancel()
        await settled()


async def test_executor_without_adapters_never_gets_a_request_with_one(router: ScriptedRouter) -> None:
    link = router.link("old", "m")
    assert str(link.refusal_of(executor_pb2.Submit(adapter_hash=A))) == "executor old serves no adapters"
    assert link.refusal_of(executor_pb2.Submit()) is None


async def test_ledger_gets_slots_and_adapters_of_reports(router: ScriptedRouter) -> None:
    async with router.running():
        (link,) = router.pools.by_name["m"].links
        message = report(("sql", A, True), ("tone", B, False))
        message.seq = 2
        message.held.add(request_id="r", attempt=1, reserved_blocks=1, adapter_hash=A)
        link.receive(executor_pb2.ServeResponse(report=message))
        while not any(one.seq == 2 for one in router.stores["m"].reports):
            await asyncio.sleep(0)
    told = next(one for one in router.stores["m"].reports if one.seq == 2)
    assert (told.num_adapter_slots, told.adapters) == (2, (ServedAdapter(A, True), ServedAdapter(B, False)))
    assert told.held[0].adapter == A


@pytest.mark.parametrize("adapter_hash", ["", "a", "A" * 64, "a" * 63 + " "])
def test_report_with_a_hash_that_is_none_breaks_the_link(adapter_hash: str) -> None:
    with pytest.raises(FrameError, match="the hash of an adapter"):
        check_report(report(("sql", adapter_hash, True)), executor_pb2.DescribeResponse(total_blocks=32))


# --- what clients are told


async def test_unknown_adapter_is_not_found_and_the_known_are_named(router: ScriptedRouter) -> None:
    error = await answered(router, token_request([1], 2, model="m:none"))
    assert error.reason is Reason.UNKNOWN_ADAPTER
    assert str(error) == "adapter_id: model m has no adapter 'none'; its adapters: sql, tone"
    assert [violation.field for violation in error.violations] == ["adapter_id"]
    assert not router.stores["m"].demands


@pytest.mark.parametrize(("tenant", "seen"), [("acme", ["tone"]), ("other", ["sql", "tone"]), ("base", [])])
async def test_tenant_uses_and_sees_its_adapters_only(tenant: str, seen: list[str]) -> None:
    rules = parse_tenants('[tenants.acme]\nadapters = ["tone", "gone"]\n[tenants.base]\nadapters = []', frozenset("m"))
    for name in ("sql", "tone"):
        router = ScriptedRouter("m", rules=rules)
        serve(router.link("e0", "m", num_adapter_slots=2), ("sql", A, True), ("tone", B, False))
        error = await answered(router, token_request([1], 2, adapter_id=name, tenant=tenant))
        assert error.reason is (Reason.QUEUE_FULL if name in seen else Reason.UNKNOWN_ADAPTER)
        if name not in seen:
            assert str(error).endswith(f"its adapters: {', '.join(seen) or 'none'}"), "it tells of no other adapter"


async def test_models_are_listed_with_the_adapters_of_the_tenant() -> None:
    rules = parse_tenants('[tenants.default]\nadapters = ["tone"]', frozenset("m"))
    router = ScriptedRouter("m", rules=rules)
    serve(router.link("e0", "m", num_adapter_slots=2), ("sql", A, True), ("tone", B, False))
    async with router.running():
        listed = await router.service.ListModels(inference_pb2.ListModelsRequest(), cast(Any, CallContext()))
    assert [one.name for one in listed.models[0].adapters] == ["tone"]


async def test_name_that_a_model_has_is_not_split() -> None:
    router = ScriptedRouter("m", "m:sql")
    assert router.pools.split_adapter("m:sql") == ("m:sql", "")
    assert router.pools.split_adapter("m:tone") == ("m", "tone")
    assert router.pools.split_adapter("n:tone") == ("n:tone", "")
    assert router.pools.split_adapter("m:") == ("m:", "")
    assert router.pools.split_adapter("") == ("", "")


async def test_models_are_listed_with_their_adapters(router: ScriptedRouter) -> None:
    async with router.running():
        listed = await router.service.ListModels(inference_pb2.ListModelsRequest(), cast(Any, CallContext()))
    (model,) = decode_models(listed)
    assert [(one.name, one.hash, one.num_executors, one.num_resident) for one in model.adapters] == [
        ("sql", A, 1, 1), ("tone", B, 1, 0),
    ]  # fmt: skip
    entries = list(model_objects(model, created=7))
    assert [(one["id"], one["parent"]) for one in entries] == [("m", None), ("m:sql", "m"), ("m:tone", "m")]
    assert {one["max_model_len"] for one in entries} == {64}
