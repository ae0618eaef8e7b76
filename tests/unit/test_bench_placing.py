"""The changes of the ledger that placement is compared with are in its source, and servers compile them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.scheduling.placing import in_turns, whatever_it_holds
from bench.simulation.world import World, WorldSettings
from bench.timeline.conversations import Conversations


@pytest.mark.parametrize("change", [None, in_turns, whatever_it_holds])
def test_every_way_of_placement_serves_chats(
    redis_admin_url: str, pool: str, change: Callable[[str], str] | None
) -> None:
    chats = Conversations(rate_per_s=2.0, num_turns=2, pause_s=1.0, num_systems=3, output_tokens=(2, 8))
    settings = WorldSettings(num_executors=3, duration_s=3.0, change_scripts=change)
    world = World(redis_admin_url, pool, settings, chats.requests(1, 3.0, names_prefixes=True))
    try:
        world.run()
    finally:
        world.close()
    assert world.checker.num_tokens > 0
