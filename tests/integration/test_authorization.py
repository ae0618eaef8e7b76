"""The rights of identified callers on a serving router: not as another tenant, not above their class, not beyond their
models. A caller without credentials gets only health and reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from inflight.router.auth.caller import Caller
from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.integration.test_requests import expected_ids, ids_of
from tests.support.stack.cluster import Cluster, RunningRouter, run_cluster, token_request
from tests.support.stack.credentials import AUDIENCE, ISSUER, Signer, ec_key, key_entry, public_jwk, write_jwks

METHODS = sorted(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name)
ADMISSION = 'unknown_tenants = "refuse"\n[tenants.acme]\n[tenants.umbrella]\n[tenants.default]\nmax_running = 0\n'


def api_key(name: str) -> str:
    return f"inflight-{name:x<43}"


def shown(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key(name)}"),)


@asynccontextmanager
async def locked_cluster(redis_url: str, pool: str, folder: Path) -> AsyncIterator[Cluster]:
    """A cluster with keys of acme: all, standard only, another model only; of an operator; of a tenant unknown; of
    another tenant."""
    keys = {
        "all": {},
        "standard": {"classes": '["standard", "batch"]'},
        "model": {"models": f'["{pool}"]'},
        "other": {"models": '["other"]'},
        "operator": {"operator": "true"},
        "stranger": {"tenant": '"stranger"'},
        "umbrella": {"tenant": '"umbrella"'},
    }
    entries = []
    for name, fields in keys.items():
        tenant = fields.pop("tenant", '"acme"').strip('"')
        entries.append(key_entry(api_key(name), tenant, id=f'"{name}"', **fields))
    (folder / "keys").write_text("".join(entries))
    (folder / "admission").write_text(ADMISSION)
    settings = RouterSettings(
        api_keys_file=folder / "keys",
        jwt_jwks_file=write_jwks(folder / "jwks", public_jwk(ec_key(), "one")),
        jwt_issuer=ISSUER,
        jwt_audience=AUDIENCE,
        admission_file=folder / "admission",
        no_executor_grace_s=60.0,
    )
    async with run_cluster(redis_url, pool, settings=settings, metadata=shown("operator")) as cluster:
        yield cluster


def output_of(tenant: str) -> list[int]:
    """What the fake device, whose cache is salted with the tenant's name, produces for that tenant."""
    return expected_ids([1, 2], 3, f"{tenant}\0".encode())


async def generate(router: RunningRouter, metadata: Any, **fields: Any) -> list[int]:
    call = router.stub.Generate(token_request([1, 2], 3, **fields), metadata=metadata)
    return ids_of([response.event async for response in call])


async def status_of(router: RunningRouter, metadata: Any, **fields: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(router, metadata, **fields)
    return error.value.code()


async def test_generate_is_held_against_the_callers_key(redis_url: str, pool: str, tmp_path: Path) -> None:
    denied, interactive = grpc.StatusCode.PERMISSION_DENIED, types_pb2.PRIORITY_CLASS_INTERACTIVE
    async with locked_cluster(redis_url, pool, tmp_path) as cluster:
        router, expected = cluster.routers[0], output_of("acme")
        # A tenant is its key's, and may be named; no other may be
        assert await generate(router, shown("all")) == expected
        assert await generate(router, shown("all"), tenant="acme", priority=interactive) == expected
        assert await status_of(router, shown("all"), tenant="umbrella") is denied
        assert await status_of(router, shown("all"), tenant="default") is denied
        # but by an operator
        assert await generate(router, shown("operator"), tenant="umbrella") == output_of("umbrella")
        # No caller gets a class above the key's
        assert await status_of(router, shown("standard"), priority=interactive) is denied
        assert await generate(router, shown("standard")) == expected
        # or for a model that is not the key's; no name is the only one
        assert await status_of(router, shown("other"), model=pool) is denied
        assert await generate(router, shown("model"), model=pool) == expected
        assert await generate(router, shown("model")) == expected
        # A key opens the door, but the admission file says whether its tenant is served
        assert await status_of(router, shown("stranger")) is denied


async def test_credential_is_verified_once_for_a_call(
    redis_url: str, pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with locked_cluster(redis_url, pool, tmp_path) as cluster:
        router = cluster.routers[0]
        authenticator = router.service._authenticator
        identify, num_verified = authenticator.identify, 0

        def counted(metadata: Any) -> Caller:
            nonlocal num_verified
            num_verified += 1
            return identify(metadata)

        monkeypatch.setattr(authenticator, "identify", counted)
        await router.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=shown("all"))
        assert num_verified == 1
        # The next call is verified by its own credential
        assert await generate(router, shown("all")) == output_of("acme")
        assert num_verified == 2
        assert await status_of(router, shown("unknown")) is grpc.StatusCode.UNAUTHENTICATED
        assert num_verified == 3


async def test_generate_is_held_against_the_callers_token(redis_url: str, pool: str, tmp_path: Path) -> None:
    denied, signer = grpc.StatusCode.PERMISSION_DENIED, Signer(ec_key(), "ES256")
    async with locked_cluster(redis_url, pool, tmp_path) as cluster:
        router = cluster.routers[0]

        def token(**claims: Any) -> tuple[tuple[str, str], ...]:
            return (("authorization", f"Bearer {signer.token(**claims)}"),)

        assert await generate(router, token()) == output_of("acme")
        assert await status_of(router, token(), tenant="umbrella") is denied
        batch = token(inflight_classes=["batch"])
        assert await status_of(router, batch, priority=types_pb2.PRIORITY_CLASS_STANDARD) is denied
        assert await status_of(router, token(inflight_models=["other"]), model=pool) is denied
        assert await status_of(router, token(exp=1)) is grpc.StatusCode.UNAUTHENTICATED


async def test_caller_sees_its_own_models_and_no_other_names(redis_url: str, pool: str, tmp_path: Path) -> None:
    async with locked_cluster(redis_url, pool, tmp_path) as cluster:
        stub = cluster.routers[0].stub

        async def models(name: str) -> list[str]:
            response = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=shown(name))
            return [model.name for model in response.models]

        async def capacity(name: str, model: str = "") -> inference_pb2.GetCapacityResponse:
            request = inference_pb2.GetCapacityRequest(model=model)
            response: inference_pb2.GetCapacityResponse = await stub.GetCapacity(request, metadata=shown(name))
            return response

        assert [await models(name) for name in ("all", "model", "other")] == [[pool], [pool], []]
        assert [len((await capacity(name)).executors) for name in ("all", "model", "other")] == [1, 1, 0]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await capacity("other", pool)
        assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
        # Not even the text about a model that is not there names one that the caller may not use
        for model in ("other", ""):
            request = inference_pb2.TokenizeRequest(model=model, text="t1")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Tokenize(request, metadata=shown("other"))
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
            assert pool not in str(error.value.details())


