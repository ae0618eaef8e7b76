"""`inflight kube-secrets`: Secrets that the manifests refer to, different in every run."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import kubernetes_validate
import pytest
from cryptography import x509

from inflight.cli.main import main
from inflight.router.auth.api_keys import find_key, parse_keys


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """Manifests by name, each valid."""
    assert main(("kube-secrets", *arguments)) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    for item in items:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
    return {item["metadata"]["name"]: item for item in items}


def content(manifest: dict[str, Any]) -> dict[str, str]:
    return {key: b64decode(value).decode() for key, value in manifest["data"].items()}


def test_certificates_bear_the_services_names_in_the_namespace(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = made(capsys, "--namespace", "llm", "--name", "llm.example.org")
    assert {manifest["metadata"]["namespace"] for manifest in secrets.values()} == {"llm"}
    router = secrets["inflight-router-tls"]
    assert router["type"] == "kubernetes.io/tls"
    certificate = x509.load_pem_x509_certificate(content(router)["tls.crt"].encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"inflight-router", "inflight-router.llm.svc", "llm.example.org"} <= set(
        names.get_values_for_type(x509.DNSName)
    )
    # Clients get no key
    assert set(secrets["inflight-client-tls"]["data"]) == {"ca.crt"}


def test_redis_users_are_hashed_and_the_default_one_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--without-certificates", "--without-api-keys")
    first, second = made(capsys, *flags), made(capsys, *flags)
    assert set(first) == {"inflight-redis", "inflight-redis-server", "inflight-resume"}
    password = content(first["inflight-redis"])["password"]
    assert password != content(second["inflight-redis"])["password"]
    users = content(first["inflight-redis-server"])["users.acl"]
    assert users.startswith("user default off\nuser inflight on #")
    assert password not in users
    assert len(content(first["inflight-resume"])["secret"]) >= 32


def test_routers_accept_the_operators_key(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = made(capsys, "--without-certificates")
    file = content(secrets["inflight-api-keys"])["keys.toml"]
    key = content(secrets["inflight-operator-key"])["key"]
    found = find_key(parse_keys(file), key)
    assert found is not None
    assert found.caller.is_operator
    assert key not in file


def test_names_are_those_of_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = made(capsys, "--prefix", "blue", "--namespace", "llm")
    assert all(name.startswith("blue-") for name in secrets)
    certificate = x509.load_pem_x509_certificate(content(secrets["blue-router-tls"])["tls.crt"].encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    # Executors authorize the first name, clients check the second
    assert {"inflight-router", "blue-router.llm.svc"} <= set(names.get_values_for_type(x509.DNSName))
    assert main(("kube-secrets", "--prefix", "Blue_")) == 2
    assert "--prefix" in capsys.readouterr().err


def test_a_name_that_cannot_stand_in_a_certificate_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("kube-secrets", "--name", "münchen")) == 2
    assert "--name" in capsys.readouterr().err
    assert main(("kube-secrets", "--days", "0")) == 2
