"""The service's handling of tenants, names of several models and questions about requests."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.api.prepare import deadlines_s
from inflight.router.api.request_status import waiting_for
from inflight.router.config.tenants import TenantConfig, Variant
from inflight.router.ledger.types import (
    CancelOutcome,
    Explanation,
    LedgerState,
    PrefixHolder,
    Refused,
    TenantLimits,
    WaitReason,
)
from inflight.router.request.ids import prefix_hashes
from inflight.router.text.tokenizer import TextModel
from inflight.v1 import executor_pb2, inference_pb2, stats_pb2, types_pb2
from tests.support.ledger.scripted_store import (
    CallContext,
    ScriptedRouter,
    accepts,
    new_stream,
    placement,
    settled,
    steps,
)
from tests.support.stack.cluster import token_request
from tests.support.text.validated import requested

RULES = TenantConfig(
    tenants={"acme": TenantLimits(weight=2, max_queue_tokens=7), "out": TenantLimits(max_running=0)},
    refuses_unknown_tenants=True,
    variants={"smol": (Variant("m-inflight", 90), Variant("m-static", 10))},
)


@pytest.fixture
def router() -> ScriptedRouter:
    router = ScriptedRouter("m-inflight", "m-static", rules=RULES)
    router.link("e0", "m-inflight")
    router.link("e1", "m-static")
    return router


async def refused(router: ScriptedRouter, request: inference_pb2.GenerateRequest) -> RequestError:
    async with router.running():
        with pytest.raises(RequestError) as caught:
            await router.service.Generate(request, cast(Any, CallContext()))
    return caught.value


async def demand_of(router: ScriptedRouter, request: inference_pb2.GenerateRequest) -> Any:
    """What the ledger is asked for; it refuses."""
    for store in router.stores.values():
        store.answers.append(Refused(Reason.QUEUE_FULL))
    assert (await refused(router, request)).reason is Reason.QUEUE_FULL
    (demand,) = [demand for store in router.stores.values() for demand in store.demands]
    return demand


async def test_ledger_is_told_of_tenant_tokens_bytes_and_prefixes(router: ScriptedRouter) -> None:
    prompt = [1, 2, 3, 4] * 3
    request = token_request(prompt, 9, tenant="acme", model="m-static", priority="PRIORITY_CLASS_BATCH")
    demand = await demand_of(router, request)
    assert (demand.tenant, demand.limits) == ("acme", RULES.tenants["acme"])
    assert (demand.prompt_tokens, demand.max_tokens, demand.block_size, demand.blocks) == (12, 9, 4, 6)
    assert demand.num_bytes > 12
    assert demand.prefix_hashes == prefix_hashes(prompt, 4, b"acme\0")
    assert (demand.priority_class, demand.deadline_ms) == (3, None)


async def test_request_that_bypasses_the_cache_has_no_prefixes(router: ScriptedRouter) -> None:
    request = token_request([1] * 12, 9, tenant="acme", model="m-static")
    request.cache.bypass = True
    assert (await demand_of(router, request)).prefix_hashes == ()


async def test_sooner_deadline_is_the_ledgers(router: ScriptedRouter) -> None:
    request = token_request([1], 9, tenant="acme", model="m-static")
    request.deadlines.first_token.seconds, request.deadlines.total.seconds = 100, 10
    assert 10_000 <= (await demand_of(router, request)).deadline_ms <= 10_600


@pytest.mark.parametrize(
    ("tenant", "code"),
    [
        ("unheard of", grpc.StatusCode.PERMISSION_DENIED),
        ("", grpc.StatusCode.PERMISSION_DENIED),  # there is no [tenants.default]
        ("out", grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_tenant_that_is_not_served_is_refused_before_the_ledger_is_asked(
    router: ScriptedRouter, tenant: str, code: grpc.StatusCode
) -> None:
    error = await refused(router, token_request([1], 2, tenant=tenant, model="m-static"))
    assert error.code is code
    assert not any(store.demands for store in router.stores.values())


@pytest.mark.parametrize("seconds", [7 * 24 * 3600 + 1, 3_600_000_000])
async def test_absurd_deadline_is_refused_with_what_is_allowed(router: ScriptedRouter, seconds: int) -> None:
    request = token_request([1], 2, tenant="acme", model="m-static")
    request.deadlines.total.seconds = seconds
    error = await refused(router, request)
    assert error.reason is Reason.INVALID_FIELD
    assert "deadlines.total: is" in str(error)
    assert "at most 604800 s" in str(error)


def test_absurd_grpc_deadline_is_none() -> None:
    assert deadlines_s(requested(), 3_600_000_000.0) == (None, None)
    assert deadlines_s(requested(), 60.0) == (None, 60.0)


def test_earlier_deadline_counts_unless_the_request_may_outlive_its_call() -> None:
    both = {"first_token": {"seconds": 1, "nanos": 500_000_000}, "total": {"seconds": 70}}
    assert deadlines_s(requested(deadlines=both), 60.0) == (1.5, 60.0)
    assert deadlines_s(requested(deadlines=both, detach=True), 60.0) == (1.5, 70.0)
    assert deadlines_s(requested(resume_ttl={"nanos": 1}), 60.0) == (None, None)
    assert deadlines_s(requested(resume_ttl={}), 60.0) == (None, 60.0)


@pytest.mark.parametrize(
    ("fields", "adds"), [({}, True), ({"add_special_tokens": True}, True), ({"add_special_tokens": False}, False)]
)
async def test_text_to_tokenize_gets_special_tokens_unless_the_caller_wants_none(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], adds: bool
) -> None:
    asked: list[bool] = []

    def encode(self: TextModel, text: str, *, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return [1]

    monkeypatch.setattr(TextModel, "encode", encode)
    request = inference_pb2.TokenizeRequest(text="t1", model="m-static", **fields)
    response = await router.service.Tokenize(request, cast(Any, CallContext()))
    assert (list(response.token_ids), asked) == ([1], [adds])


# --- names of several models


async def test_sessions_are_spread_over_the_models_of_a_name_and_stay(router: ScriptedRouter) -> None:
    pools = {f"s{i}": router.pools.find("smol", f"s{i}").name for i in range(200)}
    assert {"m-inflight", "m-static"} == set(pools.values())
    assert all(router.pools.find("smol", session).name == pool for session, pool in pools.items())
    sessions = [session for session, pool in pools.items() if pool == "m-static"]
    async with router.running():
        for store in router.stores.values():
            store.answers.extend([Refused(Reason.QUEUE_FULL)] * len(sessions))
        for session in sessions:
            request = token_request([1], 2, tenant="acme", model="smol", session_id=session)
            with pytest.raises(RequestError):
                await router.service.Generate(request, cast(Any, CallContext()))
    assert len(router.stores["m-static"].demands) == len(sessions)
    assert router.stores["m-inflight"].demands == []


async def test_served_requests_are_measured_per_model_of_a_name(router: ScriptedRouter) -> None:
    link = router.pools.by_name["m-static"].dispatcher.links[0]
    session = next(s for s in map(str, range(100)) if router.pools.find("smol", s).name == "m-static")
    request = token_request([1], 2, request_id="r", tenant="acme", model="smol", session_id=session)
    context = CallContext()
    async with router.running():
        router.stores["m-static"].answers.append(placement(executor_id="e1", request_id="acme/r"))
        call = asyncio.create_task(router.service.Generate(request, cast(Any, context)))
        await settled()
        link.receive(accepts(1, request_id="acme/r"))
        link.receive(steps(1, 2, cached=0, end=types_pb2.FINISH_REASON_LENGTH))
        await call
        capacity = await router.service.GetCapacity(
            inference_pb2.GetCapacityRequest(model="smol"), cast(Any, CallContext())
        )
    by_variant = {one.variant: one for one in capacity.variants}
    assert [round(by_variant[name].share, 3) for name in ("m-inflight", "m-static")] == [0.9, 0.1]
    assert [by_variant[name].num_ended for name in ("m-inflight", "m-static")] == [0, 1]
    assert by_variant["m-static"].output_tokens == 2
    assert by_variant["m-static"].HasField("ttft_p50_ms")
    assert {executor.model for executor in capacity.executors} == {"m-inflight", "m-static"}
    assert context.events[-1].HasField("done")


async def test_name_of_several_models_is_listed_with_what_all_of_them_allow(router: ScriptedRouter) -> None:
    response = await router.service.ListModels(inference_pb2.ListModelsRequest(), cast(Any, CallContext()))
    assert [model.name for model in response.models] == ["m-inflight", "m-static", "smol"]
    assert (response.models[2].num_executors, response.models[2].context_length) == (2, 64)


async def test_unknown_name_is_told_all_that_are_known(router: ScriptedRouter) -> None:
    with pytest.raises(RequestError, match="known: m-inflight, m-static, smol") as caught:
        router.pools.find("other")
    (violation,) = caught.value.violations
    assert (violation.field, violation.description) == (
        "model", "there is no model 'other'; known: m-inflight, m-static, smol",
    )  # fmt: skip
    with pytest.raises(RequestError, match="must be one of m-inflight, m-static, smol"):
        router.pools.find("")


@pytest.mark.parametrize("model", ["m-inflight", "m-static"])
async def test_request_is_found_and_cancelled_by_the_name_that_it_asked_for(router: ScriptedRouter, model: str) -> None:
    router.stores[model].explanations["r"] = Explanation(LedgerState.PLACED, executor_id="e1")
    router.stores[model].cancels["r"] = CancelOutcome(LedgerState.WAITING)
    for asked in ("smol", model):
        standing = await standing_of(router, model=asked)
        assert standing.state == inference_pb2.REQUEST_STATE_PLACED
        assert standing.variant == (model if asked == "smol" else "")
        cancelled = await router.service.Cancel(
            inference_pb2.CancelRequest(request_id="r", model=asked), cast(Any, CallContext())
        )
        assert cancelled.state == inference_pb2.REQUEST_STATE_WAITING


async def test_ended_request_of_the_same_id_does_not_hide_the_one_that_waits(router: ScriptedRouter) -> None:
    router.stores["m-inflight"].explanations["r"] = Explanation(LedgerState.ENDED)
    router.stores["m-static"].explanations["r"] = Explanation(LedgerState.WAITING)
    router.stores["m-inflight"].cancels["r"] = CancelOutcome(LedgerState.ENDED)
    router.stores["m-static"].cancels["r"] = CancelOutcome(LedgerState.WAITING)
    assert (await standing_of(router, model="smol")).variant == "m-static"
    cancel = inference_pb2.CancelRequest(request_id="r", model="smol")
    assert (await router.service.Cancel(cancel, cast(Any, CallContext()))).state == inference_pb2.REQUEST_STATE_WAITING


# --- questions about a request


async def standing_of(router: ScriptedRouter, **fields: str) -> inference_pb2.GetRequestResponse:
    request = inference_pb2.GetRequestRequest(request_id="r", **fields)
    return await router.service.GetRequest(request, cast(Any, CallContext()))


async def test_waiting_request_is_explained(router: ScriptedRouter) -> None:
    router.stores["m-static"].explanations["r"] = Explanation(
        LedgerState.WAITING,
        priority_class=2,
        position=4,
        estimated_wait_ms=1500,
        wait_reason=WaitReason.BLOCKS,
        needed_blocks=40,
        available_blocks=12,
        times_passed=3,
    )
    standing = await standing_of(router, model="m-static")
    assert standing.waiting_for == "waits for KV blocks: needs 40, at most 12 can be reserved now; bypassed 3 times"
    assert standing.wait_reason == inference_pb2.WAIT_REASON_BLOCKS
    assert standing.estimated_wait.ToMilliseconds() == 1500
    assert (standing.position, standing.needed_blocks, standing.available_blocks) == (4, 40, 12)
    assert (standing.priority, standing.times_passed) == (types_pb2.PRIORITY_CLASS_STANDARD, 3)


async def test_placed_request_is_explained_by_its_executor_and_the_router_that_serves_it(
    router: ScriptedRouter,
) -> None:
    dispatcher = router.pools.by_name["m-static"].dispatcher
    store, (link,), stream = router.stores["m-static"], dispatcher.links, new_stream()
    store.explanations["r"] = Explanation(LedgerState.PLACED, executor_id="e1")
    async with router.running():
        store.answers.append(placement(executor_id="e1"))
        await dispatcher.submit(stream)
        link.receive(accepts(1))
        link.receive(steps(1, 2, 3, cached=0))
        report = executor_pb2.Report(seq=1, constraint=types_pb2.STEP_CONSTRAINT_SEATS)
        link.receive(executor_pb2.ServeResponse(report=report))
        standing = await standing_of(router, model="m-static")
    assert (standing.executor_id, standing.output_tokens, standing.waiting_for) == ("e1", 3, "")
    assert standing.step_constraint == types_pb2.STEP_CONSTRAINT_SEATS
    assert not standing.HasField("estimated_wait")


async def test_request_that_stands_by_on_an_executor_waits_for_a_seat(router: ScriptedRouter) -> None:
    dispatcher = router.pools.by_name["m-static"].dispatcher
    store, (link,), stream = router.stores["m-static"], dispatcher.links, new_stream()
    store.explanations["r"] = Explanation(LedgerState.PLACED, executor_id="e1")
    async with router.running():
        store.answers.append(placement(executor_id="e1"))
        await dispatcher.submit(stream)
        link.receive(accepts(1))
        standing = await standing_of(router, model="m-static")
    assert standing.state == inference_pb2.REQUEST_STATE_WAITING
    assert (standing.executor_id, standing.wait_reason) == ("e1", inference_pb2.WAIT_REASON_SEAT)
    assert standing.waiting_for == "waits on e1 for a seat (standby)"


@pytest.mark.parametrize(
    ("phase", "state", "words"),
    [
        (stats_pb2.SEQUENCE_PHASE_UNSPECIFIED, inference_pb2.REQUEST_STATE_PLACED, ""),
        (
            stats_pb2.SEQUENCE_PHASE_STANDBY,
            inference_pb2.REQUEST_STATE_WAITING,
            "waits on e1 for a seat (standby)",
        ),
        (
            stats_pb2.SEQUENCE_PHASE_PREEMPTED,
            inference_pb2.REQUEST_STATE_WAITING,
            "waits on e1 to get its seat back (preempted)",
        ),
    ],
)
async def test_request_that_another_router_serves_is_explained_by_its_executors_report(
    router: ScriptedRouter, phase: stats_pb2.SequencePhase, state: inference_pb2.RequestState, words: str
) -> None:
    (link,) = router.pools.by_name["m-static"].dispatcher.links
    router.stores["m-static"].explanations["r"] = Explanation(LedgerState.PLACED, attempt=1, executor_id="e1")
    async with router.running():
        held = [executor_pb2.HeldSequence(request_id="r", attempt=1, phase=phase)]
        link.receive(executor_pb2.ServeResponse(report=executor_pb2.Report(seq=1, held=held)))
        standing = await standing_of(router, model="m-static")
    assert (standing.state, standing.waiting_for) == (state, words)


async def test_unknown_request_is_not_found(router: ScriptedRouter) -> None:
    with pytest.raises(RequestError) as caught:
        await standing_of(router, model="smol")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    with pytest.raises(RequestError, match="must not be empty"):
        await router.service.GetRequest(inference_pb2.GetRequestRequest(), cast(Any, CallContext()))


@pytest.mark.parametrize("reason", WaitReason)
def test_every_wait_has_its_sentence(reason: WaitReason) -> None:
    sentence = waiting_for(Explanation(LedgerState.WAITING, tenant="acme", wait_reason=reason))
    assert sentence.startswith("waits ")


@pytest.mark.parametrize(("prefill_ms", "says"), [(2000, "stays with e1"), (2001, "no longer waits for e1")])
def test_request_that_waits_says_where_its_prefix_is(prefill_ms: int, says: str) -> None:
    holder = PrefixHolder("e1", prefill_ms, tolerated_ms=2000)
    waiting = Explanation(LedgerState.WAITING, wait_reason=WaitReason.SEAT, prefix_holder=holder)
    assert f"; {says}, which has its prefix" in waiting_for(waiting)
    assert f"{prefill_ms:,} ms, 2,000 ms are tolerated" in waiting_for(waiting)


def test_lost_request_waits_for_its_place_in_line() -> None:
    assert "returns to the queue" in waiting_for(Explanation(LedgerState.LOST))
    assert waiting_for(Explanation(LedgerState.ENDED)) == ""
