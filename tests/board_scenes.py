"""Scenes for the live board: statistics as routers tell them, made up, and the same at every run.

A `Scene` is a small model of executors under load: requests come by a fixed pattern, board, are read and answered, and
leave. `ScriptedStatistics` shows messages to watchers when a test says so.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from inflight.v1 import inference_pb2, stats_pb2, types_pb2

from router.callers import Caller

START_MS = 1_790_000_000_000
BLOCK_SIZE = 16
PREFILL_CHUNK = 64
PARTS = {"inbox": 0.2, "plan": 0.6, "launch": 1.1, "wait": 18.0, "retire": 0.9, "publish": 0.4}


class ScriptedStatistics:
    """A source of statistics that says what a test has it say: the newest message at once, and every one after it."""

    def __init__(self, *messages: inference_pb2.GetStatsResponse) -> None:
        self._messages = list(messages)
        self._changed = asyncio.Event()
        self.callers: list[Caller] = []
        self.requests: list[inference_pb2.GetStatsRequest] = []
        self.num_watching = 0
        self.error: Exception | None = None

    def show(self, message: inference_pb2.GetStatsResponse) -> None:
        """Tells it to everybody who watches, and to who comes later."""
        self._messages.append(message)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends every watch with an error."""
        self.error = error
        self._wake()

    async def watch(
        self, request: inference_pb2.GetStatsRequest, caller: Caller
    ) -> AsyncGenerator[inference_pb2.GetStatsResponse, None]:
        """See `Statistics`."""
        self.callers.append(caller)
        self.requests.append(request)
        self.num_watching += 1
        next_one = max(len(self._messages) - 1, 0)
        try:
            while True:
                while next_one >= len(self._messages) and self.error is None:
                    await self._changed.wait()
                if self.error is not None:
                    raise self.error
                message = inference_pb2.GetStatsResponse()
                message.CopyFrom(self._messages[next_one])
                next_one += 1
                yield message
        finally:
            self.num_watching -= 1

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(slots=True)
class Rider:
    """A request of a scene."""

    number: int
    tenant: str
    priority: types_pb2.PriorityClass
    prompt: int
    output: int
    arrived_ms: int
    computed: int = 0
    answered: int = 0
    seat: int | None = None

    @property
    def reserved_blocks(self) -> int:
        """Blocks for all that it may become."""
        return -(-(self.prompt + self.output) // BLOCK_SIZE)

    @property
    def blocks(self) -> int:
        """Blocks for what is computed."""
        return -(-(self.prompt + self.answered) // BLOCK_SIZE) if self.computed else 0


@dataclass(slots=True)
class SceneBus:
    """An executor of a scene."""

    name: str
    model: str
    num_seats: int
    num_blocks: int
    riders: list[Rider] = field(default_factory=list)
    num_steps: int = 0
    iterations: list[stats_pb2.IterationStats] = field(default_factory=list)

    def board(self, rider: Rider) -> bool:
        """Gives the rider the lowest free seat, where there are seat and blocks."""
        taken = {one.seat for one in self.riders}
        reserved = sum(one.reserved_blocks for one in self.riders)
        if len(taken) == self.num_seats or reserved + rider.reserved_blocks > self.num_blocks:
            return False
        rider.seat = next(seat for seat in range(self.num_seats) if seat not in taken)
        self.riders.append(rider)
        return True


class Scene:
    """A router with executors under load. The same seed gives the same scene."""

    def __init__(
        self,
        num_executors: int = 2,
        num_seats: int = 32,
        num_blocks: int = 600,
        *,
        tenants: Sequence[str] = ("acme", "globex", "initech", "data-science"),
        arrivals_per_step: float = 1.0,
        seed: int = 1,
    ) -> None:
        self.now_ms = START_MS
        self.buses = [
            SceneBus(f"executor-{n}", "smollm2-135m-instruct", num_seats, num_blocks) for n in range(num_executors)
        ]
        self.waiting: list[Rider] = []
        self._tenants = tenants
        self._arrivals_per_step = arrivals_per_step
        self._random = random.Random(seed)
        self._num_riders = 0
        self._owed = 0.0

    def run(self, num_steps: int) -> None:
        """Lets every executor take so many steps, 25 ms each."""
        for _ in range(num_steps):
            self.now_ms += 25
            self._arrive()
            for bus in self.buses:
                self._step(bus)

    def message(self) -> inference_pb2.GetStatsResponse:
        """How everything stands, and the steps since the message before."""
        message = inference_pb2.GetStatsResponse(router_id="router-1:50051:5f3c", timestamp_ms=self.now_ms)
        for bus in self.buses:
            message.executors.append(_executor_stats(bus))
            bus.iterations = []
        message.queues.extend(self._queues())
        wave = abs((self.now_ms // 1000) % 40 - 20) / 20
        message.latencies.add(
            model="smollm2-135m-instruct",
            num_ended=214,
            num_refused=3,
            output_tokens_per_s=900 + 240 * wave,
            ttft_p50_ms=180 + 60 * wave,
            ttft_p99_ms=620 + 340 * wave,
            inter_token_p50_ms=24 + 3 * wave,
            inter_token_p99_ms=41 + 16 * wave,
        )
        return message

    def _arrive(self) -> None:
        self._owed += self._arrivals_per_step
        while self._owed >= 1:
            self._owed -= 1
            self._num_riders += 1
            tenant = self._random.choice(self._tenants)
            priority = types_pb2.PRIORITY_CLASS_BATCH if tenant == "initech" else types_pb2.PRIORITY_CLASS_STANDARD
            prompt, output = self._random.randint(20, 300), self._random.randint(10, 180)
            self.waiting.append(Rider(self._num_riders, tenant, priority, prompt, output, self.now_ms))

    def _step(self, bus: SceneBus) -> None:
        ended = [rider for rider in bus.riders if rider.answered >= rider.output]
        bus.riders = [rider for rider in bus.riders if rider.answered < rider.output]
        boarded = 0
        while self.waiting and boarded < 4 and bus.board(self.waiting[0]):
            self.waiting.pop(0)
            boarded += 1
        read = answered = 0
        for rider in bus.riders:
            if rider.computed < rider.prompt:
                chunk = min(PREFILL_CHUNK, rider.prompt - rider.computed)
                rider.computed += chunk
                read += chunk
            else:
                rider.answered += 1
                rider.computed += 1
                answered += 1
        if bus.riders:
            bus.num_steps += 1
            bus.iterations.append(self._iteration(bus, boarded, len(ended), read, answered))

    def _iteration(self, bus: SceneBus, boarded: int, ended: int, read: int, answered: int) -> stats_pb2.IterationStats:
        full = len(bus.riders) == bus.num_seats
        bound = types_pb2.STEP_CONSTRAINT_SEATS if full else types_pb2.STEP_CONSTRAINT_BLOCKS
        weight = 1 + read / 600
        return stats_pb2.IterationStats(
            iter=bus.num_steps,
            timestamp_ms=self.now_ms,
            iter_latency_ms=22 * weight,
            parts=[stats_pb2.StepPart(name=name, ms=ms * weight) for name, ms in PARTS.items()],
            num_active_requests=len(bus.riders),
            max_num_active_requests=bus.num_seats,
            kv_cache_stats=_cache(bus),
            inflight_batching_stats=stats_pb2.InflightBatchingStats(
                num_scheduled_requests=len(bus.riders),
                num_boarded_requests=boarded,
                num_completed_requests=ended,
                num_ctx_tokens=read,
                num_gen_tokens=answered,
            ),
            constraint=bound if self.waiting else types_pb2.STEP_CONSTRAINT_NO_WORK,
        )

    def _queues(self) -> list[inference_pb2.TenantQueue]:
        queues: dict[tuple[int, str], inference_pb2.TenantQueue] = {}
        for rider in self.waiting:
            queue = queues.setdefault(
                (rider.priority, rider.tenant),
                inference_pb2.TenantQueue(
                    model="smollm2-135m-instruct", tenant=rider.tenant, priority=rider.priority, num_requests=0
                ),
            )
            queue.num_requests += 1
            queue.num_tokens += rider.prompt + rider.output
            queue.longest_wait_ms = max(queue.longest_wait_ms, self.now_ms - rider.arrived_ms)
        return [queues[key] for key in sorted(queues)]


def full_bus(num_seats: int) -> inference_pb2.GetStatsResponse:
    """One executor with every seat taken."""
    scene = Scene(1, num_seats, num_seats * 40, arrivals_per_step=float(num_seats))
    bus = scene.buses[0]
    scene.run(1)
    bus.riders.extend(
        Rider(10_000 + seat, f"tenant-{seat % 9}", types_pb2.PRIORITY_CLASS_STANDARD, 100, 90, START_MS, 130, 30, seat)
        for seat in range(len(bus.riders), num_seats)
    )
    scene.waiting = []
    return scene.message()


def _cache(bus: SceneBus) -> stats_pb2.KvCacheStats:
    used = sum(rider.blocks for rider in bus.riders)
    evictable = min((bus.num_blocks - used) // 2, bus.num_steps // 8)
    return stats_pb2.KvCacheStats(
        max_num_blocks=bus.num_blocks,
        used_num_blocks=used,
        evictable_num_blocks=evictable,
        free_num_blocks=bus.num_blocks - used - evictable,
        reserved_num_blocks=sum(rider.reserved_blocks for rider in bus.riders),
        tokens_per_block=BLOCK_SIZE,
    )


def _executor_stats(bus: SceneBus) -> inference_pb2.ExecutorStats:
    cache = _cache(bus)
    capacity = inference_pb2.ExecutorCapacity(
        executor_id=bus.name,
        model=bus.model,
        accepting=True,
        seats_total=bus.num_seats,
        seats_used=len(bus.riders),
        blocks_total=bus.num_blocks,
        blocks_used=cache.used_num_blocks,
        blocks_reserved=cache.reserved_num_blocks,
        blocks_cached=cache.evictable_num_blocks,
        block_size=BLOCK_SIZE,
        output_tokens_per_s=40.0 * len(bus.riders),
        step_ms=25,
        batching=types_pb2.BATCHING_MODE_INFLIGHT,
        num_steps=bus.num_steps,
    )
    riders = sorted(bus.riders, key=lambda rider: rider.seat or 0)
    return inference_pb2.ExecutorStats(
        capacity=capacity, iterations=bus.iterations, sequences=[_sequence_stats(rider) for rider in riders]
    )


def _sequence_stats(rider: Rider) -> stats_pb2.SequenceStats:
    reading = rider.computed < rider.prompt
    return stats_pb2.SequenceStats(
        request_id=f"request-{rider.number}",
        tenant=rider.tenant,
        phase=stats_pb2.SEQUENCE_PHASE_PREFILL if reading else stats_pb2.SEQUENCE_PHASE_DECODE,
        seat=rider.seat,
        prompt_tokens=rider.prompt,
        computed_tokens=rider.computed,
        output_tokens=rider.answered,
        num_blocks=rider.blocks,
        reserved_blocks=rider.reserved_blocks,
    )
