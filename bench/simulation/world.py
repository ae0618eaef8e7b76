"""A whole deployment in virtual time: routers, executors, their links, clients, and their faults.

The scripts run on a real Redis; routers and schedulers are the real ones; the rest is modelled. Everything follows from
the seed: the same settings give the same run, step by step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from inflight.bench.redis.wire import WireError
from inflight.bench.simulation.bounds import Bounds
from inflight.bench.simulation.invariants import InvariantChecker
from inflight.bench.simulation.session import Session
from inflight.bench.simulation.sim_executor import ExecutorShape, SimExecutor
from inflight.bench.simulation.sim_router import RouterShape, SimRouter
from inflight.bench.simulation.store_link import StoreLink
from inflight.bench.timeline.faults import NO_FAULTS, Fault, FaultKind, FaultRates, SpacedFaults
from inflight.bench.timeline.timeline import US_PER_MS, US_PER_S, Timeline
from inflight.bench.timeline.traffic import SimRequest
from inflight.router.lifecycle.lifecycle import IllegalTransition
from inflight.router.request.executor_context import FrameError

START_US = 1_000 * US_PER_S
NOTICED_US = 1_000
MAX_RECONNECT_US = US_PER_S
# Executors report and routers know each other before the first request comes.
WARM_UP_US = 2 * US_PER_S
# After the last end: until the longest fault is over, every lease has lapsed and reports have been audited.
QUIET_US = 30 * US_PER_S
# Two leases, until the ledger is whole again after Redis lost it.
REBUILD_US = 10 * US_PER_S
# Of a router's event loop, about.
CALLBACKS_PER_OPERATION = 8
# Redis' clock is set back by so many times a fault's duration: from 0.3 s to an hour.
CLOCK_STEP_FACTOR = 300


class SimulationFailed(AssertionError):
    """A run that broke an invariant: what, and how to see it again."""


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """The deployment. `look_s`: how often the whole is checked; `drain_s`: how long the last requests get;
    `has_room`: the load is so low that an interrupted stream always finds a free seat, so the time until its next token
    is checked, too."""

    seed: int = 0
    num_routers: int = 2
    num_executors: int = 2
    executor: ExecutorShape = field(default_factory=ExecutorShape)
    router: RouterShape = field(default_factory=RouterShape)
    faults: FaultRates | SpacedFaults = NO_FAULTS
    duration_s: float = 60.0
    drain_s: float = 300.0
    look_s: float = 1.0
    has_room: bool = False


def _first_of(error: Exception) -> Exception:
    """Returns the first error of a group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class World:
    """One run. `requests` come by arrival, counted from 0 at the end of the warm-up."""

    def __init__(self, url: str, pool: str, settings: WorldSettings, requests: Iterable[SimRequest]) -> None:
        self.settings = settings
        self.timeline = Timeline()
        self.timeline.now_us = START_US
        self.checker = InvariantChecker()
        self.link = StoreLink(url, pool, self.timeline, settings.seed)
        self.executors: list[SimExecutor] = []
        self.routers: list[SimRouter] = []
        self.num_faults: Counter[FaultKind] = Counter()
        self._random = random.Random(f"{settings.seed}/world")
        self._requests: Iterator[SimRequest] = iter(requests)
        self.begin_us = START_US + WARM_UP_US
        self._num_starts = 0
        self._emptied_us: int | None = None
        self.bounds = Bounds(self.timeline, settings.executor, settings.has_room)

    def close(self) -> None:
        """Ends what still runs and removes the pool from Redis."""
        for router in self._living_routers():
            router.close()
        self.link.close()

    def run(self, on_progress: Callable[[float], None] = lambda simulated_s: None) -> None:
        """Everything, from the first start to the last end. Raises `SimulationFailed`."""
        try:
            self._run(on_progress)
        except (AssertionError, WireError, IllegalTransition, FrameError, ExceptionGroup) as error:
            at_s = (self.timeline.now_us - self.begin_us) / US_PER_S
            where = f"seed {self.settings.seed}, step {self.timeline.num_steps}, {at_s:.6f} s"
            raise SimulationFailed(f"{where}: {_first_of(error)}") from error

    def _run(self, on_progress: Callable[[float], None]) -> None:
        look_us = round(self.settings.look_s * US_PER_S)
        self.run_window(on_progress)
        self._drain(self.timeline.now_us + round(self.settings.drain_s * US_PER_S), look_us)
        self.check_end()

    def run_window(self, on_progress: Callable[[float], None] = lambda simulated_s: None) -> None:
        """The time in which requests arrive, and not what is left of them then."""
        settings = self.settings
        random.seed(f"{settings.seed}/routers")  # routers draw their pauses from the random numbers of the process
        self.executors = [self._start_executor(index) for index in range(settings.num_executors)]
        self.routers = [self._start_router(index) for index in range(settings.num_routers)]
        end_us = self.begin_us + round(settings.duration_s * US_PER_S)
        for fault in settings.faults.schedule(settings.seed, end_us - self.begin_us):
            self.timeline.at(self.begin_us + fault.at_us, self._break, fault)
            if fault.kind is FaultKind.STORE_STALE:
                remembered_us = max(START_US, self.begin_us + fault.at_us - fault.duration_us)
                self.timeline.at(remembered_us, self.link.remember, fault.place)
        self._next_arrival()
        look_us = round(settings.look_s * US_PER_S)
        while self.timeline.now_us < end_us:
            self.timeline.run_until(min(end_us, self.timeline.now_us + look_us))
            self.look()
            on_progress((self.timeline.now_us - self.begin_us) / US_PER_S)

    def look(self) -> None:
        """Checks the state of the whole system."""
        # Standby follows the ends, so that an executor may have promised more than it would now.
        most_sequences = self.settings.executor.num_seats + self.settings.executor.num_standby
        is_rebuilding = self._emptied_us is not None and self.timeline.now_us < self._emptied_us + REBUILD_US
        self.checker.look(self.link.snapshot(), most_sequences, is_rebuilding=is_rebuilding)
        self.checker.all_accounted_for(self._open_ids())
        self.checker.within(self._running())
        self.bounds.look(self.link, self._living_routers(), self.executors, self.checker.records)

    def check_end(self) -> None:
        """Checks that nothing is left of anything."""
        self.look()
        self.checker.nothing_left(self.link.snapshot())
        if self._emptied_us is None:
            self.checker.rates_kept()
        for executor in self._living_executors():
            self.checker.require(executor.scheduler.is_idle, f"{executor.executor_id} is not idle")
            executor.scheduler.check_when_idle()
            used = executor.scheduler.pool.num_used
            self.checker.require(used == 0, f"{executor.executor_id} holds {used} blocks for no request")

    def _drain(self, until_us: int, look_us: int) -> None:
        """Until everything has ended, and then as long as reports and leases need to say so."""
        quiet_us = 0
        while self.timeline.now_us < until_us and quiet_us < QUIET_US:
            self.timeline.run_until(self.timeline.now_us + min(look_us, US_PER_S))
            quiet_us = 0 if self._open_ids() else quiet_us + min(look_us, US_PER_S)

    # What is there.

    def _living_executors(self) -> list[SimExecutor]:
        return [executor for executor in self.executors if executor.process.is_alive]

    def _living_routers(self) -> list[SimRouter]:
        return [router for router in self.routers if router.process.is_alive]

    def _open_ids(self) -> Counter[str]:
        return Counter(
            request_id
            for router in self._living_routers()
            for request_id, stream in router.streams.items()
            if not stream.has_ended
        )

    def _running(self) -> dict[str, list[SimRequest]]:
        """By tenant, what runs on executors under its current attempt."""
        streams = {router: router.streams for router in self._living_routers()}
        running: dict[str, list[SimRequest]] = {}
        for executor in self._living_executors():
            for sequence, session in executor.session_of.items():
                if executor.process.is_hung or not session.is_open:
                    continue
                stream = streams[session.router].get(sequence.request_id)
                if stream is not None and stream.is_current(sequence.attempt) and not stream.has_ended:
                    running.setdefault(stream.request.tenant, []).append(stream.request)
        return running

    # Starts.

    def _start_executor(self, index: int) -> SimExecutor:
        self._num_starts += 1
        generation = self.timeline.now_us // US_PER_MS + self._num_starts
        settings = self.settings
        executor = SimExecutor(
            f"x{index:04}", generation, settings.executor, self.timeline, self.checker, settings.seed
        )
        self.bounds.changed(executor=executor)
        executor.start()
        for router in self._living_routers():
            self.timeline.after(self._random.randrange(MAX_RECONNECT_US), self._join, router, executor)
        return executor

    def _start_router(self, index: int) -> SimRouter:
        self._num_starts += 1
        router_id = f"r{index:02}.{self._num_starts}"
        router = SimRouter(router_id, self.settings.router, self.link, self.timeline, self.checker)
        router.start()
        self.bounds.changed(router=router)
        for executor in self._living_executors():
            self.timeline.after(self._random.randrange(MAX_RECONNECT_US), self._join, router, executor)
        return router

    def _join(self, router: SimRouter, executor: SimExecutor) -> None:
        """A stream begins when the executor answers, and then the router may use it."""
        if router.process.is_alive:
            executor.process.run(self._joined, router, executor)

    def _joined(self, router: SimRouter, executor: SimExecutor) -> None:
        if not router.process.is_alive:
            return
        self.bounds.changed(router=router, executor=executor)
        session = Session(router, executor, self.timeline)
        executor.join(session)
        router.process.run(router.on_linked, session)

    def _next_arrival(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self.timeline.at(self.begin_us + request.arrival_us, self._arrive, request)

    def _arrive(self, request: SimRequest) -> None:
        self._next_arrival()
        living = self._living_routers()
        if living:  # a client that finds no router was never there
            router = self._random.choice(living)
            router.process.run(router.arrive, request)

    # Faults.

    def _break(self, fault: Fault) -> None:
        self.num_faults[fault.kind] += 1
        router = self.routers[fault.place % len(self.routers)]
        executor = self.executors[fault.place % len(self.executors)]
        self.bounds.broken(fault, router, executor)
        match fault.kind:
            case FaultKind.ROUTER_CRASH:
                self._kill_router(router, fault.duration_us)
            case FaultKind.ROUTER_DOOM:
                num_callbacks = CALLBACKS_PER_OPERATION * fault.num_operations
                router.process.doom(num_callbacks, lambda: self._kill_router(router, fault.duration_us))
            case FaultKind.ROUTER_HANG:
                router.process.hang(fault.duration_us)
            case FaultKind.EXECUTOR_CRASH:
                self._kill_executor(executor, fault.duration_us)
            case FaultKind.EXECUTOR_DOOM:
                executor.process.doom(fault.num_operations, lambda: self._kill_executor(executor, fault.duration_us))
            case FaultKind.EXECUTOR_HANG:
                executor.process.hang(fault.duration_us)
            case FaultKind.LINK_BREAK:
                self._break_link(executor, fault.place)
            case FaultKind.STORE_EMPTY:
                self._emptied_us = self.timeline.now_us
                self.link.empty()
            case FaultKind.STORE_STALE:
                self._emptied_us = self.timeline.now_us
                self.link.roll_back(fault.place)
            case FaultKind.STORE_AWAY:
                self.link.go_away(fault.duration_us)
            case FaultKind.STORE_CLOCK_BACK:
                self.link.set_clock_back(fault.duration_us * CLOCK_STEP_FACTOR // US_PER_MS)

    def _kill_router(self, router: SimRouter, duration_us: int) -> None:
        if not router.process.is_alive:
            return
        self.bounds.changed(router=router)
        router.die()
        for executor in self._living_executors():
            for session in executor.sessions:
                if session.router is router:
                    session.is_open = False
                    self.timeline.after(NOTICED_US, executor.process.run, executor.leave, session)
        self.timeline.after(duration_us, self._restart_router, self.routers.index(router))

    def _restart_router(self, index: int) -> None:
        self.routers[index] = self._start_router(index)

    def _kill_executor(self, executor: SimExecutor, duration_us: int) -> None:
        if not executor.process.is_alive:
            return
        self.bounds.lost(executor)
        executor.process.kill()
        for session in executor.sessions:
            session.is_open = False
            self._unlink(session)
        self.timeline.after(duration_us, self._restart_executor, self.executors.index(executor))

    def _restart_executor(self, index: int) -> None:
        self.executors[index] = self._start_executor(index)

    def _break_link(self, executor: SimExecutor, place: int) -> None:
        """One stream breaks, and both sides are well: they notice and begin another."""
        open_sessions = [session for session in executor.sessions if session.is_open]
        if not executor.process.is_alive or not open_sessions:
            return
        session = open_sessions[place % len(open_sessions)]
        self.bounds.lost(executor, session.router)
        session.is_open = False
        self._unlink(session)
        self.timeline.after(NOTICED_US, executor.process.run, executor.leave, session)
        router = next(router for router in self.routers if router is session.router)
        self.timeline.after(self._random.randrange(NOTICED_US, MAX_RECONNECT_US), self._join, router, executor)

    def _unlink(self, session: Session) -> None:
        self.timeline.after(NOTICED_US, session.router.process.run, session.router.on_unlinked, session)
