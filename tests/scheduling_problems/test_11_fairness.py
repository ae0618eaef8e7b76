"""Problem 11: the tenant that sends most is served most, and the others wait behind it."""

from __future__ import annotations

from dataclasses import replace

from inflight.router.ledger.types import TenantLimits
from tests.scheduling_problems.served_line import Asked, ServedLine, open_line
from tests.support.ledger.store_pool import StorePool
from tests.support.scheduler.scheduling import LIMITS, make_scheduler

TWO_SEATS = replace(LIMITS, num_standby_sequences=0, max_num_tokens=32)


async def flooded(pool: StorePool, num_requests: int = 60, output_tokens: int = 8) -> ServedLine:
    """Two seats, and a tenant with so many requests in line."""
    line = await open_line(pool, make_scheduler(TWO_SEATS))
    for i in range(num_requests):
        await line.submit(Asked(f"flood {i}", 8, output_tokens, output_tokens, tenant="flood"))
    return line


async def test_tenant_waits_for_seats_and_not_for_what_another_has_in_line(store_pool: StorePool) -> None:
    line = await flooded(store_pool)
    await line.run(10, max_turns=100)
    num_placed = len(line.boarded) + line.scheduler.num_waiting
    await line.submit(Asked("quiet", 8, 8, 8, tenant="quiet"))

    while "quiet" not in line.boarded:
        await line.turn()
    assert line.boarded.index("quiet") == num_placed


async def test_tenants_get_equal_shares_of_tokens_whatever_each_of_them_sends(store_pool: StorePool) -> None:
    """One sends long requests in numbers, the other short ones: what counts is tokens, not turns."""
    line = await flooded(store_pool, num_requests=40, output_tokens=24)
    for i in range(60):
        await line.submit(Asked(f"quiet {i}", 8, 4, 4, tenant="quiet"))
    for _ in range(160):
        await line.turn()

    served = {tenant: sum(_cost(line, name) for name in line.ended if name.startswith(tenant)) for tenant in _TENANTS}
    assert served["quiet"] > 400
    assert abs(served["quiet"] - served["flood"]) <= 4 * (8 + 2 * 24)


async def test_what_was_not_used_is_given_back(store_pool: StorePool) -> None:
    """Who asks for much more than it uses has the same share as who asks for what it uses."""
    line = await open_line(store_pool, make_scheduler(replace(TWO_SEATS, context_length=256), num_blocks=64))
    for i in range(30):
        await line.submit(Asked(f"flood {i}", 8, 8, 100, tenant="flood"))
        await line.submit(Asked(f"quiet {i}", 8, 8, 8, tenant="quiet"))
    for _ in range(120):
        await line.turn()

    counts = [sum(name.startswith(tenant) for name in line.ended) for tenant in _TENANTS]
    assert min(counts) > 8
    assert abs(counts[0] - counts[1]) <= 4


async def test_share_follows_the_weight(store_pool: StorePool) -> None:
    line = await flooded(store_pool, num_requests=60)
    for i in range(60):
        await line.submit(Asked(f"quiet {i}", 8, 8, 8, tenant="quiet", limits=TenantLimits(weight=3)))
    for _ in range(150):
        await line.turn()

    flood, quiet = (sum(name.startswith(tenant) for name in line.ended) for tenant in _TENANTS)
    assert 2.3 <= quiet / flood <= 3.3


_TENANTS = ("flood", "quiet")


def _cost(line: ServedLine, request_id: str) -> int:
    """Input counts once, output twice."""
    return line.asked[request_id].prompt_tokens + 2 * len(line.output[request_id])
