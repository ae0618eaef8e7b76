"""Claims: which sub-pool has a request that a client can name, and which router submitted it there last.

Two routers may get the same request, because a client repeats it. They must choose the same sub-pool, or it would run
twice. So the first one claims the id for its choice before it submits the request, and the other one finds the claim. A
claim is a key of its own beside the ledger of the sub-pool that follows from the id:

    inflight:<FORMAT>:{model#home}:claim:<ledger id>  →  "<sub-pool> <router>"

A router moves a waiting request to another sub-pool only while the claim names this router. Another router that repeats
the request writes its own name into the claim before it submits: so one of the two fails, and neither submits the
request where the other has taken it from. A claim outlives the ledger's memory of the request's end.

Claims of one sub-pool that wait while calls are under way go out together (`inflight.router.store.batches`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from inflight.router.store.batches import Batches
from inflight.router.store.keys import PoolKeys
from inflight.router.store.ledgers import Ledgers
from inflight.router.store.settings import StoreSettings
from inflight.router.subpools.assignment import home_of

# KEYS the claims  ARGV [1] router  [2] milliseconds to keep them, then for each: the sub-pool that the router chose, 1
# to write the router's name into an earlier claim, too. Returns of each the sub-pool of an earlier claim, or the chosen
# one.
CLAIM = """
local found = {}
for i, key in ipairs(KEYS) do
  local earlier = redis.call('GET', key)
  local at = earlier and earlier:match('^%d+') or ARGV[2 * i + 1]
  local claim = earlier and ARGV[2 * i + 2] == '0' and earlier or at .. ' ' .. ARGV[1]
  redis.call('SET', key, claim, 'PX', ARGV[2])
  found[i] = tonumber(at)
end
return found
"""
# KEYS [1] the claim  ARGV [1] router  [2] milliseconds to keep it  [3] from  [4] to which sub-pool. Returns 1 if the
# claim was the router's, in the first sub-pool.
MOVE = """
if redis.call('GET', KEYS[1]) ~= ARGV[3] .. ' ' .. ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[4] .. ' ' .. ARGV[1], 'PX', ARGV[2])
return 1
"""
# KEYS [1] the claim. Returns its sub-pool, or nothing.
FIND = "local found = redis.call('GET', KEYS[1]) return found and tonumber(found:match('^%d+'))"
# A claim is written again while its request is served, and then outlives the memory of its end.
KEPT_TIMES = 3


@dataclass(frozen=True, slots=True)
class _Claim:
    request_id: str
    subpool: int
    takes_over: bool


class Claims:
    """The claims of one model by one router. `homes` are the servers and keys of the sub-pools."""

    def __init__(self, homes: Sequence[tuple[Ledgers, PoolKeys]], router_id: str, settings: StoreSettings) -> None:
        self._homes = homes
        self._router_id = router_id
        self._remember_ms = settings.remember_ended_ms
        self._kept_ms = KEPT_TIMES * self._remember_ms
        self._calls: set[asyncio.Task[None]] = set()
        self._batches: list[Batches[_Claim, int]] = [
            Batches(partial(self._claim_all, number), partial(ledgers.turn, "claim"), self._start)
            for number, (ledgers, _) in enumerate(homes)
        ]

    @property
    def renew_after_s(self) -> float:
        """Seconds after which the claim of a request that is still served is written again."""
        return self._remember_ms / 1000

    async def claim(self, request_id: str, subpool: int, *, takes_over: bool) -> int:
        """Returns the sub-pool of an earlier claim; else claims the id for this one and returns it. `takes_over`: an
        earlier claim of another router becomes this router's, which submits the request for a client now. Raises
        `RequestError` if Redis does not answer."""
        home = home_of(request_id, len(self._homes))
        return await self._batches[home].ask(_Claim(request_id, subpool, takes_over))

    async def move(self, request_id: str, source: int, target: int) -> bool:
        """Moves a claim of this router. Returns False if it is another router's by now, or elsewhere. Raises
        `RequestError`."""
        return bool(await self._call(request_id, MOVE, self._router_id, self._kept_ms, source, target))

    async def find(self, request_id: str) -> int | None:
        """Returns the sub-pool of a claim. Raises `RequestError`."""
        found = await self._call(request_id, FIND)
        return None if found is None else int(found)

    async def _claim_all(self, home: int, claims: Sequence[_Claim]) -> list[int]:
        ledgers, keys = self._homes[home]
        names = [keys.key(f"claim:{one.request_id}") for one in claims]
        args = (arg for one in claims for arg in (one.subpool, int(one.takes_over)))
        found = await ledgers.run_source(CLAIM, names, self._router_id, self._kept_ms, *args)
        return [int(subpool) for subpool in found]

    async def _call(self, request_id: str, script: str, *args: str | int) -> Any:
        ledgers, keys = self._homes[home_of(request_id, len(self._homes))]
        async with ledgers.turn("claim"):
            return await ledgers.run_source(script, [keys.key(f"claim:{request_id}")], *args)

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
