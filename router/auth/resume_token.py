"""The token that proves that a request is the caller's: unguessable, and any router can check it without looking it up.

It names tenant and pool in the clear and ends with an HMAC-SHA-256 over these and the request's id, under a secret that
all routers of the system share. Who reads the secret can make tokens; who reads a token can read one request's output.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass

TAG_BYTES = 16
_PURPOSE = b"inflight resume token 1\0"


@dataclass(frozen=True, slots=True)
class TokenSubject:
    """Whose request, and of which pool."""

    tenant: str
    pool: str


def make_token(secret: bytes, subject: TokenSubject, request_id: str) -> str:
    """The token of a request."""
    named = f"{subject.tenant}\0{subject.pool}".encode()
    return base64.urlsafe_b64encode(_tag(secret, named, request_id) + named).decode().rstrip("=")


def read_token(secret: bytes, token: str, request_id: str) -> TokenSubject | None:
    """What a token names, or None where it is not the token of this request. Takes the same time for any wrong one."""
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        tenant, separator, pool = raw[TAG_BYTES:].decode().partition("\0")
    except (binascii.Error, UnicodeError, ValueError):
        return None
    if not separator or not hmac.compare_digest(_tag(secret, raw[TAG_BYTES:], request_id), raw[:TAG_BYTES]):
        return None
    return TokenSubject(tenant, pool)


def _tag(secret: bytes, named: bytes, request_id: str) -> bytes:
    return hmac.digest(secret, _PURPOSE + named + b"\0" + request_id.encode(), "sha256")[:TAG_BYTES]
