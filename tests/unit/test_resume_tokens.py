"""Resume tokens: who may read, cancel and look at a request, and where the secret behind them comes from."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.api.resume import ResumeAuthorizer
from inflight.router.api.service import InferenceService
from inflight.router.auth.caller import ANYBODY, Caller
from inflight.router.auth.resume_token import ResumeTokens
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.ledgers import KEY, learn_secret
from inflight.router.request.ids import client_id, ledger_id
from inflight.router.request.submit import digest_of, keyed_request_id, keyed_seed
from inflight.router.request.validation import REQUEST_ID
from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2
from tests.support.ledger.scripted_store import CallContext, ScriptedRouter
from tests.support.ledger.store_pool import SETTINGS
from tests.support.stack.cluster import token_request

ACME, OTHER = Caller(tenant="acme"), Caller(tenant="other")
ACME_N = Caller(tenant="acme", models=frozenset({"n"}))
OPERATOR = Caller(tenant="ops", is_operator=True)


def claims_of(router: ScriptedRouter) -> ResumeAuthorizer:
    return ResumeAuthorizer(router.pools, router.tokens)


def cancel(**fields: str) -> inference_pb2.CancelRequest:
    return inference_pb2.CancelRequest(**{"request_id": "r", **fields})


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter("m", "n")


@pytest.mark.parametrize("caller", [ANYBODY, ACME, OPERATOR])
def test_token_names_tenant_and_pool(router: ScriptedRouter, caller: Caller) -> None:
    token = router.tokens.make("acme", "n", "r")
    claim = claims_of(router).grant(cancel(resume_token=token), caller)
    assert (claim.choices[0], [pool.name for pool in claim.pools]) == ("acme/r", ["n"])


@pytest.mark.parametrize(
    ("caller", "fields"),
    [
        (OTHER, {}),
        (ACME, {"model": "m"}),
        (ACME_N, {"model": "m"}),
        (ACME_N, {"model": "nowhere"}),
        (ACME, {"request_id": "s"}),
        (ACME, {"resume_token": ""}),
        (ACME, {"resume_token": "", "tenant": "acme"}),
        (OPERATOR, {"resume_token": "AAAA"}),
        (ANYBODY, {"resume_token": "x"}),
    ],
)
def test_any_other_claim_looks_like_an_unknown_request(
    router: ScriptedRouter, caller: Caller, fields: dict[str, str]
) -> None:
    token = router.tokens.make("acme", "n", "r")
    with pytest.raises(RequestError) as caught:
        claims_of(router).grant(cancel(**{"resume_token": token, **fields}), caller)
    assert caught.value.reason is Reason.UNKNOWN_REQUEST


def test_token_of_a_pool_that_is_not_served_here_is_unknown(router: ScriptedRouter) -> None:
    with pytest.raises(RequestError) as caught:
        claims_of(router).grant(cancel(resume_token=router.tokens.make("acme", "gone", "r")), ACME)
    assert caught.value.reason is Reason.UNKNOWN_REQUEST


@pytest.mark.parametrize(
    ("caller", "tenant", "expected"),
    [(ANYBODY, "", "r"), (ANYBODY, "acme", "acme/r"), (OPERATOR, "acme", "acme/r"), (OPERATOR, "", "ops/r")],
)
def test_operators_and_the_unidentified_need_no_token_to_cancel(
    router: ScriptedRouter, caller: Caller, tenant: str, expected: str
) -> None:
    claim = claims_of(router).grant(cancel(tenant=tenant, model="m"), caller)
    assert (claim.choices[0], [pool.name for pool in claim.pools]) == (expected, ["m"])


def test_token_tells_the_choices_of_a_request(router: ScriptedRouter) -> None:
    token = router.tokens.make("acme", "n", "r", num_choices=3)
    claim = claims_of(router).grant(cancel(resume_token=token), ACME)
    assert (claim.choices, claim.is_exact) == (("acme/r", "acme/r~1", "acme/r~2"), True)
    assert not any(REQUEST_ID.fullmatch(client_id(choice)) for choice in claim.choices[1:])


async def test_resume_needs_a_token_from_any_caller(router: ScriptedRouter) -> None:
    with pytest.raises(RequestError) as caught:
        await router.service.Resume(inference_pb2.ResumeRequest(request_id="r"), cast(Any, CallContext()))
    assert caught.value.reason is Reason.UNKNOWN_REQUEST


# --- the secret


async def test_without_a_secret_nothing_is_begun() -> None:
    router = ScriptedRouter("m")
    router.link("e0", "m")
    tokens = ResumeTokens(None)
    router.service = InferenceService(router.pools, RouterSettings(), router.admission, _Open(), tokens, router.stats)
    with pytest.raises(RequestError) as caught:
        await router.service.Generate(token_request([1], 2), cast(Any, CallContext()))
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    assert caught.value.retry_after_ms


class _Open:
    def identify(self, metadata: Any) -> Caller:
        return ANYBODY


async def test_routers_share_the_secret_and_give_it_back_to_an_empty_redis(
    redis_url: str, redis_admin_url: str
) -> None:
    redis, admin = connect_node(redis_url, SETTINGS), connect_node(redis_admin_url, SETTINGS)

    async def learn(own: bytes | None) -> bytes:
        return await learn_secret(redis, SETTINGS, own)

    first, second = ResumeTokens(None, learn), ResumeTokens(None, learn)
    running = [asyncio.create_task(tokens.run()) for tokens in (first, second)]
    try:
        await asyncio.wait_for(asyncio.gather(first.known(), second.known()), 60)
        token = first.make("acme", "m", "r")
        assert second.read(token, "r") == first.read(token, "r") is not None
        # When Redis loses it, and another router is faster
        kept = await admin.get(KEY)
        await admin.set(KEY, (b"\1" * 32).hex())
        first.check_again()
        async with asyncio.timeout(60):
            while first.make("acme", "m", "r") == token:
                await asyncio.sleep(0.001)
        # Then what is out stays good
        assert first.read(token, "r") is not None
        # And when none was, it is put back
        await admin.delete(KEY)
        second.check_again()
        async with asyncio.timeout(60):
            while await admin.get(KEY) is None:
                await asyncio.sleep(0.001)
        assert await admin.get(KEY) == kept
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await admin.delete(KEY)
        await admin.aclose()
        await redis.aclose()


async def test_secret_is_learned_when_the_ledger_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.router.auth.resume_token.RETRY_S", 0.0)
    answers: list[Any] = [RequestError(Reason.STORE_UNAVAILABLE, "away"), b"s" * 32]

    async def learn(own: bytes | None) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, RequestError):
            raise answer
        return cast(bytes, answer)

    tokens = ResumeTokens(None, learn)
    running = asyncio.create_task(tokens.run())
    await asyncio.wait_for(tokens.known(), 60)
    running.cancel()
    assert tokens.read(tokens.make("t", "m", "r"), "r") is not None


# --- ids


def test_ledger_ids_of_tenants_do_not_meet() -> None:
    assert ledger_id("default", "r") == "r"
    assert ledger_id("a/b", "r") == "a/b/r"
    assert client_id("a/b/r") == client_id("r") == "r"


def test_keyed_id_is_an_id_like_any_other_and_each_tenants_own() -> None:
    ids = {keyed_request_id(tenant, key) for tenant in ("a", "b") for key in ("k", "l", "🦙" * 128)}
    assert len(ids) == 6
    assert all(REQUEST_ID.fullmatch(one) for one in ids)
    assert keyed_seed("a", "k") == keyed_seed("a", "k") != keyed_seed("b", "k")
    assert 0 <= keyed_seed("a", "k") < 1 << 64


def test_digest_differs_with_all_but_what_the_client_has() -> None:
    request = token_request([1, 2], 5, idempotency_key="k")
    same = token_request([1, 2], 5, idempotency_key="k")
    same.prior_output.output_ids.append(3)
    same.tenant = "default"
    assert digest_of(request, "default") == digest_of(same, "default")
    same.stopping.max_tokens = 6
    assert digest_of(request, "default") != digest_of(same, "default")
    assert digest_of(request, "default") != digest_of(request, "acme")
