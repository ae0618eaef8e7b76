"""Resume tokens: proof that a request is the caller's, which any router can check without looking the request up.

A token names tenant, pool and the number of choices in the clear and ends with an HMAC-SHA-256 over these and the
request's id, under a secret that all routers of the system share. It cannot be guessed. A process that reads the secret
can make tokens, and a reader of a token can read one request's output.

The secret is a setting. Without the setting the ledger keeps it, and the first router makes it. If Redis loses it, the
routers write it back; if another router has made a new one by then, this router makes tokens with the new one, and
tokens that clients hold stay valid here.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from inflight.common.errors import Reason, RequestError
from inflight.router.request.errors import RETRY_AFTER_MS

log = logging.getLogger(__name__)

Learn = Callable[[bytes | None], Awaitable[bytes]]

RETRY_S = 0.5
MAX_SECRETS = 4
TAG_BYTES = 16
_PURPOSE = b"inflight resume token 1\0"


@dataclass(frozen=True, slots=True)
class TokenSubject:
    """The owner of a request, its pool, and the number of choices that it generates."""

    tenant: str
    pool: str
    num_choices: int = 1


class ResumeTokens:
    """The tokens of this router. `learn(own)` asks the ledger for the secret and stores `own` if there is none."""

    def __init__(self, secret: bytes | None, learn: Learn | None = None) -> None:
        # Newest first.
        self._secrets: list[bytes] = [] if secret is None else [secret]
        self._learn = None if secret is not None else learn
        self._is_due = asyncio.Event()
        self._is_due.set()
        self._is_known = asyncio.Event()
        if self._secrets:
            self._is_known.set()

    def check_again(self) -> None:
        """Learns the secret again: the ledger may have lost it."""
        self._is_due.set()

    async def known(self) -> None:
        """Waits until there is a secret."""
        await self._is_known.wait()

    async def run(self) -> None:
        """Learns the secret, and again when it may be lost, until cancelled."""
        while self._learn is not None:
            await self._is_due.wait()
            self._is_due.clear()
            try:
                secret = await self._learn(self._secrets[0] if self._secrets else None)
            except RequestError as error:
                log.debug("the secret of resume tokens cannot be learned yet: %s", error)
                self._is_due.set()
                await asyncio.sleep(RETRY_S)
                continue
            self._take(secret)

    def _take(self, secret: bytes) -> None:
        others = [one for one in self._secrets if one != secret]
        self._secrets = [secret, *others][:MAX_SECRETS]
        self._is_known.set()

    def make(self, tenant: str, pool: str, request_id: str, num_choices: int = 1) -> str:
        """Returns the token of a request. Raises `RequestError` STORE_UNAVAILABLE while there is no secret."""
        self._check()
        return make_token(self._secrets[0], TokenSubject(tenant, pool, num_choices), request_id)

    def read(self, token: str, request_id: str) -> TokenSubject | None:
        """Returns the subject of a token; None if the token is not this request's. Raises as `make`."""
        self._check()
        found = [read_token(secret, token, request_id) for secret in self._secrets]
        return next((subject for subject in found if subject is not None), None)

    def _check(self) -> None:
        if not self._secrets:
            text = "the secret of resume tokens is not known yet; the ledger keeps it"
            raise RequestError(Reason.STORE_UNAVAILABLE, text, retry_after_ms=RETRY_AFTER_MS)


def make_token(secret: bytes, subject: TokenSubject, request_id: str) -> str:
    choices = f"\0{subject.num_choices}" if subject.num_choices > 1 else ""
    named = f"{subject.tenant}\0{subject.pool}{choices}".encode()
    return base64.urlsafe_b64encode(_tag(secret, named, request_id) + named).decode().rstrip("=")


def read_token(secret: bytes, token: str, request_id: str) -> TokenSubject | None:
    """Returns the subject of a token; None if it is not the token of this request. Takes the same time for any wrong
    one."""
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        tenant, separator, rest = raw[TAG_BYTES:].decode().partition("\0")
    except (binascii.Error, UnicodeError, ValueError):
        return None
    if not separator or not hmac.compare_digest(_tag(secret, raw[TAG_BYTES:], request_id), raw[:TAG_BYTES]):
        return None
    pool, _, num_choices = rest.partition("\0")
    return TokenSubject(tenant, pool, int(num_choices or 1))


def _tag(secret: bytes, named: bytes, request_id: str) -> bytes:
    return hmac.digest(secret, _PURPOSE + named + b"\0" + request_id.encode(), "sha256")[:TAG_BYTES]
