"""The latency that Redis' own work causes, computed from measured costs. Pure.

A load generator that shares the cores with Redis is late itself, and so are the replies that it gets. Here a call
waits only for the calls before it: one queue in order of arrival, step frames as a Poisson process, submits spread
evenly behind them, reports and reaps at the rates of the code. Redis runs all calls that it finds, and then sends all
their replies. Each call takes the mean processor time of its kind, scaled so that all of them together keep Redis as
busy as it was measured to be. So packets and mailboxes are included. Calls that take longer than the mean of their kind
are not; and calls in a burst, which wake Redis only once, are counted as too expensive.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence

from inflight.bench.ledger.figures import QUEUED, REAP, SETTLED, Point, percentiles_ms, refilled, reports_us
from inflight.bench.ledger.upkeep import REAP_S
from inflight.router.dispatch.report_pacer import INTERVAL_S

ENDS_PER_FRAME = SETTLED[1]
SECONDS = 30.0
# A client sends its next request within this time after an end, unless the queue would be shorter meanwhile by more
# than a share of its length.
MAX_NEXT_S = 0.02
MAX_MISSING = 0.01
SUBMIT, SETTLE, UPKEEP = range(3)

Arrival = tuple[float, int, float]
"""When a call comes, of which kind it is, and for how many seconds it takes the core."""


def next_s(rate_per_s: float, num_queued: int) -> float:
    """Returns how long after a step frame the requests come that follow its ends, evenly spread."""
    return max(ENDS_PER_FRAME / rate_per_s, min(MAX_NEXT_S, MAX_MISSING * num_queued / rate_per_s))


def computed_ms(point: Point, seed: int = 1) -> tuple[tuple[float, float], tuple[float, float]]:
    """Median and 99th percentile in milliseconds of a submit, and of a settle, which tells of the seats that it fills,
    at the rate at which the point's latency was measured."""
    arrivals = _arrivals(point, random.Random(seed))
    total_s = sum(service_s for _, _, service_s in arrivals)
    waits = served_s(arrivals, point.latency.busy * SECONDS / total_s)
    return percentiles_ms(waits[SUBMIT]), percentiles_ms(waits[SETTLE])


def served_s(arrivals: Sequence[Arrival], factor: float = 1.0) -> Mapping[int, list[float]]:
    """Returns, by kind, how long each call takes from its arrival to its reply. One is served at a time in order of
    arrival and takes `factor` times its service. Calls that are there at the end of a round are the next round; their
    replies come at its end."""
    found: dict[int, list[float]] = {kind: [] for kind in (SUBMIT, SETTLE, UPKEEP)}
    waiting = deque(sorted(arrivals))
    free_s = 0.0
    while waiting:
        began_s, served = max(free_s, waiting[0][0]), []
        while waiting and waiting[0][0] <= began_s:
            served.append(waiting.popleft())
        free_s = began_s + factor * sum(service_s for _, _, service_s in served)
        for came_s, kind, _ in served:
            found[kind].append(free_s - came_s)
    return found


def _arrivals(point: Point, random_numbers: random.Random) -> list[Arrival]:
    costs_us, scale = {name: cost.cpu_us for name, cost in point.costs.items()}, point.scale
    found: list[Arrival] = []
    mean_s, now_s = ENDS_PER_FRAME / point.latency.rate_per_s, 0.0
    within_s = next_s(point.latency.rate_per_s, scale.queued)
    while now_s < SECONDS:
        found.append((now_s, SETTLE, costs_us[refilled(ENDS_PER_FRAME)] / 1e6))
        for _ in range(ENDS_PER_FRAME):
            found.append((now_s + random_numbers.uniform(0, within_s), SUBMIT, costs_us[QUEUED] / 1e6))
        now_s += random_numbers.expovariate(1 / mean_s)
    reports = point.latency.reports_per_call  # of which half are audited
    for interval_s, number, service_us in (
        (INTERVAL_S, round(scale.executors / reports), reports_us(costs_us, 1, reports, reports / 2)),
        (REAP_S, scale.routers, costs_us[REAP]),
    ):
        for _ in range(number):
            now_s = interval_s * random_numbers.random()
            while now_s < SECONDS:
                found.append((now_s, UPKEEP, service_us / 1e6))
                now_s += interval_s
    return found
