"""Measurements of one pool: fills it, then measures what each script costs Redis, the throughput and the latency."""

from __future__ import annotations

import asyncio
import gc
import heapq
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from inflight.bench.ledger.commands import Call, record_commands, take_snapshot
from inflight.bench.ledger.figures import (
    BATCHED,
    CANCEL,
    PLACED,
    QUEUED,
    REAP,
    REPORT,
    REPORTS,
    REPORTS_TOGETHER,
    SETTLED,
    UNFILLED,
    Latency,
    Point,
    Saturation,
    ScriptCost,
    batched,
    percentiles_ms,
    refilled,
)
from inflight.bench.ledger.loop import Loop
from inflight.bench.ledger.scale import PoolScale
from inflight.bench.ledger.server import NOTHING, SCRIPT, Server, Usage, difference
from inflight.bench.ledger.traffic import Traffic, TrafficError

NUM_CONNECTIONS = 32
ENDS_PER_FRAME, MAX_SETTLED = SETTLED[1], SETTLED[-1]
# Executors get no new work 2 s after their last report, and on a busy machine it takes long until all have reported.
REFRESH_S = 0.7
FILL_REFRESH_S = 1.2  # while all seats are taken a late report delays nothing
PROGRESS_S = 10.0
AUDIT_S = 1.05
MODERATE = 0.5
WARM_UP_S = 1.0
MAX_SEATED_AT_ONCE = 512
MAX_ENDED_AT_ONCE = 1024
NUM_REPORTS = 256
NUM_REAPS = 4  # of each router
MAX_TOP_UPS = 3
# The share of an empty pool's seats for which mixed traffic has blocks anyhow.
MIXED_SHARE = 0.6

# A client sends its next request within this time after an end, unless the queue would be shorter meanwhile by more
# than a share of its length.
MAX_NEXT_S = 0.02
MAX_MISSING = 0.01

Say = Callable[[str], None]


def next_s(rate_per_s: float, num_queued: int) -> float:
    """Returns how long after a step frame the requests come that follow its ends, evenly spread."""
    return max(ENDS_PER_FRAME / rate_per_s, min(MAX_NEXT_S, MAX_MISSING * num_queued / rate_per_s))


def measure(
    url: str, pool: str, scale: PoolScale, seconds: float, seed: int, say: Say, rate_per_s: float | None = None
) -> Point:
    """Measures a pool that does not exist yet and leaves it behind. Each part takes about `seconds`. Latency is of
    `rate_per_s`, or of half of what goes through."""
    server = Server(url)
    commands = asyncio.run(record_commands(url, pool, scale, seed))
    traffic = Traffic(scale, commands, seed)
    loop = Loop(url, commands.mailboxes, NUM_CONNECTIONS, traffic)
    gc.collect()
    gc.disable()  # nothing here makes cycles, and a collection would be taken for Redis' latency
    try:
        point = _Measurement(server, traffic, loop, scale, seconds, seed, say, rate_per_s).run()
    finally:
        gc.enable()
        loop.close()
        server.close()
    _check(asyncio.run(take_snapshot(url, pool)).num_waiting, scale)
    return point


