"""The latency that Redis' own work causes, computed from measured costs. Pure.

A load generator that shares the cores with Redis is late itself, and so are the replies that it gets. Here a call
waits only for the calls before it: one queue in order of arrival, step frames as a Poisson process, submits spread
evenly behind them, reports and reaps at the rates of the code. Each call takes the mean processor time of its kind,
scaled so that all of them together keep Redis as busy as it was measured to be. So packets and mailboxes are included,
and calls that take longer than the mean of their kind, by a pause of Lua's collector for example, are not.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from bench.ledger.figures import QUEUED, REPORT, SETTLED, Point, ScriptCost, percentiles_ms, refilled
from bench.ledger.upkeep import REAP_S
from router.dispatch.report_pacer import INTERVAL_S

ENDS_PER_FRAME = SETTLED[1]
SECONDS = 30.0
SUBMIT, SETTLE, UPKEEP = range(3)

Arrival = tuple[float, int, float]
"""When a call comes, of which kind it is, and for how many seconds it takes the core."""


def computed_ms(point: Point, seed: int = 1) -> tuple[tuple[float, float], tuple[float, float]]:
    """Median and 99th percentile in milliseconds of a submit, and of a settle, which tells of the seats that it fills,
    at the rate at which the point's latency was measured."""
    arrivals = _arrivals(point, random.Random(seed))
    total_s = sum(service_s for _, _, service_s in arrivals)
    waits = served_s(arrivals, point.latency.busy * SECONDS / total_s)
    return percentiles_ms(waits[SUBMIT]), percentiles_ms(waits[SETTLE])


def served_s(arrivals: Sequence[Arrival], factor: float = 1.0) -> Mapping[int, list[float]]:
    """Returns, by kind, how long each call takes from its arrival to its end, where one is served at a time in order of
    arrival and takes `factor` times its service."""
    found: dict[int, list[float]] = {kind: [] for kind in (SUBMIT, SETTLE, UPKEEP)}
    free_s = 0.0
    for came_s, kind, service_s in sorted(arrivals):
        free_s = max(free_s, came_s) + factor * service_s
        found[kind].append(free_s - came_s)
    return found


def _arrivals(point: Point, random_numbers: random.Random) -> list[Arrival]:
    costs, scale = point.costs, point.scale
    found: list[Arrival] = []
    mean_s, now_s = ENDS_PER_FRAME / point.latency.rate_per_s, 0.0
    while now_s < SECONDS:
        found.append((now_s, SETTLE, _seconds(costs, refilled(ENDS_PER_FRAME))))
        for _ in range(ENDS_PER_FRAME):
            found.append((now_s + random_numbers.uniform(0, mean_s), SUBMIT, _seconds(costs, QUEUED)))
        now_s += random_numbers.expovariate(1 / mean_s)
    for interval_s, number, name in (
        (INTERVAL_S, scale.executors, "report"),
        (REAP_S, scale.routers, REPORT),  # a reap was not measured; it costs about as much
    ):
        for _ in range(number):
            now_s = interval_s * random_numbers.random()
            while now_s < SECONDS:
                found.append((now_s, UPKEEP, _seconds(costs, name)))
                now_s += interval_s
    return found


def _seconds(costs: Mapping[str, ScriptCost], name: str) -> float:
    return costs[name].cpu_us / 1e6
