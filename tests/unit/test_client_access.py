"""Credentials of clients: sent with every call, only over TLS or to this machine; contradictions are refused."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from inflight import aio, sync
from inflight.access import Access, open_access
from inflight.cli.main import main
from inflight.common.errors import Reason, RequestError
from inflight.errors import InflightError
from inflight.local.certificates import CertificateFolder, make_certificates
from inflight.local.state import ProcessState, StackState, write_state
from inflight.v1 import inference_pb2
from tests.unit.scripted_router import WORDS, ScriptedRouter, accepted, delta, ending, serving

SECRET = "key-0123456789"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    return make_certificates(tmp_path_factory.mktemp("tls") / "certificates")


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def secure_address(router: ScriptedRouter, certificates: CertificateFolder) -> Iterator[str]:
    pair = (certificates.key("router").read_bytes(), certificates.certificate("router").read_bytes())
    with serving(router, grpc.ssl_server_credentials([pair])) as address:
        yield address


@pytest.fixture(autouse=True)
def _nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ADDRESS", "RUN_DIR", "API_KEY", "TLS", "CA_FILE", "SERVER_NAME"):
        monkeypatch.delenv(f"INFLIGHT_{name}", raising=False)


def access_to(*targets: str, **options: Any) -> Access:
    return open_access(targets, options, metadata=None, retries=True)  # type: ignore[arg-type]


# --- who calls


def test_a_key_goes_with_every_call_also_where_a_stream_is_resumed() -> None:
    def breaks(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Any:
        yield accepted()
        yield delta(WORDS[0], 0)
        raise RequestError(Reason.DRAINING, "goes away")

    def resumes(request: inference_pb2.ResumeRequest, context: grpc.ServicerContext) -> Any:
        for offset in range(1, len(WORDS)):
            yield delta(WORDS[offset], offset)
        yield from ending(len(WORDS))

    router = ScriptedRouter(breaks, resumes)
    with serving(router) as address, sync.Client(address, api_key=SECRET) as client:
        assert client.generate("hi").text() == "".join(WORDS)
    assert [call["authorization"] for call in router.metadata] == [f"Bearer {SECRET}"] * 2


async def test_a_token_is_asked_for_at_every_call() -> None:
    numbers = itertools.count()
    router = ScriptedRouter()
    with serving(router) as address:
        async with aio.AsyncClient(address, token=lambda: f"token-{next(numbers)}") as client:
            await client.complete("hi")
            await client.complete("hi")
    assert [call["authorization"] for call in router.metadata] == ["Bearer token-0", "Bearer token-1"]


def test_a_key_is_not_sent_in_the_clear_to_another_machine() -> None:
    with pytest.raises(ValueError, match="unencrypted") as caught:
        access_to("127.0.0.1:1", "10.0.0.1:1", api_key=SECRET)
    assert SECRET not in str(caught.value)
    assert access_to("10.0.0.1:1", api_key=SECRET, tls=True).credentials is not None
    assert access_to("unix:/run/router", api_key=SECRET).credentials is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"api_key": SECRET, "token": SECRET}, "either api_key or token"),
        ({"api_key": " "}, "api_key: must be"),
        ({"token": f"{SECRET}\nX: y"}, "token: must be"),
        ({"tls": True, "credentials": grpc.ssl_channel_credentials()}, "either credentials or tls"),
        ({"server_name": "router"}, "server_name"),
        ({"ca_file": "nowhere.pem"}, "ca_file: No such file"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        access_to("localhost:1", **options)
    assert SECRET not in str(caught.value)


def test_tls_to_several_routers_expects_one_name_of_all() -> None:
    name = "grpc.ssl_target_name_override"
    assert dict(access_to("localhost:1", "localhost:2", tls=True).options)[name] == "localhost"
    assert dict(access_to("127.0.0.1:1", "localhost:2", tls=True, server_name="r").options)[name] == "r"
    assert name not in dict(access_to("localhost:1", tls=True).options)
    with pytest.raises(ValueError, match="server_name: required"):
        access_to("127.0.0.1:1", "localhost:2", tls=True)


# --- the way there


async def test_both_clients_reach_a_router_by_tls(secure_address: str, certificates: CertificateFolder) -> None:
    async with aio.AsyncClient(secure_address, ca_file=certificates.ca_file, api_key=SECRET) as client:
        assert await client.generate("hi").text() == "".join(WORDS)


def test_a_name_that_the_certificate_does_not_bear_is_refused_with_a_hint(
    secure_address: str, certificates: CertificateFolder
) -> None:
    with (
        sync.Client(secure_address, ca_file=certificates.ca_file, server_name="other.example", retries=False) as client,
        pytest.raises(InflightError) as caught,
    ):
        client.list_models(timeout=60.0)
    assert "server_name" in str(caught.value)


def test_an_authority_that_is_not_known_is_refused_with_a_hint(secure_address: str, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other")
    with sync.Client(secure_address, ca_file=other.ca_file, retries=False) as client, pytest.raises(InflightError) as c:
        client.list_models(timeout=60.0)
    assert "ca_file" in str(c.value)


def test_what_to_set_is_part_of_a_refusal_for_want_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Any:
        raise RequestError(Reason.UNAUTHENTICATED, "a valid credential is needed")

    with serving(ScriptedRouter(script)) as address:
        assert main(["generate", "hi", "--raw", "--address", address, "--api-key", SECRET]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: UNAUTHENTICATED: a valid credential is needed; set api_key or token")
    assert "INFLIGHT_API_KEY" in error
    assert SECRET not in error


# --- the command line


def keys_shown(router: ScriptedRouter) -> list[str]:
    return [call["authorization"] for call in router.metadata]


def test_a_commands_key_is_flag_then_file_then_environment(
    router: ScriptedRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.setenv("INFLIGHT_API_KEY", "from-environment")
    with serving(router) as address:
        for flags in ([], ["--api-key-file", "key"], ["--api-key", "from-flag"]):
            assert main(["generate", "hi", "--raw", "--address", address, *flags]) == 0
    assert keys_shown(router) == [f"Bearer from-{where}" for where in ("environment", "file", "flag")]
    output = capsys.readouterr()
    assert "from-" not in output.out + output.err


def test_a_command_reaches_a_router_by_tls(
    secure_address: str, certificates: CertificateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["generate", "hi", "--address", secure_address, "--ca-file", str(certificates.ca_file)]) == 0
    monkeypatch.setenv("INFLIGHT_CA_FILE", str(certificates.ca_file))
    assert main(["models", "--address", secure_address]) == 0
    assert main(["models", "--address", secure_address, "--server-name", "localhost"]) == 0


@pytest.mark.parametrize("flags", [[], ["--tls"]], ids=["unencrypted", "without its authority"])
def test_a_command_that_the_certificate_stops_says_what_to_set(
    secure_address: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--address", secure_address, *flags]) == 1
    error = capsys.readouterr().err
    assert "ca_file" in error
    assert "inflight up" not in error


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--api-key-file", "nowhere"], "--api-key-file: No such file"),
        (["--ca-file", "nowhere"], "ca_file: No such file"),
        (["--address", "far.example:1", "--api-key", SECRET], "unencrypted"),
    ],
)
def test_wrong_access_is_a_usage_error(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--address", "127.0.0.1:1", *flags]) == 2
    assert named in capsys.readouterr().err


def test_a_variable_that_is_neither_yes_nor_no_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFLIGHT_TLS", "perhaps")
    assert main(["models", "--address", "127.0.0.1:1"]) == 2
    assert "INFLIGHT_TLS: 'perhaps' is not one of" in capsys.readouterr().err


def test_the_way_to_a_local_stack_with_tls_needs_no_flags(
    secure_address: str, certificates: CertificateFolder, tmp_path: Path, router: ScriptedRouter
) -> None:
    (tmp_path / "run").mkdir()
    stack = StackState(os.getpid(), secure_address, "redis://x", (), ca_file=str(certificates.ca_file))
    write_state(tmp_path / "run", stack)
    assert main(["models"]) == 0
    second = ProcessState("router-1", "router", 1, secure_address.replace("127.0.0.1", "localhost"), "log")
    write_state(tmp_path / "run", replace(stack, processes=(second,)))
    assert main(["models", "--server-name", "localhost"]) == 0
