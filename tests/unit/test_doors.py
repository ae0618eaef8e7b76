"""Authentication: which credentials identify which caller; every invalid credential gets the same answer."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import jwt
import pytest

from inflight.cli.main import main
from inflight.common.errors import Reason, RequestError
from inflight.common.settings import SettingError
from inflight.router.auth.api_keys import ApiKey, find_key, parse_keys
from inflight.router.auth.authenticator import Authentication, CredentialAuthenticator
from inflight.router.auth.caller import ANYBODY, Caller, Metadata
from inflight.router.auth.jwt import LEEWAY_S, TokenRules, parse_jwks
from inflight.router.config.watched_file import ContentError
from inflight.router.settings import RouterSettings
from inflight.v1 import types_pb2
from tests.support.stack.credentials import (
    AUDIENCE,
    ISSUER,
    Signer,
    ec_key,
    ed_key,
    key_entry,
    public_jwk,
    public_pem,
    rsa_key,
    write_jwks,
)

KEY = "inflight-" + "k" * 43
OTHER_KEY = "inflight-" + "o" * 43
ACME = Caller("acme")


def bearer(credential: str) -> Metadata:
    return (("user-agent", "test"), ("authorization", f"Bearer {credential}"))


def keys_authentication(path: Path, text: str) -> Authentication:
    path.write_text(text)
    return Authentication(RouterSettings(api_keys_file=path))


def tokens_settings(path: Path, *entries: dict[str, Any], **settings: Any) -> RouterSettings:
    write_jwks(path, *entries)
    return RouterSettings(jwt_jwks_file=path, jwt_issuer=ISSUER, jwt_audience=AUDIENCE, **settings)


def tokens_door(path: Path, *entries: dict[str, Any], **settings: Any) -> CredentialAuthenticator:
    authenticator = Authentication(tokens_settings(path, *entries, **settings)).authenticator
    assert isinstance(authenticator, CredentialAuthenticator)
    return authenticator


def refusal(authenticator: Any, metadata: Metadata) -> str:
    with pytest.raises(RequestError) as caught:
        authenticator.identify(metadata)
    assert caught.value.reason is Reason.UNAUTHENTICATED
    return str(caught.value.description)


def test_key_for_a_model_that_is_not_served_is_warned_about_at_start_and_when_the_file_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    entry = f'[[key]]\nid = "acme-1"\nhash = "sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"\ntenant = "acme"\n'
    path.write_text(entry + 'models = ["smol", "Smol"]\n')
    authentication = Authentication(RouterSettings(api_keys_file=path), lambda: {"smol", "smol-ab"})
    assert [record.getMessage() for record in caplog.records] == [
        "API key 'acme-1' names the model 'Smol', which is not served here; served: smol, smol-ab"
    ]

    caplog.clear()
    path.write_text(entry + 'models = ["smol-ab", "gone"]\n')
    assert authentication._keys is not None
    authentication._keys.look()
    assert "'gone'" in caplog.records[0].getMessage()


def test_no_file_is_an_open_door() -> None:
    assert Authentication(RouterSettings()).authenticator.identify(()) == ANYBODY


@pytest.mark.parametrize(
    "metadata",
    [bearer(KEY), (("authorization", f"bearer  {KEY}"),), (("x-api-key", KEY),)],
    ids=["bearer", "case and blanks", "x-api-key"],
)
def test_key_opens(tmp_path: Path, metadata: Metadata) -> None:
    assert keys_authentication(tmp_path / "keys", key_entry(KEY)).authenticator.identify(metadata) == ACME


def test_key_says_what_its_bearer_may(tmp_path: Path) -> None:
    text = key_entry(KEY, classes='["standard", "batch"]', models='["m"]', operator="true")
    classes = frozenset({types_pb2.PRIORITY_CLASS_STANDARD, types_pb2.PRIORITY_CLASS_BATCH})
    expected = Caller("acme", classes, frozenset({"m"}), is_operator=True)
    assert keys_authentication(tmp_path / "keys", text).authenticator.identify(bearer(KEY)) == expected


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer(OTHER_KEY),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(""),
        (("authorization", KEY),),
        (("authorization", f"Basic {KEY}"),),
        (*bearer(KEY), ("x-api-key", KEY)),
        (*bearer(KEY), *bearer(KEY)),
        (*bearer(OTHER_KEY), *bearer(KEY)),
        (("x-api-key", KEY), ("x-api-key", OTHER_KEY)),
        bearer(hashlib.sha256(KEY.encode()).hexdigest()),
        bearer("a.b.c"),
    ],
)
def test_wrong_and_missing_credentials_are_answered_the_same(tmp_path: Path, metadata: Metadata) -> None:
    authenticator = keys_authentication(tmp_path / "keys", key_entry(KEY)).authenticator
    assert refusal(authenticator, metadata) == refusal(authenticator, bearer("disabled"))


def test_expired_and_disabled_keys_open_nothing() -> None:
    keys = parse_keys(
        key_entry(KEY, expires="2027-01-01T00:00:00Z") + key_entry(OTHER_KEY, id='"off"', disabled="true")
    )
    authenticator = CredentialAuthenticator(lambda: keys, None, TokenRules("", "", "tenant"), lambda: now_s)
    now_s = 1798761600.0 - 1
    assert authenticator.identify(bearer(KEY)) == ACME
    now_s += 1
    assert refusal(authenticator, bearer(KEY)) == refusal(authenticator, bearer(OTHER_KEY))


def test_every_key_is_compared_in_constant_time_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [ApiKey(str(i), hashlib.sha256(f"{i}{KEY}".encode()).digest(), ACME) for i in range(5)]
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return compare(a, b)

    monkeypatch.setattr("inflight.router.auth.api_keys.hmac.compare_digest", watched)
    for presented, found in ((f"0{KEY}", keys[0]), (f"4{KEY}", keys[4]), (f"9{KEY}", None)):
        compared.clear()
        assert find_key(keys, presented) is found
        assert compared == [key.digest for key in keys]


def test_key_that_is_too_short_to_be_random_opens_nothing() -> None:
    assert find_key(parse_keys(key_entry("hunter2")), "hunter2") is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[key]\n", "line 1: is not TOML"),
        ("[keys]\n", "line 1: keys: is not known"),
        ("key = 1\n", "line 1: key: must be tables"),
        (key_entry(KEY, color='"red"'), "line 5: key number 1, color: is not known; known: id, hash"),
        ('[[key]]\nid = "a"\n', "line 1: key number 1, hash: is missing"),
        ('[[key]]\nid = "a"\ntenant = "t"\nhash = "md5:00"\n', "line 4: key number 1, hash: must be"),
        (f'[[key]]\nid = "a"\ntenant = "t"\nhash = "sha256:{"z" * 64}"\n', "line 4: key number 1, hash: must be"),
        (key_entry(KEY, id='""'), "line 4: key number 1, id: must be"),
        (key_entry(KEY, "a\\nb"), "line 3: key number 1, tenant: a tenant's name must have"),
        (
            key_entry(KEY, classes='["gold"]'),
            "line 5: key number 1, classes number 1: must be 'interactive', 'standard' or",
        ),
        (key_entry(KEY, models="[]"), "line 5: key number 1, models: must not be empty"),
        (key_entry(KEY, models='["m", ""]'), "line 5: key number 1, models number 2: must not be empty"),
        (key_entry(KEY, disabled='"no"'), "line 5: key number 1, disabled: must be true or false"),
        (key_entry(KEY, operator="1"), "line 5: key number 1, operator: must be true or false"),
        (
            key_entry(KEY, expires="2027-01-01"),
            "line 5: key number 1, expires: must be a date and time, as 2027",
        ),
        (
            key_entry(KEY, expires="2027-01-01T00:00:00"),
            "line 5: key number 1, expires: must be a date and time with an offset",
        ),
        (key_entry(KEY) + key_entry(OTHER_KEY), "line 8: key number 2, id: is that of key number 1"),
        (key_entry(KEY) + key_entry(KEY, id='"b"'), "line 6: key number 2, hash: is that of key number 1"),
    ],
)
def test_error_in_the_file_of_keys_names_line_and_key(text: str, problem: str) -> None:
    with pytest.raises(ContentError) as caught:
        parse_keys(text)
    assert str(caught.value).startswith(problem)


def test_key_in_place_of_its_hash_is_not_repeated() -> None:
    with pytest.raises(ContentError) as caught:
        parse_keys(f'[[key]]\nid = "a"\ntenant = "t"\nhash = "{KEY}"\nsecret = "{KEY}"\n')
    assert KEY not in str(caught.value)
    assert len(caught.value.problems) == 2


def test_rotated_file_is_read_and_a_broken_one_keeps_the_old(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authentication = keys_authentication(tmp_path / "keys", key_entry(KEY))
    assert authentication._keys is not None

    def rewrite(text: str) -> None:
        replacement = tmp_path / "new"
        replacement.write_text(text)
        os.replace(replacement, tmp_path / "keys")
        assert authentication._keys is not None
        authentication._keys.look()

    rewrite(key_entry(OTHER_KEY))
    assert authentication.authenticator.identify(bearer(OTHER_KEY)) == ACME
    refusal(authentication.authenticator, bearer(KEY))
    rewrite("[[key")
    authentication._keys.look()
    assert authentication.authenticator.identify(bearer(OTHER_KEY)) == ACME
    assert [one.levelno for one in caplog.records].count(logging.ERROR) == 1


def test_new_key_is_printed_once_with_an_entry_that_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tenant", "acme", "--classes", "standard,batch", "--models", "m", "--operator", "--days", "30"]
    assert main(["key", "new", *flags]) == 0
    key, _, entry = capsys.readouterr().out.partition("\n")
    assert key not in entry
    (parsed,) = parse_keys(entry)
    assert find_key([parsed], key) is parsed
    classes = frozenset({types_pb2.PRIORITY_CLASS_STANDARD, types_pb2.PRIORITY_CLASS_BATCH})
    assert parsed.caller == Caller("acme", classes, frozenset({"m"}), is_operator=True)
    assert parsed.expires_s is not None


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--tenant", ""], "--tenant"), (["--classes", "gold"], "gold"), (["--days", "0"], "--days")],
)
def test_entry_that_would_open_nothing_is_not_made(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["key", "new", "--tenant", "acme", *flags])
    output = capsys.readouterr()
    assert named in output.err
    assert not output.out


# JSON web tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "algorithm", "fields"),
    [
        (rsa_key, "RS256", {}),
        (rsa_key, "PS256", {"alg": "PS256"}),
        (ec_key, "ES256", {"use": "sig"}),
        (ed_key, "EdDSA", {"alg": "EdDSA"}),
    ],
)
def test_token_opens(tmp_path: Path, key: Any, algorithm: str, fields: dict[str, str]) -> None:
    authenticator = tokens_door(tmp_path / "jwks", public_jwk(key(), "one", **fields))
    assert authenticator.identify(bearer(Signer(key(), algorithm).token())) == ACME


def test_token_says_what_its_bearer_may(tmp_path: Path) -> None:
    authenticator = tokens_door(tmp_path / "jwks", public_jwk(ec_key(), "one"), jwt_tenant_claim="https://test/org")
    token = Signer(ec_key(), "ES256", claims={"https://test/org": "umbrella"}).token(
        tenant=None,
        nbf=None,
        inflight_classes=["batch"],
        inflight_models=["m"],
        inflight_operator=True,
    )
    expected = Caller("umbrella", frozenset({types_pb2.PRIORITY_CLASS_BATCH}), frozenset({"m"}), is_operator=True)
    assert authenticator.identify(bearer(token)) == expected


def signed_by_hand(header: dict[str, Any], claims: dict[str, Any], secret: bytes | None) -> str:
    """What PyJWT refuses to sign."""
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    signed = b".".join(parts)
    tag = b"" if secret is None else hmac.digest(secret, signed, "sha256")
    return (signed + b"." + base64.urlsafe_b64encode(tag).rstrip(b"=")).decode()


def good_claims() -> dict[str, Any]:
    return jwt.decode(Signer(ec_key(), "ES256").token(), options={"verify_signature": False})


# As UTF-8 it is a list and a text: the bytes of ≛ are a bracket and a quote.
HIDDEN_NESTING = ('["\u225b",' + "[" * 2_000).encode("utf-16-le")

BAD_TOKENS: dict[str, Any] = {
    "expired": lambda: Signer(rsa_key()).token(exp=int(time.time()) - LEEWAY_S - 1),
    "not yet": lambda: Signer(rsa_key()).token(nbf=int(time.time()) + LEEWAY_S + 60),
    "no expiry": lambda: Signer(rsa_key()).token(exp=None),
    "strange expiry": lambda: Signer(rsa_key()).token(exp=float("inf")),
    "wrong issuer": lambda: Signer(rsa_key()).token(iss="https://other.test"),
    "no issuer": lambda: Signer(rsa_key()).token(iss=None),
    "wrong audience": lambda: Signer(rsa_key()).token(aud="other.test"),
    "no audience": lambda: Signer(rsa_key()).token(aud=None),
    "no tenant": lambda: Signer(rsa_key()).token(tenant=None),
    "tenant is no text": lambda: Signer(rsa_key()).token(tenant=["acme"]),
    "tenant is no name": lambda: Signer(rsa_key()).token(tenant="a\0b"),
    "unknown class": lambda: Signer(rsa_key()).token(inflight_classes=["gold"]),
    "models are no list": lambda: Signer(rsa_key()).token(inflight_models="m"),
    "operator is no truth": lambda: Signer(rsa_key()).token(inflight_operator="yes"),
    "unknown kid": lambda: Signer(rsa_key(), kid="two").token(),
    "kid is no text": lambda: signed_by_hand({"alg": "RS256", "kid": ["one"]}, good_claims(), None),
    "no kid": lambda: jwt.encode(good_claims(), rsa_key(), "RS256"),
    "another key": lambda: Signer(ec_key(), "ES256").token(),
    "another algorithm of the key": lambda: Signer(rsa_key(), "PS256").token(),
    "unknown critical header": lambda: Signer(rsa_key()).token({"crit": ["x"], "x": 1}),
    "alg none": lambda: signed_by_hand({"alg": "none", "kid": "one"}, good_claims(), None),
    "HS256 with the public key": lambda: signed_by_hand(
        {"alg": "HS256", "kid": "one"}, good_claims(), public_pem(rsa_key())
    ),
    "changed claims": lambda: _with_claims(Signer(rsa_key()).token(), {**good_claims(), "tenant": "umbrella"}),
    "too long": lambda: Signer(rsa_key()).token(filling="x" * 8192),
    "deep header": lambda: f"{base64.urlsafe_b64encode(b'[' * 3000).decode()}.e30.x",
    "no token": lambda: "a.b.c",
    "nested": lambda: Signer(rsa_key()).token(filling=json.loads("[" * 200 + "]" * 200)),
    "nested header": lambda: Signer(rsa_key()).token({"x": json.loads("[" * 200 + "]" * 200)}),
    "nested header in UTF-16": lambda: f"{base64.urlsafe_b64encode(HIDDEN_NESTING).decode()}.e30.x",
    "an API key": lambda: KEY,
}


def _with_claims(token: str, claims: dict[str, Any]) -> str:
    header, _, signature = token.split(".")
    return ".".join((header, base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("="), signature))


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_bad_token_opens_nothing_and_is_answered_as_any_other(tmp_path: Path, name: str) -> None:
    authenticator = tokens_door(tmp_path / "jwks", public_jwk(rsa_key(), "one"))
    assert refusal(authenticator, bearer(BAD_TOKENS[name]())) == refusal(authenticator, ())


def test_clocks_may_differ_a_little(tmp_path: Path) -> None:
    authenticator = tokens_door(tmp_path / "jwks", public_jwk(ec_key(), "one"))
    token = Signer(ec_key(), "ES256").token(exp=int(time.time()) - LEEWAY_S // 2, nbf=int(time.time()) + LEEWAY_S // 2)
    assert authenticator.identify(bearer(token)) == ACME


def test_both_doors_at_once(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(key_entry(KEY, "of-key"))
    settings = tokens_settings(tmp_path / "jwks", public_jwk(ec_key(), "one"), api_keys_file=tmp_path / "keys")
    authenticator = Authentication(settings).authenticator
    assert authenticator.identify(bearer(KEY)).tenant == "of-key"
    assert authenticator.identify(bearer(Signer(ec_key(), "ES256").token())).tenant == "acme"
    assert refusal(authenticator, bearer(OTHER_KEY)) == refusal(authenticator, bearer("a.b.c"))


def test_rotated_jwks_lets_the_new_key_in_and_the_old_one_out(tmp_path: Path) -> None:
    authentication = Authentication(tokens_settings(tmp_path / "jwks", public_jwk(rsa_key(), "one")))
    write_jwks(tmp_path / "jwks", public_jwk(ec_key(), "one"))
    assert authentication._tokens is not None
    authentication._tokens.look()
    assert authentication.authenticator.identify(bearer(Signer(ec_key(), "ES256").token())) == ACME
    refusal(authentication.authenticator, bearer(Signer(rsa_key()).token()))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ([], "must be an object"),
        ({"kty": "RSA"}, "kid is needed"),
        ({"kty": "oct", "kid": "a", "k": "c2VjcmV0"}, "is secret"),
        ({"kty": "oct", "kid": "a"}, "must be RSA, EC"),
        ({"kty": "EC", "crv": "secp256k1", "kid": "a"}, "must be RSA, EC"),
        ({"kty": "RSA", "kid": "a", "alg": "HS256"}, "alg must be RS256 or PS256"),
        ({"kty": "RSA", "kid": "a", "alg": "none"}, "alg must be RS256 or PS256"),
        ({"kty": "RSA", "kid": "a", "use": "enc"}, 'use must be "sig"'),
        ({"kty": "RSA", "kid": "a"}, "is no key"),
        ({"kty": "RSA", "kid": "a", "n": "AQAB" * 20, "e": "AQAB"}, "needs 2048"),
    ],
)
def test_key_that_cannot_be_used_is_named(entry: Any, problem: str) -> None:
    with pytest.raises(ContentError, match=f"key number 1: .*{problem}"):
        parse_jwks(json.dumps({"keys": [entry]}))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"keys": []}', '{"keys": 1}', "[" * 3000])
def test_file_that_is_no_jwks_is_refused(text: str) -> None:
    with pytest.raises(ContentError):
        parse_jwks(text)


def test_repeated_kid_is_refused() -> None:
    entry = public_jwk(ec_key(), "one")
    with pytest.raises(ContentError, match="key number 2: its kid"):
        parse_jwks(json.dumps({"keys": [entry, entry]}))


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"jwt_jwks_file": "j", "jwt_audience": "a"}, "--jwt-issuer"),
        ({"jwt_jwks_file": "j", "jwt_issuer": "i"}, "--jwt-audience"),
        ({"jwt_issuer": "i"}, "--jwt-issuer"),
        ({"jwt_audience": "a"}, "--jwt-audience"),
        ({"jwt_tenant_claim": ""}, "--jwt-tenant-claim"),
    ],
)
def test_half_a_door_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RouterSettings(**fields)


def test_file_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--api-keys-file .*cannot read"):
        Authentication(RouterSettings(api_keys_file=tmp_path / "nowhere"))
