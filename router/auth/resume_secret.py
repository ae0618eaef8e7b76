"""Makes and reads this router's resume tokens, once it knows the secret that all routers share.

The secret is a setting, or else the ledger keeps it: whoever comes first makes one up. A Redis that has lost it gets it
back from the routers; where another router was faster, tokens are made with that one's from then on, and those that
are out stay good here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from common.errors import Reason, RequestError
from router.auth.resume_token import TokenSubject, make_token, read_token
from router.request.errors import RETRY_AFTER_MS

log = logging.getLogger(__name__)

Learn = Callable[[bytes | None], Awaitable[bytes]]

RETRY_S = 0.5
MAX_SECRETS = 4


class ResumeTokens:
    """The tokens of this router. `learn(own)` asks the ledger for the secret; `own` becomes it where there is none."""

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
        """The ledger may have lost the secret."""
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

    def make(self, tenant: str, pool: str, request_id: str) -> str:
        """The token of a request. Raises `RequestError` STORE_UNAVAILABLE while there is no secret."""
        self._check()
        return make_token(self._secrets[0], TokenSubject(tenant, pool), request_id)

    def read(self, token: str, request_id: str) -> TokenSubject | None:
        """Whose request it is; None where the token is not this request's. Raises as `make`."""
        self._check()
        found = [read_token(secret, token, request_id) for secret in self._secrets]
        return next((subject for subject in found if subject is not None), None)

    def _check(self) -> None:
        if not self._secrets:
            text = "the secret of resume tokens is not known yet; the ledger keeps it"
            raise RequestError(Reason.STORE_UNAVAILABLE, text, retry_after_ms=RETRY_AFTER_MS)
