"""The load generator: sends a workload to a router and notes arrival times. Figures are computed later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

from inflight import AsyncClient
from inflight.bench.measures.processes import CoreMeter
from inflight.bench.measures.run import (
    NO_SLO,
    DeviceTimes,
    Outcome,
    Run,
    SeatSample,
    Slo,
    TokenTimes,
    added_up,
    device_figures,
    measure,
)
from inflight.bench.targets.target import OnTokens
from inflight.bench.workloads.plan import GATE_TOKENS, PlannedRequest, Workload
from inflight.errors import InflightError
from inflight.events import Delta, Event, Started

# A sample is a call to the router, which takes processor time from what is measured.
SAMPLE_INTERVAL_S = 0.5
# An executor reports at least once a second: by then its last step is counted.
SETTLE_TIMEOUT_S = 3.0

GATE_PROMPT_IDS = (0,)
GATE_TIMEOUT_S = 2.0
GATE_INTERVAL_S = 0.02

NO_SESSIONS: Mapping[str, int] = {}

Clock = Callable[[], float]


async def run_workload(
    client: AsyncClient,
    workload: Workload,
    *,
    mode: str,
    round_number: int,
    slo: Slo = NO_SLO,
    sessions: Mapping[str, int] = NO_SESSIONS,
    on_tokens: OnTokens = lambda number: None,
    stream_interval: int = 1,
) -> Run:
    """Runs a workload to its end, sampling the seats meanwhile. `sessions` are those whose processor time counts.

    Events have `stream_interval` tokens. Where all requests come at once, a request of the benchmark itself holds every
    executor that is not known to batch in flight, until enough requests wait there. Otherwise a static batch would
    start with the first request alone.
    """
    before, times_before = await sample_seats(client, 0.0), await _device_times(client)
    holds = workload.arrives_at_once and await _boards_by_batch(client)
    gates = await _close_gates(client, before.num_executors) if holds else []
    places = nullcontext() if workload.concurrency is None else asyncio.Semaphore(workload.concurrency)
    meter = CoreMeter(sessions)
    start = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - start

    ended = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        sampling = group.create_task(_sample_until(client, ended, clock))
        sending = [
            group.create_task(_send(client, planned, clock, places, on_tokens, stream_interval))
            for planned in workload.requests
        ]
        if gates:
            await _until_crowded(client, min(before.seats_total, len(sending)) + len(gates))
            for gate in gates:
                await gate.aclose()
        outcomes = [await sent for sent in sending]
        ended.set()
        samples = await sampling
    cores = meter.stop()
    after = await _settled(client, clock)
    figures = device_figures(times_before, await _device_times(client))
    return Run(
        mode=mode,
        round=round_number,
        measures=measure(outcomes, samples, after.num_steps - before.num_steps, slo),
        samples=tuple(samples),
        errors=tuple(dict.fromkeys(outcome.error for outcome in outcomes if outcome.error is not None)),
        cores=cores,
        figures=figures,
    )


async def sample_seats(client: AsyncClient, at_s: float) -> SeatSample:
    """What all executors hold now."""
    capacity = await client.capacity()
    executors = capacity.executors
    return SeatSample(
        at_s=at_s,
        num_executors=len(executors),
        seats_total=sum(executor.seats_total for executor in executors),
        seats_used=sum(executor.seats_used for executor in executors),
        num_queued=capacity.num_queued + sum(executor.num_waiting for executor in executors),
        blocks_used=sum(executor.blocks_used for executor in executors),
        num_steps=sum(executor.num_steps for executor in executors),
    )


async def _device_times(client: AsyncClient) -> DeviceTimes:
    """Returns the totals of all executors."""
    executors = (await client.capacity()).executors
    return added_up([DeviceTimes(one.num_steps, one.device_busy_s, one.elapsed_s) for one in executors])


async def _boards_by_batch(client: AsyncClient) -> bool:
    return any(executor.batching != "inflight" for executor in (await client.capacity()).executors)


async def _close_gates(client: AsyncClient, num_executors: int) -> list[AsyncGenerator[Event, None]]:
    """Seats one request on each executor: each takes room, so that the next one finds more elsewhere."""
    gates = []
    for _ in range(num_executors):
        gate = client.generate(token_ids=GATE_PROMPT_IDS, max_tokens=GATE_TOKENS, ignore_eos=True).events()
        async for event in gate:
            if isinstance(event, Started | Delta):
                break
        gates.append(gate)
    return gates


async def _until_crowded(client: AsyncClient, num_requests: int) -> None:
    """Returns when so many requests sit or wait, or have had time enough to."""
    with suppress(TimeoutError, InflightError):
        async with asyncio.timeout(GATE_TIMEOUT_S):
            while True:
                sample = await sample_seats(client, 0.0)
                if sample.seats_used + sample.num_queued >= num_requests:
                    return
                await asyncio.sleep(GATE_INTERVAL_S)  # the API has no watch


async def _send(
    client: AsyncClient,
    planned: PlannedRequest,
    clock: Clock,
    places: AbstractAsyncContextManager[None],
    on_tokens: OnTokens,
    stream_interval: int,
) -> Outcome:
    """Sends one request at its time, when there is a place for it, and reads it to the end."""
    await asyncio.sleep(planned.arrival_s)
    async with places:
        return await _send_now(client, planned, clock, on_tokens, stream_interval)


async def _send_now(
    client: AsyncClient, planned: PlannedRequest, clock: Clock, on_tokens: OnTokens, stream_interval: int
) -> Outcome:
    arrivals = TokenTimes(clock())
    error: str | None = None
    try:
        async for delta in client.generate(
            token_ids=planned.prompt_ids,
            max_tokens=planned.output_tokens,
            ignore_eos=True,
            temperature=0.0,
            stream_interval=stream_interval,
        ):
            arrivals.take(clock(), delta.num_tokens)
            on_tokens(delta.num_tokens)
        if arrivals.num_tokens != planned.output_tokens:
            error = f"{arrivals.num_tokens} tokens came of {planned.output_tokens}"
    except InflightError as refused:
        error = str(refused)
    return arrivals.outcome(clock(), error)


async def _sample_until(client: AsyncClient, ended: asyncio.Event, clock: Clock) -> list[SeatSample]:
    """Samples at a steady rate. A sample that fails is left out: the run itself says what went wrong."""
    samples: list[SeatSample] = []
    while not ended.is_set():
        with suppress(InflightError):
            samples.append(await sample_seats(client, clock()))
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), SAMPLE_INTERVAL_S)
    return samples


async def _settled(client: AsyncClient, clock: Clock) -> SeatSample:
    """Returns the first sample without a running or waiting request, or the last one before the time is over."""
    deadline_s = clock() + SETTLE_TIMEOUT_S
    while True:
        sample = await sample_seats(client, clock())
        if sample.seats_used + sample.num_queued == 0 or clock() > deadline_s:
            return sample
        await asyncio.sleep(SAMPLE_INTERVAL_S)
