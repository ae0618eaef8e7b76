"""A router's connections to the Redis servers of its sub-pools, and the store of each model over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from inflight.router.store.keys import PoolKeys
from inflight.router.store.ledgers import Ledgers, OnCall, OnEvent
from inflight.router.store.settings import StoreSettings
from inflight.router.store.store import AdmissionStore
from inflight.router.store.types import StoreEvent
from inflight.router.subpools.assignment import share_of_settings
from inflight.router.subpools.claims import Claims
from inflight.router.subpools.store import SubPoolStore

# Loads come with renewals; a choice is only as good as these.
RENEW_INTERVAL_MS = 500


class SubPoolLedgers:
    """The sub-pools of every model. Sub-pool `k` is on server `k` modulo their number. Arguments as of `Ledgers`."""

    def __init__(
        self, urls: Sequence[str], num_subpools: int, router_id: str, settings: StoreSettings, on_call: OnCall
    ) -> None:
        self._num_subpools = num_subpools
        self._router_id = router_id
        share = share_of_settings(settings, num_subpools)
        self._settings = replace(share, renew_interval_ms=min(RENEW_INTERVAL_MS, settings.renew_interval_ms))
        self._servers = [Ledgers(url, router_id, self._settings, on_call) for url in urls]

    def open(self, model: str, on_event: OnEvent) -> SubPoolStore:
        """Returns the store of a model."""

        def open_store(number: int, on_event: Callable[[StoreEvent], None]) -> AdmissionStore:
            return self._server_of(number).open(subpool_name(model, number), on_event)

        homes = [
            (self._server_of(number), PoolKeys(subpool_name(model, number))) for number in range(self._num_subpools)
        ]
        claims = Claims(homes, self._router_id, self._settings)
        return SubPoolStore(self._num_subpools, open_store, claims, on_event)

    def _server_of(self, number: int) -> Ledgers:
        return self._servers[number % len(self._servers)]

    async def learn_secret(self, own: bytes | None) -> bytes:
        """Returns the secret that routers share, which is on the first server."""
        return await self._servers[0].learn_secret(own)

    async def missing_commands(self) -> list[str]:
        """Returns the commands that the user may not call on some server."""
        return sorted({name for server in self._servers for name in await server.missing_commands()})

    async def aclose(self) -> None:
        """Closes the connections. The stores cannot be used afterwards."""
        for server in self._servers:
            await server.aclose()


def subpool_name(model: str, number: int) -> str:
    """Returns the name of a sub-pool, which is the hash tag of its keys."""
    return f"{model}#{number}"
