"""A stream that the ledger takes back goes on, whatever order its old placement's ends come in."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.dispatch import dispatcher as dispatch
from inflight.router.ledger.types import Lost
from tests.integration.test_resuming import NUM_TOKENS, PROMPT, begun
from tests.support.stack.cluster import run_cluster


@pytest.mark.parametrize("fields", [{"idempotency_key": "k"}, {}])
async def test_stream_goes_on_whose_placement_ends_before_the_ledger_has_it_back(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(dispatch, "LEDGER_RETRY_S", 0.05)
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        client, call = await begun(cluster, 3, **fields)
        (one,) = cluster.routers[0].pools.by_name.values()
        (stream,) = one.dispatcher.streams
        link = one.dispatcher.link_of("executor-0")
        assert link is not None
        hand_back = one.dispatcher._ledger.hand_back

        async def hand_back_late(*args: Any, **how: Any) -> Any:
            if link._seated:
                raise RequestError(Reason.STORE_UNAVAILABLE, "Redis is away")
            return await hand_back(*args, **how)

        monkeypatch.setattr(one.dispatcher._ledger, "hand_back", hand_back_late)
        one.dispatcher._on_ledger_event(Lost(stream.request_id, stream.life.attempt, "executor-0", 1))
        cluster.executors[0].brake.release()
        await client.read_rest(call)
    client.check_whole(PROMPT, NUM_TOKENS)
