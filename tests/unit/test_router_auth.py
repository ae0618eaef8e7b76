"""Authentication of routers: when an executor starts to serve, and which certificates it accepts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from inflight.cli.up import _parser as up_parser
from inflight.cli.up import stack_options
from inflight.common.rpc.addresses import is_loopback
from inflight.common.settings import SettingError, load
from inflight.executor.serving.router_auth import load_server_tls
from inflight.executor.settings import ExecutorSettings
from inflight.local.certificates import CertificateFolder, make_certificates
from inflight.local.options import StackOptions, executor_command, router_command
from inflight.router.auth.client_tls import connection_limits_of, open_tls
from inflight.router.executors.channel import ExecutorChannels
from inflight.router.settings import RouterSettings


def arguments_of(settings: dict[str, str]) -> list[str]:
    return [word for setting in settings.items() for word in setting]


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_insecure_executor_serves_on_loopback(listen: str) -> None:
    assert is_loopback(listen)
    assert load_server_tls(ExecutorSettings(insecure=True, listen=listen)) is None


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", ":1", "10.0.0.1:1", "example.org:1", "localhost.example:1"])
def test_insecure_executor_refuses_every_other_address(listen: str) -> None:
    with pytest.raises(SettingError, match=r"insecure is only for a loopback address.*tls_cert_file"):
        load_server_tls(ExecutorSettings(insecure=True, listen=listen))


def test_executor_without_certificates_says_what_to_do() -> None:
    with pytest.raises(SettingError, match=r"set tls_cert_file, tls_key_file, tls_ca_file, router_names .*--insecure"):
        load_server_tls(ExecutorSettings())


@pytest.mark.parametrize("missing", ["--tls-cert-file", "--tls-key-file", "--tls-ca-file", "--router-names"])
def test_executor_names_what_its_door_lacks(tmp_path: Path, missing: str) -> None:
    given = CertificateFolder(tmp_path).executor_settings()
    del given[missing]
    settings = load(ExecutorSettings, "inflight executor", arguments_of(given))
    with pytest.raises(SettingError, match=f"set {missing[2:].replace('-', '_')} "):
        load_server_tls(settings)


def test_insecure_and_certificates_contradict(tmp_path: Path) -> None:
    given = arguments_of(CertificateFolder(tmp_path).executor_settings())
    with pytest.raises(SettingError, match="insecure contradicts tls_cert_file"):
        load_server_tls(load(ExecutorSettings, "inflight executor", ["--insecure", *given]))


def test_settings_that_certs_prints_open_every_door(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    executor = load(ExecutorSettings, "inflight executor", arguments_of(made.executor_settings()))
    router = load(RouterSettings, "inflight router", arguments_of(made.router_settings()))
    door, channels, port = load_server_tls(executor), ExecutorChannels.of(router), open_tls(router)
    assert door is not None
    assert door.material.ca is not None
    assert channels.tls is not None
    assert channels.tls.material.ca is not None
    assert port is not None
    assert port.material.ca is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"executor_tls_ca_file": Path("x")}, "executor_tls_ca_file needs executor_tls_cert_file"),
        ({"executor_tls_cert_file": Path("x")}, "executor_tls_cert_file needs executor_tls_key_file"),
        (
            {"executor_tls_cert_file": Path("x"), "executor_tls_key_file": Path("x")},
            "executor_tls_cert_file needs executor_tls_ca_file",
        ),
        ({"executor_tls_name": "x"}, "executor_tls_name needs executor_tls_ca_file"),
    ],
)
def test_router_refuses_half_of_what_executors_ask_for(fields: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        ExecutorChannels.of(RouterSettings(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("listen", "warnings"), [("127.0.0.1:1", 0), ("0.0.0.0:1", 1)])
def test_router_warns_when_clients_are_served_in_the_clear(
    listen: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_tls(RouterSettings(listen=listen)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    assert all("tls_cert_file" in record.getMessage() for record in caplog.records)


def test_router_grants_a_connection_what_its_settings_say() -> None:
    settings = RouterSettings(
        max_streams_per_connection=7,
        max_connection_idle_s=8,
        max_connection_age_s=9,
        handshake_timeout_s=10,
        max_prompt_bytes=1 << 20,
    )
    limits = connection_limits_of(settings)
    assert (limits.max_streams, limits.max_idle_s, limits.max_age_s, limits.handshake_timeout_s) == (7, 8, 9, 10)
    assert limits.max_receive_bytes == 5 << 20


def test_local_stack_is_insecure_or_has_certificates_on_every_door(tmp_path: Path) -> None:
    clear = StackOptions(run_dir=tmp_path)
    assert "--insecure" in executor_command(clear, "e", "127.0.0.1:1")
    locked = stack_options(up_parser().parse_args(["--run-dir", str(tmp_path), "--tls"]))
    executor, router = (
        executor_command(locked, "e", "127.0.0.1:1"),
        router_command(locked, "r", "127.0.0.1:2", ("x:1",)),
    )
    assert "--insecure" not in executor
    assert {"--tls-cert-file", "--tls-ca-file", "--router-names"} <= set(executor)
    assert {"--tls-cert-file", "--executor-tls-cert-file", "--executor-tls-name"} <= set(router)