def _check(num_waiting: tuple[int, ...], scale: PoolScale) -> None:
    """The line has kept its length: what the figures are of is what they say."""
    # In mixed traffic not every end places a request, and deadlines pass.
    allowed = max(16 * MAX_SETTLED, scale.queued // 10) if scale.is_mixed else max(2 * MAX_SETTLED, scale.queued // 100)
    if abs(sum(num_waiting) - scale.queued) > allowed:
        raise TrafficError(f"{sum(num_waiting)} requests wait at the end in place of {scale.queued}")


def _chunks(count: int, most: int) -> Iterator[int]:
    """Numbers of at most `most` that make `count` together."""
    return (min(most, count - done) for done in range(0, count, most))


@dataclass(slots=True)
class _Measurement:
    server: Server
    traffic: Traffic
    loop: Loop
    scale: PoolScale
    seconds: float
    seed: int
    say: Say
    rate_per_s: float | None
    refreshed_s: float = 0.0

    def run(self) -> Point:
        costs: dict[str, ScriptCost] = {}
        self._refresh()
        self._seat_and_end(costs)
        fill_s, memory_bytes, bytes_per_waiting = self._fill()
        self._steady(costs)
        self._report(costs)
        self.say("scripts measured; now as much as goes through, then a moderate rate")
        saturation = self._saturate()
        self._top_up()
        latency = self._pace(self.rate_per_s or MODERATE * saturation.admitted_per_wall_s)
        return Point(
            self.scale,
            self.server.version,
            fill_s,
            memory_bytes,
            bytes_per_waiting,
            costs,
            saturation,
            latency,
            self.server.allocator,
        )

    # Costs of scripts ------------------------------------------------------------------------------------------

    def _seat_and_end(self, costs: dict[str, ScriptCost]) -> None:
        """Requests that are placed at once, and ends for which no request waits."""
        until_s = time.perf_counter() + self.seconds
        num_placed = int(self.scale.num_seats * (MIXED_SHARE if self.scale.is_mixed else 1))
        count = max(1, num_placed // MAX_SETTLED) * MAX_SETTLED
        while True:
            for chunk in _chunks(count, MAX_SEATED_AT_ONCE):
                self._cost(costs, PLACED, self._submits(chunk))
            while self.traffic.can_settle(MAX_SETTLED):
                self._cost(costs, UNFILLED, self._settles(MAX_ENDED_AT_ONCE, MAX_SETTLED))
            self._end_rest()
            if time.perf_counter() > until_s:
                return

    def _end_rest(self) -> None:
        """Ends what is seated where an executor has fewer than a whole settle ends."""
        while self.traffic.can_settle(1):
            self.loop.pipeline(self._settles(MAX_ENDED_AT_ONCE, 1))
            self._refresh_if_due()

    def _fill(self) -> tuple[float, int, float]:
        """Takes all seats and fills the line. Its seconds, the memory in use and that of each waiting request."""
        self._chunked(self.scale.num_seats)
        self.loop.read_mail()
        before_bytes, began_s = self.server.memory_bytes(), time.perf_counter()
        self._chunked(self.scale.queued - self.traffic.num_waiting, FILL_REFRESH_S)
        fill_s, memory_bytes = time.perf_counter() - began_s, self.server.memory_bytes()
        self.say(f"filled in {fill_s:.1f} s")
        return fill_s, memory_bytes, (memory_bytes - before_bytes) / self.scale.queued

    def _chunked(self, count: int, refresh_s: float = REFRESH_S) -> None:
        told_s = time.perf_counter()
        for chunk in _chunks(count, MAX_SEATED_AT_ONCE):
            self.loop.pipeline(self._submits(chunk))
            self._refresh_if_due(refresh_s)
            if time.perf_counter() - told_s > PROGRESS_S:
                told_s = time.perf_counter()
                self.say(f"{self.traffic.num_waiting:,} of {self.scale.queued:,} wait")

    def _steady(self, costs: dict[str, ScriptCost]) -> None:
        """Calls of each kind in turn, by which the line gets its length back again and again."""
        count = min(4 * MAX_SETTLED, self.scale.num_seats, self.scale.queued) // MAX_SETTLED * MAX_SETTLED
        count = max(MAX_SETTLED, count)
        until_s = time.perf_counter() + 2 * self.seconds
        while True:
            for num_ends in SETTLED:
                self._cost(costs, QUEUED, self._submits(self._missing(count)))
                self._cost(costs, refilled(num_ends), self._settles(count, num_ends))
                self._read_news()
            for num_submits in BATCHED:
                batches = [self.traffic.submit_batch(num_submits) for _ in range(count // num_submits)]
                self._cost(costs, batched(num_submits), batches)
                self.loop.pipeline(self._settles(count, ENDS_PER_FRAME))
                self._read_news()
            self._come_and_go(costs)
            if time.perf_counter() > until_s:
                return

    def _missing(self, count: int) -> int:
        """How many requests give the line its length and `count` more; in mixed traffic an end need not place one."""
        missing = self.scale.queued + count - self.traffic.num_waiting
        return max(1, min(2 * count, missing)) if self.scale.is_mixed else count

    def _read_news(self) -> None:
        """Takes the news of placements: all, where it is known how many there are."""
        if self.scale.is_mixed:
            self.loop.read_mail()
        else:
            self.loop.read_mail_until(lambda: self.traffic.num_waiting <= self.scale.queued)

    def _come_and_go(self, costs: dict[str, ScriptCost]) -> None:
        calls = list(self._submits(MAX_SETTLED))
        self._cost(costs, QUEUED, calls)
        ids = [call.ids[0] for call in calls]
        self._cost(costs, CANCEL, (self.traffic.cancel(one) for one in ids))

    def _report(self, costs: dict[str, ScriptCost]) -> None:
        """Reports with the audit, which is due once a second, and right after that without; and reaps."""
        self._refresh()
        time.sleep(max(0.0, AUDIT_S - (time.perf_counter() - self.refreshed_s)))
        reports = list(self.traffic.all_reports())[:NUM_REPORTS]
        self._cost(costs, REPORT, reports, refresh=False)
        self._cost(costs, "report", list(self.traffic.all_reports())[:NUM_REPORTS], refresh=False)
        if self.scale.executors >= REPORTS_TOGETHER:
            together = list(self.traffic.all_reports(REPORTS_TOGETHER))[: self.scale.executors // REPORTS_TOGETHER]
            self._cost(costs, REPORTS, together[: NUM_REPORTS // REPORTS_TOGETHER], refresh=False)
        self._cost(costs, REAP, [call for _ in range(NUM_REAPS) for call in self.traffic.all_reaps()], refresh=False)
        self._refresh()

    def _cost(self, costs: dict[str, ScriptCost], name: str, calls: Iterable[Call], refresh: bool = True) -> None:
        calls = list(calls)
        before, cpu_s = self.server.usages(), self.server.cpu_s()
        self.loop.pipeline(calls)
        cpu_s = self.server.cpu_s() - cpu_s
        used = difference(self.server.usages(), before)
        # Repeated calls, and those that board what a call has left, are part of it.
        used[SCRIPT] = Usage(len(calls), used.get(SCRIPT, NOTHING).us)
        costs.setdefault(name, ScriptCost()).add(used, cpu_s)
        if refresh:
            self._refresh_if_due()

    def _submits(self, count: int) -> Iterator[Call]:
        return (self.traffic.submit() for _ in range(count))

    def _settles(self, count: int, num_ends: int) -> Iterator[Call]:
        for _ in range(count // num_ends):
            if not self.traffic.can_settle(num_ends):
                return
            yield self.traffic.settle(num_ends)

    def _refresh_if_due(self, refresh_s: float = REFRESH_S) -> None:
        if time.perf_counter() - self.refreshed_s > refresh_s:
            self._refresh()

    def _refresh(self) -> None:
        """What happens by itself otherwise: reports and renewals."""
        self.loop.read_mail()
        self.loop.pipeline([*self.traffic.all_reports(), *self.traffic.all_renewals()])
        self.refreshed_s = time.perf_counter()

    # The whole -------------------------------------------------------------------------------------------------

    def _saturate(self) -> Saturation:
        """Saturation: a new request for every placed one, and an end whenever the queue is long enough."""
        traffic = self.traffic
        traffic.start_upkeep(self.loop.now_s())

        def next_call(now_s: float) -> Call | None:
            missing = self.scale.queued - traffic.expected_waiting
            if missing > 0:
                return traffic.submit_together(missing, now_s)
            return traffic.settle(ENDS_PER_FRAME, now_s) if traffic.can_settle(ENDS_PER_FRAME) else None

        before, cpu_s, num_placed = self.server.usages(), self.server.cpu_s(), traffic.num_placed
        num_refused, num_dropped = traffic.num_refused, traffic.num_dropped
        load_cpu_s = time.process_time()
        began_s = self.loop.now_s()
        self.loop.run(next_call, began_s + self.seconds)
        wall_s, load_cpu_s = self.loop.now_s() - began_s, time.process_time() - load_cpu_s
        cpu_s = self.server.cpu_s() - cpu_s
        used = difference(self.server.usages(), before)
        self.loop.read_mail()
        script_us, mail_us = (used.get(name, NOTHING).us for name in (SCRIPT, "xread"))
        return Saturation(
            traffic.num_placed - num_placed,
            wall_s,
            cpu_s,
            script_us,
            mail_us,
            load_cpu_s,
            traffic.num_refused - num_refused,
            traffic.num_dropped - num_dropped,
        )

    def _top_up(self) -> None:
        """Gives the line its length back, which the end of a run may have found shorter."""
        for _ in range(MAX_TOP_UPS):  # of mixed traffic some are refused
            self.loop.pipeline(list(self._submits(self.scale.queued - self.traffic.expected_waiting)))
            self.loop.read_mail()
        if not self.scale.is_mixed:
            self.loop.read_mail_until(lambda: self.traffic.num_waiting >= self.scale.queued)

    def _pace(self, rate_per_s: float) -> Latency:
        """Measures latency at a moderate rate: frames with ends come at random, and each end is followed by
        a new request."""
        traffic = self.traffic
        traffic.start_upkeep(self.loop.now_s())
        frames = Frames(traffic, rate_per_s, self.scale.queued, self.loop.now_s(), self.seed, self.loop.counts_from_s)
        # Not counted: with many executors the first periodic calls take so long that frames are sent late.
        self._pace_for(WARM_UP_S, frames)
        traffic.forget_latencies()
        self.loop.late_s.clear()
        cpu_s, began_s = self.server.cpu_s(), self.loop.now_s()
        self._pace_for(2 * self.seconds, frames)
        busy = (self.server.cpu_s() - cpu_s) / (self.loop.now_s() - began_s)
        return Latency(
            rate_per_s,
            busy,
            percentiles_ms(traffic.submit_s),
            percentiles_ms(traffic.seat_s),
            percentiles_ms(self.loop.late_s),
        )

    def _pace_for(self, seconds: float, frames: Frames) -> None:
        self.loop.run(frames.next_call, self.loop.now_s() + seconds, frames.due_s)
        self.loop.read_mail()


class Frames:
    """Step frames as a Poisson process: each ends some requests, and as many new ones come soon after."""

    def __init__(
        self,
        traffic: Traffic,
        rate_per_s: float,
        num_queued: int,
        now_s: float,
        seed: int,
        counts_from_s: Callable[[float, float], float],
    ) -> None:
        self._traffic = traffic
        self._counts_from_s = counts_from_s
        self._random = random.Random(seed)
        self._mean_s = ENDS_PER_FRAME / rate_per_s
        self._next_s = next_s(rate_per_s, num_queued)
        self._due: list[tuple[float, bool]] = [(now_s, True)]

    def due_s(self) -> float:
        """When the next call is due."""
        return self._due[0][0]

    def next_call(self, now_s: float) -> Call | None:
        """Returns the next call if it is due."""
        while self._due[0][0] <= now_s:
            due_s, is_frame = heapq.heappop(self._due)
            if not is_frame:
                return self._traffic.submit(self._counts_from_s(due_s, now_s))
            heapq.heappush(self._due, (due_s + self._random.expovariate(1 / self._mean_s), True))
            if self._traffic.can_settle(ENDS_PER_FRAME):
                for _ in range(ENDS_PER_FRAME + self._traffic.num_short):
                    heapq.heappush(self._due, (due_s + self._random.uniform(0, self._next_s), False))
                return self._traffic.settle(ENDS_PER_FRAME, self._counts_from_s(due_s, now_s))
        return None
