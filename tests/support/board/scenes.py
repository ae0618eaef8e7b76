"""Scenes for the live board: invented statistics as routers send them, the same in every run.

A `Scene` is a small model of executors under load: requests come by a fixed pattern, board, are read and answered, and
leave. `ScriptedStatistics` shows messages to watchers when a test says so.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from inflight.router.auth.caller import Caller
from inflight.router.dashboard.history import (
    EXECUTOR_FIELDS,
    MODEL_FIELDS,
    NUM_SAMPLES,
    SAMPLE_S,
    TENANT_FIELDS,
    History,
    ModelSample,
    row_of,
)
from inflight.router.dashboard.requests import RequestLog, Timeline
from inflight.router.dashboard.watching import Watching
from inflight.router.telemetry.event_log import EventLog
from inflight.router.telemetry.events import PlacedAt, RequestEnd, RequestFacts
from inflight.v1 import inference_pb2, stats_pb2, types_pb2

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
        """Sends it to all present and later watchers."""
        self._messages.append(message)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends every watch with an error."""
        self.error = error
        self._wake()

    async def watch(
        self, request: inference_pb2.GetStatsRequest, caller: Caller
    ) -> AsyncGenerator[inference_pb2.GetStatsResponse, None]:
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
        self.tenants = tenants
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
        size = sum(bus.num_seats for bus in self.buses) / 32
        wave = abs((self.now_ms // 1000) % 40 - 20) / 20
        message.latencies.add(
            model="smollm2-135m-instruct",
            num_ended=round(214 * size),
            num_refused=3,
            output_tokens_per_s=(900 + 240 * wave) * size,
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
            tenant = self._random.choice(self.tenants)
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
            device_ms=21.4 * weight,
            exposed_host_ms=0.6 * weight,
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


def full_fleet(num_executors: int, num_seats: int) -> Scene:
    """Many executors with nearly every seat taken, and a queue."""
    tenants = [f"tenant-{number}" for number in range(9)]
    scene = Scene(num_executors, num_seats, num_seats * 40, tenants=tenants, arrivals_per_step=float(num_seats))
    for at, bus in enumerate(scene.buses):
        bus.riders = [
            Rider(number, f"tenant-{number % 9}", types_pb2.PRIORITY_CLASS_STANDARD, 100, 400, START_MS, 130, 30, seat)
            for seat in range(num_seats - 3)
            for number in (10_000 + 1000 * at + seat,)
        ]
    scene.run(8)
    return scene


def scene_with_little_kv() -> Scene:
    """One executor with a large pool, a thousandth of which is in use."""
    scene = Scene(1, 16, 12_070, tenants=("acme", "globex"))
    scene.buses[0].riders = [
        Rider(number, tenant, types_pb2.PRIORITY_CLASS_STANDARD, 80, 60, START_MS, 90, 10, number)
        for number, tenant in enumerate(("acme", "globex"))
    ]
    return scene


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


def watching_of(scene: Scene, *, minutes: float = 15.0, is_busy: bool = True) -> Watching:
    """What a router that has run for so long has kept: history, events and requests, in the shape of the scene."""
    now_s = 10_000.0
    watching = Watching(
        History(), EventLog(lambda: now_s, lambda: scene.now_ms), RequestLog(lambda: now_s), lambda: now_s
    )
    number = min(NUM_SAMPLES, round(60 * minutes / SAMPLE_S))
    for at in range(number):
        model = _sample(scene, at, number) if is_busy else _idle_sample(scene)
        watching.history.add(now_s - SAMPLE_S * (number - 1 - at), SAMPLE_S, {scene.buses[0].model: model})
    _tell_events(scene, watching.events, is_busy=is_busy)
    if is_busy:
        _tell_requests(scene, watching)
    return watching


def _sample(scene: Scene, at: int, number: int) -> ModelSample:
    """Load that rises and falls, with a lost executor two thirds of the way."""
    share = 0.72 + 0.2 * math.sin(at / 9) + 0.06 * math.sin(at / 2.3)
    is_away = 0.62 < at / number < 0.68
    if is_away:
        share *= 1 - 0.9 / len(scene.buses)
    noise = random.Random(at)
    seats, blocks = sum(bus.num_seats for bus in scene.buses), sum(bus.num_blocks for bus in scene.buses)
    used = sum(_cache(bus).used_num_blocks for bus in scene.buses) or 0.4 * blocks
    reserved = sum(_cache(bus).reserved_num_blocks for bus in scene.buses) or 0.6 * blocks
    running, output = seats * share, 5 * seats * share * 38
    waiting = max(0.0, 40 * (share - 0.7)) * (1 + noise.random() / 4) * len(scene.buses) ** 0.5
    values = {
        "waiting": round(waiting), "running": round(running), "seats": seats, "kvUsed": used * share,
        "kvReserved": min(blocks, reserved * (share + 0.1)), "kvTotal": blocks,
        "promptTokens": output * (0.9 + noise.random() / 2), "cachedTokens": output * (0.35 + noise.random() / 5),
        "outputTokens": output, "ttftP50Ms": 140 + 300 * share * noise.uniform(0.8, 1.1),
        "ttftP99Ms": 420 + 1400 * share * noise.uniform(0.7, 1.3), "interTokenP50Ms": 21 + 6 * share,
        "interTokenP99Ms": 34 + 26 * share * noise.uniform(0.8, 1.4), "refused": int(waiting > 9), "moved": 0,
        "preemptions": 0, "steps": 190, "deviceMs": 19 + 5 * share, "hostMs": 0.35 + 0.3 * noise.random(),
    }  # fmt: skip
    ended = output / 110
    finished = {"stop_token": round(ended * 0.55), "length": round(ended * 0.4), "cancelled": int(noise.random() < 0.4)}
    weights = [1 / (rank + 1.5) for rank in range(len(scene.tenants))]
    tenants = {
        tenant: row_of(
            TENANT_FIELDS,
            {
                name: value * weight / sum(weights)
                for name, value in zip(TENANT_FIELDS, (waiting, running, output, output, ended), strict=True)
            },
        )
        for tenant, weight in zip(scene.tenants, weights, strict=True)
    }  # fmt: skip
    tenants = {name: array("f", [round(value) for value in row]) for name, row in tenants.items()}
    executors = {
        bus.name: row_of(EXECUTOR_FIELDS, {"running": round(bus.num_seats * min(1, share + 0.1 * noise.random()))})
        for bus in (scene.buses[:-1] if is_away else scene.buses)
    }
    return ModelSample(row_of(MODEL_FIELDS, values), finished, tenants, executors)


def _idle_sample(scene: Scene) -> ModelSample:
    seats, blocks = sum(bus.num_seats for bus in scene.buses), sum(bus.num_blocks for bus in scene.buses)
    nothing = dict.fromkeys(MODEL_FIELDS[:2] + MODEL_FIELDS[3:5] + MODEL_FIELDS[6:9] + MODEL_FIELDS[13:17], 0)
    return ModelSample(row_of(MODEL_FIELDS, {**nothing, "seats": seats, "kvTotal": blocks}))


def _tell_events(scene: Scene, events: EventLog, *, is_busy: bool) -> None:
    model, ended_ms = scene.buses[0].model, scene.now_ms

    def at(before_s: int, tell: Callable[[], None]) -> None:
        scene.now_ms = ended_ms - 1000 * before_s
        tell()

    for bus in scene.buses:
        at(870, lambda bus=bus: events.executor_linked(bus.name, model))  # type: ignore[misc]
    if is_busy:
        last = scene.buses[-1].name
        at(640, lambda: events.admission_file_read(None))
        at(338, lambda: events.executor_lost(last, model, 6))
        at(291, lambda: events.executor_linked(last, model))
        at(0, lambda: events.executor_reported(scene.buses[0].name, model, is_draining=False, num_preemptions=0))
        at(95, lambda: events.executor_reported(scene.buses[0].name, model, is_draining=False, num_preemptions=4))
    scene.now_ms = ended_ms


def _tell_requests(scene: Scene, watching: Watching) -> None:
    """The requests on seats and in the queue, and some that have ended, in a mixed order."""
    story = _Story(scene, watching.requests)
    told = [functools.partial(story.end, number) for number in range(40)]
    told += [functools.partial(story.run, bus, rider) for bus in scene.buses for rider in bus.riders]
    told += [functools.partial(story.wait, rider) for rider in scene.waiting[:20]]
    random.Random(5).shuffle(told)
    for tell in told:
        tell()


class _Story:
    """Tells a request log what became of a scene's requests, all of them up to the same moment."""

    def __init__(self, scene: Scene, log: RequestLog) -> None:
        self._scene = scene
        self._log = log
        self._now_s = log.now_s()
        self._random = random.Random(6)

    def end(self, number: int) -> None:
        """A request that has ended."""
        tenant = self._scene.tenants[number % len(self._scene.tenants)]
        prompt = self._random.randint(20, 400)
        rider = Rider(900 + number, tenant, types_pb2.PRIORITY_CLASS_STANDARD, prompt, 60, 0)
        rider.answered = self._random.randint(10, 180)
        age_s = self._random.uniform(2, 9)
        name = self._scene.buses[number % len(self._scene.buses)].name
        timeline = self._follow(rider, age_s)
        self._live(timeline, name, rider, age_s, is_moved=number % 13 == 5)
        outcome = self._random.choice(["stop_token", "length", "length", "stop_token", "cancelled"])
        timeline.ended(RequestEnd(outcome, False, age_s, rider.answered, age_s / 2))

    def run(self, bus: SceneBus, rider: Rider) -> None:
        """A request on a seat."""
        age_s = self._random.uniform(1, 6)
        self._live(self._follow(rider, age_s), bus.name, rider, age_s, is_moved=rider.number % 29 == 3)

    def wait(self, rider: Rider) -> None:
        """A request in the queue."""
        self._follow(rider, 0.001 * (self._scene.now_ms - rider.arrived_ms) + 0.05)

    def _follow(self, rider: Rider, age_s: float) -> Timeline:
        facts = RequestFacts(
            model=self._scene.buses[0].model,
            priority_class="batch" if rider.tenant == "initech" else "standard",
            arrived=self._now_s - age_s,
            prompt_tokens=rider.prompt,
            request_id=f"request-{rider.number}",
            tenant=rider.tenant,
        )
        timeline = self._log.follow(facts)
        timeline.admitted()
        return timeline

    def _live(self, timeline: Timeline, name: str, rider: Rider, age_s: float, *, is_moved: bool) -> None:
        at_s = self._now_s - age_s

        def step(share: float, tell: Callable[[], None]) -> None:
            nonlocal at_s
            at_s = min(at_s + share * age_s, self._now_s)
            self._log.now_s = lambda: at_s
            tell()

        step(0.04, lambda: timeline.placed(PlacedAt(name, 1, 0.1)))
        step(0.03, lambda: timeline.boarded(rider.prompt // 3))
        if rider.answered or is_moved:
            step(0.1, lambda: timeline.sent(1, None))
        if is_moved:
            step(0.2, lambda: timeline.moved("executor_lost"))
            step(0.1, lambda: timeline.placed(PlacedAt(self._scene.buses[0].name, 2, None)))
            step(0.05, timeline.boarded_again)
            step(0.08, lambda: timeline.sent(1, 1.0))
        timeline.output_tokens = rider.answered
        self._log.now_s = lambda: self._now_s
