"""Credentials for tests: API keys with their entries, and a signer of JSON web tokens with its JWKS."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.test"
AUDIENCE = "inflight.test"


def key_entry(key: str, tenant: str = "acme", **fields: str) -> str:
    """The entry of a key; `fields` are lines of TOML by name."""
    lines = [f'hash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"', f'tenant = "{tenant}"']
    lines += [f"{name} = {value}" for name, value in ({"id": f'"{key[:8]}"'} | fields).items()]
    return "\n".join(("[[key]]", *lines, ""))


@cache
def rsa_key() -> rsa.RSAPrivateKey:
    """An RSA key. To make one takes longer than most tests."""
    return rsa.generate_private_key(65537, 2048)


@cache
def ec_key() -> ec.EllipticCurvePrivateKey:
    """A key on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


@cache
def ed_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def public_jwk(key: Any, kid: str, **fields: str) -> dict[str, Any]:
    """The entry of a private key's public half."""
    kinds: dict[type, Any] = {rsa.RSAPublicKey: RSAAlgorithm, ec.EllipticCurvePublicKey: ECAlgorithm}
    public = key.public_key()
    algorithm = next((kinds[kind] for kind in kinds if isinstance(public, kind)), OKPAlgorithm)
    return {**json.loads(algorithm.to_jwk(public)), "kid": kid, **fields}


def public_pem(key: Any) -> bytes:
    """The public half as PEM."""
    kind, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    pem: bytes = key.public_key().public_bytes(kind, form)
    return pem


def write_jwks(path: Path, *entries: dict[str, Any]) -> Path:
    """A JWKS file."""
    path.write_text(json.dumps({"keys": entries}))
    return path


@dataclass(slots=True)
class Signer:
    """Signs valid tokens, with the given claims and headers replaced."""

    key: Any
    algorithm: str = "RS256"
    kid: str = "one"
    claims: dict[str, Any] = field(default_factory=dict)

    def token(self, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """A token; a claim of None is left out."""
        now = int(time.time())
        good = {"iss": ISSUER, "aud": AUDIENCE, "exp": now + 300, "nbf": now - 5, "tenant": "acme"}
        merged = {name: value for name, value in (good | self.claims | claims).items() if value is not None}
        return jwt.encode(merged, self.key, self.algorithm, headers={"kid": self.kid} | (headers or {}))
