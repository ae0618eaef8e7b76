"""No prompt, output or credential in any log: real processes at level debug, gRPC included, are asked for much that
works and much that does not, and every byte that they wrote is searched."""

from __future__ import annotations

import base64
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from inflight.access import client_options
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.integration.test_requests import rest
from tests.support.stack.credentials import AUDIENCE, ISSUER, Signer, ec_key, key_entry, public_jwk, write_jwks

KEY = "inflight-" + "K7q" * 15
WRONG_KEY = "inflight-" + "W3r" * 15
PROMPT = "The zebra Quixotella hid 48151623 marbles under the Vexbridge."
SESSION, SALT, USER_METADATA = "session-Zyx77341", "salt-Zyx77342", "metadata-Wvu77343"

EXECUTOR_ARGS = ("--dtype", "float32", "--max-tokens-in-paged-kv-cache", "640", "--log-level", "debug")


def forms(secret: str) -> Iterator[bytes]:
    """A text as logs may show it: plain, hexadecimal, base64 at each of the three places where it can begin."""
    raw = secret.encode()
    yield raw
    yield raw.hex().encode()
    yield raw.hex(" ").encode()
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + raw)
        yield encoded[4 if shift else 0 : -4]


def id_forms(token_ids: Sequence[int]) -> Iterator[bytes]:
    """A list of token ids as logs may show it, whole or from its third on."""
    for ids in (token_ids[:6], token_ids[2:8]):
        for separator in (", ", ",", " "):
            yield separator.join(map(str, ids)).encode()


def settings_of(folder: Path) -> tuple[str, ...]:
    keys, jwks = folder / "keys.toml", folder / "jwks.json"
    keys.write_text(key_entry(KEY, id='"the-key"', classes='["standard"]'))
    write_jwks(jwks, public_jwk(ec_key(), "one"))
    doors = ("--api-keys-file", str(keys), "--jwt-jwks-file", str(jwks))
    return (
        *doors,
        "--jwt-issuer",
        ISSUER,
        "--jwt-audience",
        AUDIENCE,
        "--no-executor-grace-s",
        "0.1",
        "--log-level",
        "debug",
        "--log-format",
        "json",
    )