async def test_anothers_request_looks_like_none(redis_url: str, pool: str, tmp_path: Path) -> None:
    async with locked_cluster(redis_url, pool, tmp_path) as cluster:
        stub, brake = cluster.routers[0].stub, cluster.executors[0].brake

        async def answer(method: str, who: str, **fields: str) -> tuple[grpc.StatusCode, str | None]:
            call = getattr(stub, method)(getattr(inference_pb2, f"{method}Request")(**fields), metadata=shown(who))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await (call.read() if method == "Resume" else call)
            return error.value.code(), error.value.details()

        # Given a request of acme's that runs
        brake.hold()
        call = stub.Generate(token_request([1, 2], 3), metadata=shown("all"))
        brake.permit(1)
        accepted = (await call.read()).event.accepted
        request_id, token = accepted.request_id, accepted.resume_token
        # Then another tenant with the token, the tenant itself without it, and a name made up are told the same
        answers = set()
        for method in ("Cancel", "GetRequest", "Resume"):
            answers.add(await answer(method, "umbrella", request_id=request_id, resume_token=token))
            answers.add(await answer(method, "all", request_id=request_id))
            answers.add(await answer(method, "all", request_id=request_id, resume_token=token[:-2] + "AA"))
            answers.add(await answer(method, "umbrella", request_id="unknown"))
        answers.add(await answer("Cancel", "umbrella", request_id=request_id, tenant="acme"))
        assert [code for code, _ in answers] == [grpc.StatusCode.NOT_FOUND]
        # An operator needs no token to look and to end it, but to read what it brings
        answers.add(await answer("Resume", "operator", request_id=request_id))
        assert len(answers) == 1
        whose = {"request_id": request_id, "tenant": "acme"}
        await stub.GetRequest(inference_pb2.GetRequestRequest(**whose), metadata=shown("operator"))
        await stub.Cancel(inference_pb2.CancelRequest(**whose), metadata=shown("operator"))
        brake.release()


@pytest.mark.parametrize("credential", [(), (("x-api-key", "inflight-" + "w" * 43),)], ids=["none", "wrong"])
async def test_every_call_needs_a_credential(
    redis_url: str, pool: str, tmp_path: Path, credential: tuple[tuple[str, str], ...]
) -> None:
    async with locked_cluster(redis_url, pool, tmp_path) as cluster:
        stub, texts = cluster.routers[0].stub, set()
        for method in METHODS:
            descriptor = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name[method]
            request = getattr(inference_pb2, descriptor.input_type.name)()
            requests = iter([request]) if descriptor.client_streaming else request
            call = getattr(stub, method)(requests, metadata=credential)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await (call.read() if descriptor.server_streaming else call)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
            texts.add(error.value.details())
        assert len(texts) == 1


async def test_health_and_reflection_need_no_credential(redis_url: str, pool: str, tmp_path: Path) -> None:
    async with (
        locked_cluster(redis_url, pool, tmp_path) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection.ServerReflectionInfo(iter([question]))
        services = (await answers.read()).list_services_response.service
        assert "inflight.v1.InferenceService" in [service.name for service in services]


def test_the_stub_has_all_methods() -> None:
    assert set(METHODS) <= set(vars(inference_pb2_grpc.InferenceServiceServicer))
