"""The changes of the ledger that placement is compared with are in its source, and servers compile them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from inflight.bench.scheduling.exact_prefixes import by_what_is_told, tell_cached_tokens
from inflight.bench.scheduling.placing import in_turns, whatever_it_holds
from inflight.bench.simulation.sim_executor import ExecutorShape, SimExecutor
from inflight.bench.simulation.world import World, WorldSettings
from inflight.bench.timeline.conversations import Conversations
from inflight.bench.timeline.traffic import SimRequest


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


def test_what_is_told_of_caches_decides_and_is_what_executors_have(redis_admin_url: str, pool: str) -> None:
    """All are idle, so that without it the first executor would get every request."""

    def tell(request: SimRequest, executors: Sequence[SimExecutor]) -> SimRequest:
        return replace(request, prefix_hashes=("name", "@x0002:64", "@x0001:0", "@x0000:0"))

    prompts = [tuple(range(number, 65 + number)) for number in range(9)]
    requests = [SimRequest(number, f"r{number}", 500_000 * number, prompts[number], 2, 2) for number in range(9)]
    settings = WorldSettings(
        num_executors=3,
        duration_s=5.0,
        executor=ExecutorShape(has_prefix_cache=True),
        change_scripts=by_what_is_told,
        change_request=tell,
    )
    world = World(redis_admin_url, pool, settings, requests)
    try:
        world.run()
    finally:
        world.close()
    # The others get a few until the ledger knows their speed.
    computed = [one.scheduler.num_computed_tokens for one in world.executors]
    assert computed[2] > computed[0] + computed[1]
    assert tell_cached_tokens(requests[8], world.executors).prefix_hashes == ("@x0002:64", "@x0000:0", "@x0001:0")
