"""A router's connection to Redis, and what goes over it: the store of every pool, and the secret that routers share."""

from __future__ import annotations

from collections.abc import Callable

from router.store.connection import close, connect
from router.store.secret import learn_secret
from router.store.settings import StoreSettings
from router.store.store import AdmissionStore
from router.store.turns import Turns
from router.store.types import StoreCall, StoreEvent

OnEvent = Callable[[StoreEvent], None]
OnCall = Callable[[StoreCall], None]


class Ledgers:
    """Connects at the first call. `router_id` is new at every start of the router. `on_call` is told of every call of a
    script."""

    def __init__(self, url: str, router_id: str, settings: StoreSettings, on_call: OnCall = lambda call: None) -> None:
        self._redis = connect(url, settings)
        self._router_id = router_id
        self._settings = settings
        self._on_call = on_call
        self._turns = Turns(settings)

    def open(self, pool: str, on_event: OnEvent) -> AdmissionStore:
        """The store of a pool."""
        return AdmissionStore(
            self._redis, pool, self._router_id, self._settings, on_event, on_call=self._on_call, turns=self._turns
        )

    async def learn_secret(self, own: bytes | None) -> bytes:
        """See `router.store.secret`."""
        return await learn_secret(self._redis, self._settings, own)

    async def aclose(self) -> None:
        """Closes the connection; the stores can be used no more."""
        await close(self._redis)
