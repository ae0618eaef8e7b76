"""Void placements: later events about them have no effect."""

from __future__ import annotations

from inflight.router.ledger.types import Lost, Placement
from tests.support.ledger.scripted_store import ScriptedRouter, accepts, new_stream, placement, settled, steps


async def test_token_and_loss_of_an_earlier_attempt_change_nothing() -> None:
    # Given a request with two tokens, which the ledger has placed on another executor
    router, stream = ScriptedRouter("m"), new_stream()
    store = router.stores["m"]
    first, second = router.link("e0", "m"), router.link("e1", "m")
    async with router.running():
        store.answers.append(placement())
        assert isinstance(await router.pools.find("m").dispatcher.submit(stream), Placement)
        first.receive(accepts(1))
        first.receive(steps(3, 4, cached=0))
        store.answers.append(placement(2, "e1"))
        store.tell(Lost("r", 1, "e0", 1))
        await settled()
        second.receive(accepts(2))
        # When the first executor goes on, and the loss is told once more
        first.receive(steps(0, offset=2))
        store.tell(Lost("r", 1, "e0", 1))
        await settled()
        second.receive(steps(1, offset=2, cached=0))
        # Then only what the second one says counts
        assert stream.output_ids == [3, 4, 1]
        assert len(store.hand_backs) == 1
        assert not second._outbox.cancels
