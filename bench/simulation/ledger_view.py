"""The ledger from outside: the real store, asked how the pool stands."""

from __future__ import annotations

import asyncio

from router.store.connection import connect
from router.store.settings import StoreSettings
from router.store.store import AdmissionStore
from router.store.types import Snapshot

OBSERVER_ID = "observer"


class LedgerView:
    """Looks and changes nothing. Has an event loop of its own, so it is for code that has none."""

    def __init__(self, url: str, pool: str) -> None:
        settings = StoreSettings(call_timeout_ms=60_000)
        self._runner = asyncio.Runner()
        self._redis = connect(url, settings)
        self._store = AdmissionStore(self._redis, pool, OBSERVER_ID, settings, lambda event: None)

    def snapshot(self) -> Snapshot:
        """The pool as it is now."""
        return self._runner.run(self._store.snapshot())

    def close(self) -> None:
        """Ends the connection."""
        self._runner.run(self._redis.aclose())
        self._runner.close()
