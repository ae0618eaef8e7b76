"""JSON web tokens: the file of public keys, and the caller that a token names.

The token's `kid` selects the key. The algorithm is the key's own, never the token's. Tokens must be signed by a private
key, which this router does not have: no HMAC, no `none`. These claims are read:

| claim | content |
| --- | --- |
| `iss` `aud` `exp` | required and checked; `nbf` and `iat` are checked if present |
| the tenant's (`jwt_tenant_claim`) | required: text |
| `inflight_classes` | list of classes that may be asked for; absent: all |
| `inflight_models` | list of models that may be used; absent: all |
| `inflight_operator` | true: may act for, and inspect, every tenant |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.utils import base64url_decode

from inflight.common.rpc.json_counts import MAX_NESTING, nests_deeper
from inflight.router.auth.api_keys import CLASSES
from inflight.router.auth.caller import Caller
from inflight.router.config.tenants import is_tenant_name
from inflight.router.config.watched_file import ContentError, Problem
from inflight.v1 import types_pb2

CLASSES_CLAIM = "inflight_classes"
MODELS_CLAIM = "inflight_models"
OPERATOR_CLAIM = "inflight_operator"
MAX_TOKEN_CHARACTERS = 8192
LEEWAY_S = 30
MIN_RSA_BITS = 2048

# The algorithms of a key by its type and curve. The first is the default if the key names none.
ALGORITHMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("RSA", ""): ("RS256", "PS256"),
    ("EC", "P-256"): ("ES256",),
    ("OKP", "Ed25519"): ("EdDSA",),
}


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key and the one algorithm of its signatures."""

    key: Any
    algorithm: str


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The claims that a token must have."""

    issuer: str
    audience: str
    tenant_claim: str


class TokenError(Exception):
    """The token is invalid. The text says why and repeats nothing of the token."""


def verify_token(token: str, keys: Mapping[str, VerificationKey], rules: TokenRules) -> Caller:
    """Returns the bearer of the token. Raises `TokenError`."""
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise TokenError("too long")
    try:
        if any(nests_deeper(base64url_decode(part)) for part in token.split(".")[:2]):
            raise TokenError(f"nested more than {MAX_NESTING} levels deep")
        header = jwt.get_unverified_header(token)
        key = keys.get(header.get("kid", ""))
        if key is None:
            raise TokenError("its kid is not among the keys")
        claims = jwt.decode(
            token,
            key.key,
            algorithms=[key.algorithm],
            issuer=rules.issuer,
            audience=rules.audience,
            leeway=LEEWAY_S,
            options={"require": ["iss", "aud", "exp", rules.tenant_claim]},
        )
    # The last three: malformed JSON. PyJWT also reads UTF-16, in which levels are not counted.
    except (jwt.PyJWTError, ValueError, ArithmeticError, RecursionError) as error:
        raise TokenError(type(error).__name__) from None
    return _caller(claims, rules)


def _caller(claims: Mapping[str, Any], rules: TokenRules) -> Caller:
    tenant = claims[rules.tenant_claim]
    if not (isinstance(tenant, str) and is_tenant_name(tenant)):
        raise TokenError("its tenant is no tenant's name")
    operator = claims.get(OPERATOR_CLAIM, False)
    if not isinstance(operator, bool):
        raise TokenError(f"its {OPERATOR_CLAIM} is neither true nor false")
    return Caller(tenant, _classes(claims), _names(claims, MODELS_CLAIM), operator)


def _classes(claims: Mapping[str, Any]) -> frozenset[types_pb2.PriorityClass] | None:
    names = _names(claims, CLASSES_CLAIM)
    if names is not None and not names <= CLASSES.keys():
        raise TokenError(f"its {CLASSES_CLAIM} are not all known")
    return None if names is None else frozenset(CLASSES[name] for name in names)


def _names(claims: Mapping[str, Any], claim: str) -> frozenset[str] | None:
    names = claims.get(claim)
    if names is None and claim not in claims:
        return None
    if not (isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)):
        raise TokenError(f"its {claim} is no list of names")
    return frozenset(names)


def parse_jwks(source: str) -> dict[str, VerificationKey]:
    """Returns the keys of a JWKS file by id. Raises `ContentError`."""
    if nests_deeper(source.encode()):
        raise ContentError((Problem(None, f"is nested more than {MAX_NESTING} levels deep"),))
    try:
        content = json.loads(source)
    except ValueError as error:
        raise ContentError((Problem(getattr(error, "lineno", None), f"is not JSON: {error}"),)) from None
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ContentError((Problem(None, 'must be {"keys": […]} with at least one key'),))
    keys: dict[str, VerificationKey] = {}
    problems: list[Problem] = []
    for number, entry in enumerate(entries, start=1):
        try:
            key_id, key = _verification_key(entry)
            if key_id in keys:
                raise _UnusableKey("its kid is that of another key")
            keys[key_id] = key
        except _UnusableKey as error:
            problems.append(Problem(None, f"key number {number}: {error}"))
    if problems:
        raise ContentError(tuple(problems))
    return keys


class _UnusableKey(Exception):
    """The key cannot be used. The text says why."""


def _verification_key(entry: Any) -> tuple[str, VerificationKey]:
    if not isinstance(entry, dict):
        raise _UnusableKey("must be an object")
    key_id = entry.get("kid")
    if not (isinstance(key_id, str) and key_id):
        raise _UnusableKey("kid is needed")
    if "d" in entry or "k" in entry:
        raise _UnusableKey("is secret; this file is for public keys only")
    if entry.get("use", "sig") != "sig":
        raise _UnusableKey('use must be "sig"')
    allowed = ALGORITHMS.get((str(entry.get("kty")), str(entry.get("crv", ""))))
    if allowed is None:
        raise _UnusableKey("must be RSA, EC on curve P-256, or OKP on curve Ed25519")
    algorithm = entry.get("alg", allowed[0])
    if algorithm not in allowed:
        raise _UnusableKey(f"alg must be {' or '.join(allowed)}")
    try:
        key = jwt.PyJWK(entry, algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError) as error:
        raise _UnusableKey(f"is no key: {type(error).__name__}") from None
    if isinstance(key, rsa.RSAPublicKey) and key.key_size < MIN_RSA_BITS:
        raise _UnusableKey(f"has {key.key_size} bits; an RSA key needs {MIN_RSA_BITS}")
    return key_id, VerificationKey(key, algorithm)