def bearer(credential: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {credential}"),)


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    """What distinctive requests have in common."""
    whole: dict[str, Any] = {
        "text": PROMPT,
        "sampling": types_pb2.SamplingParams(temperature=0),
        "stopping": types_pb2.StoppingParams(max_tokens=12, ignore_eos=True),
        "output": inference_pb2.OutputOptions(token_ids=True, text=True),
        "session_id": SESSION,
        "cache": inference_pb2.CacheOptions(salt=SALT),
        "metadata": {"note": USER_METADATA},
    }
    return inference_pb2.GenerateRequest(**(whole | fields))


async def events_of(stub: Any, message: Any, credential: str) -> list[inference_pb2.StreamEvent]:
    return [one.event async for one in stub.Generate(message, metadata=bearer(credential), timeout=300)]


async def fails(stub: Any, method: str, message: Any, credential: str) -> None:
    """The call ends in an error, whichever."""
    call = getattr(stub, method)(message, metadata=bearer(credential), timeout=120)
    with pytest.raises(grpc.aio.AioRpcError):
        await (call.read() if method in ("Generate", "Resume") else call)


async def many_failures(stub: Any, token: str) -> None:
    """Bad fields, other tenants, classes and models, wrong credentials, unknown requests and tokens."""
    bad = [
        request(sampling=types_pb2.SamplingParams(temperature=-1)),
        request(stopping=types_pb2.StoppingParams(max_tokens=1 << 30)),
        request(token_ids=inference_pb2.TokenIds(ids=[48151, 62342, 99999999]), text=""),
        request(request_id="not allowed/" + PROMPT),
        request(tenant=PROMPT),
        request(model=PROMPT[:40]),
        request(priority=types_pb2.PRIORITY_CLASS_INTERACTIVE),
        request(text=PROMPT * 200),
    ]
    for message in bad:
        await fails(stub, "Generate", message, KEY)
    for credential in (WRONG_KEY, token[:-6] + "AAAAAA", ""):
        await fails(stub, "Generate", request(), credential)
    for method in ("Cancel", "GetRequest", "Resume"):
        message_class = getattr(inference_pb2, f"{method}Request")
        await fails(stub, method, message_class(request_id="unknown", resume_token=WRONG_KEY[9:]), KEY)
    await fails(stub, "Tokenize", inference_pb2.TokenizeRequest(text=PROMPT, model=PROMPT[:40]), KEY)
    malformed = stub_of_bytes(stub)
    with pytest.raises(grpc.aio.AioRpcError):
        await malformed(b"\x0a\x40" + PROMPT.encode() + b"\xff", metadata=bearer(KEY)).read()


def routers_of(stack: LocalStack) -> grpc.aio.Channel:
    """A channel that, as clients' do, tries again while the ledger has not heard of the executor yet."""
    return grpc.aio.insecure_channel(stack.address, client_options((stack.address,), retries=True))


def stub_of_bytes(stub: Any) -> Any:
    """`Generate` with bytes for a request."""
    channel: grpc.aio.Channel = stub.channel
    return channel.unary_stream("/inflight.v1.InferenceService/Generate")


async def test_no_prompt_output_or_credential_is_in_any_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both formats have the same messages and exceptions: the router writes JSON and the executor text."""
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    options = StackOptions(
        router_args=settings_of(tmp_path),
        executor_args=EXECUTOR_ARGS,
        run_dir=tmp_path / "run",
        program=(sys.executable, "-m", "inflight.cli.main"),
    )
    token = Signer(ec_key(), "ES256").token(sub="subject-Zyx77344")
    # Given requests that succeed, fail, and are cancelled
    async with LocalStack(options) as stack, routers_of(stack) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        stub.channel = channel
        streams = [await events_of(stub, request(), credential) for credential in (KEY, token)]
        prompt_ids = await stub.Tokenize(inference_pb2.TokenizeRequest(text=PROMPT), metadata=bearer(KEY))
        cancelled = stub.Generate(request(stopping=types_pb2.StoppingParams(max_tokens=200)), metadata=bearer(KEY))
        await cancelled.read()
        cancelled.cancel()
        await many_failures(stub, token)
        redis_password = stack.redis_url.partition("@")[0].rpartition(":")[2]
        # And an executor that dies under one
        dying = stub.Generate(request(stopping=types_pb2.StoppingParams(max_tokens=200)), metadata=bearer(KEY))
        await dying.read()
        os.kill(stack.executors[0].pid, signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError):
            await rest(dying)
    accepted = [event.accepted for stream in streams for event in stream if event.HasField("accepted")]
    texts = ["".join(event.delta.text for event in stream if event.HasField("delta")) for stream in streams]
    ids = [[i for event in stream if event.HasField("delta") for i in event.delta.token_ids] for stream in streams]
    assert len(accepted) == 2
    assert all(len(text) > 8 for text in texts)
    # Then no byte of what the processes wrote is of those
    secrets = [PROMPT, PROMPT[4:20], SESSION, SALT, "Zyx77344", KEY, WRONG_KEY, redis_password, *texts]
    secrets += [token, *token.split(".")[1:], *(one.resume_token for one in accepted)]
    sought = {form: secret for secret in secrets for form in forms(secret)}
    sought |= {form: "token ids" for one in (list(prompt_ids.token_ids), *ids) for form in id_forms(one)}
    logs = sorted((tmp_path / "run").glob("*.log"))
    assert len(logs) == 3
    found = [
        f"{path.name}: {sought[form]!r} in {_around(content, form)!r}"
        for path in logs
        for content in (path.read_bytes(),)
        for form in sought
        if form in content
    ]
    assert not found, "\n".join(found)
    router_log = next(path.read_text() for path in logs if path.name.startswith("router"))
    assert '"level": "debug"' in router_log
    assert any(" DEBUG " in path.read_text() for path in logs if path.name.startswith("executor"))
    assert "a caller is not let in" in router_log
    assert USER_METADATA in router_log  # which is for the log, and shows that what is there is found


def _around(content: bytes, form: bytes) -> bytes:
    at = content.index(form)
    return content[max(0, at - 150) : at + len(form) + 60]
