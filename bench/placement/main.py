"""Placement on two real executors: by prefix, by load, in turns, and by an oracle.

    python -m inflight.bench.placement.main [--trace agents] [--scale 1]

Two executors with SmolLM2 on this machine get the traces of the simulated comparison
(`inflight.bench.scheduling.placing`), with shorter prompts. By prefix, a router with both executors places. Otherwise
the benchmark chooses the executor on arrival and sends the request through a router that has only this one. The oracle
follows the caches of both exactly (`inflight.bench.placement.known_line`).

Each trace runs at saturation first: at 1.25 times the rate that both executors could compute if each prompt's prefix
were cached, at the speed of prompts that was measured before. "80 %" is that share of the requests/s that placement by
prefix served then, unless `--requests-per-s` sets the rate. In a long overload of agents most prefixes leave the caches
before they are used, so that executors serve fewer requests/s than they could just below saturation.
Every run has its own tokens, so that nothing of it is in the caches beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from inflight import AsyncClient
from inflight.bench.measures.run import percentile
from inflight.bench.placement.known_line import KnownLine
from inflight.bench.placement.real_executors import RealExecutors, real_executors
from inflight.bench.placement.token_ids import token_ids
from inflight.bench.report.page import Page, Part
from inflight.bench.report.table import UNKNOWN, Table
from inflight.bench.timeline.conversations import Conversations
from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.timeline.traffic import SimRequest
from inflight.common.machine import num_usable_cores
from inflight.errors import InflightError
from inflight.events import Delta, Started

BLOCK_SIZE = 16
POOL_TOKENS = 16_384
EXECUTOR_ARGS = (
    "--max-tokens-in-paged-kv-cache", str(POOL_TOKENS), "--tokens-per-block", str(BLOCK_SIZE),
    "--max-num-sequences", "16", "--max-num-tokens", "512",
)  # fmt: skip
WARM_FRACTION = 0.4
SHARE_OF_SATURATED = 0.8
OVERLOAD = 1.25
OUTPUT_WEIGHT = 4  # the time of an output token as a multiple of a prompt token's, in steps of few sequences
SPEED_TOKENS, SPEED_ROUNDS = 512, 3
HEADER = (
    "load", "placement", "requests", "without a token", "served/s", "TTFT p50, ms", "p90", "p99", "p90 / oracle's",
    "prompt tokens cached", "busiest executor / mean", "cached as expected", "failed",
)  # fmt: skip


class Way(Enum):
    """How the executor of a request is chosen."""

    PREFIX = "by prefix (router)"
    LEAST_LOADED = "least loaded"
    ROUND_ROBIN = "round robin"
    ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Trace:
    """A kind of chats, and how long it is sent at each load, in seconds."""

    name: str
    chats: Conversations
    saturated_s: float
    duration_s: float

    def saturating(self, tokens_per_s: float) -> float:
        """Returns how many of the chats begin per second at saturation, if the executors compute so many tokens per
        second of prompts."""
        chats = self.chats
        tokens = sum(chats.turn_tokens) / 2 + OUTPUT_WEIGHT * sum(chats.output_tokens) / 2
        return OVERLOAD * tokens_per_s / (chats.num_turns * tokens)


WARM_UP = Conversations(num_turns=1, system_tokens=512, turn_tokens=(16, 64), output_tokens=(2, 4))
TRACES = {
    "shared": Trace(
        "shared prefixes",
        Conversations(num_turns=1, system_tokens=512, num_systems=12, turn_tokens=(16, 64), output_tokens=(4, 16)),
        saturated_s=20.0,
        duration_s=80.0,  # at first no beginning is cached, which takes half a minute to work off at 80 %
    ),
    "agents": Trace(
        "agents",
        Conversations(num_turns=5, pause_s=2.0, system_tokens=256, turn_tokens=(100, 500), output_tokens=(4, 16)),
        saturated_s=40.0,
        duration_s=60.0,
    ),
}


@dataclass(slots=True)
class Sent:
    """One request of a run. Times in seconds since its beginning."""

    request: SimRequest
    arrived_s: float
    ttft_s: float | None = None
    executor_id: str = ""
    cached_tokens: int = 0
    expected_tokens: int | None = None
    """Those that `KnownLine` expected to be cached, where the benchmark chose the executor."""
    num_output: int = 0
    error: str = ""


@dataclass(slots=True)
class Run:
    """One way on one trace at one rate."""

    executors: RealExecutors
    way: Way
    shift: int
    duration_s: float
    lines: dict[str, KnownLine] = field(init=False)
    sent: list[Sent] = field(default_factory=list)
    began_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.lines = {name: KnownLine(POOL_TOKENS // BLOCK_SIZE, BLOCK_SIZE) for name in self.executors.of_executor}

    async def send_all(self, requests: Sequence[SimRequest]) -> None:
        """Sends all requests at their times. What has not ended at the end of the time is cancelled."""
        tasks = [asyncio.create_task(self._send_at_its_time(request)) for request in requests]
        await asyncio.sleep(self.duration_s)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.began_s

    async def _send_at_its_time(self, request: SimRequest) -> None:
        await asyncio.sleep(request.arrival_us / US_PER_S - self.now_s)
        sent = Sent(request, self.now_s)
        prompt = token_ids(token + self.shift for token in request.prompt)
        executor_id = self._choose(prompt)
        self.sent.append(sent)
        line = self.lines.get(executor_id)
        if line is not None:
            sent.expected_tokens = line.give(request.request_id, prompt)
        try:
            await self._read(sent, prompt, executor_id)
        except InflightError as error:
            sent.error = str(error)
        finally:
            if line is not None:
                line.end(request.request_id)

    def _choose(self, prompt: Sequence[int]) -> str:
        names = list(self.lines)
        match self.way:
            case Way.PREFIX:
                return ""
            case Way.ROUND_ROBIN:
                return names[len(self.sent) % len(names)]
            case Way.LEAST_LOADED:
                first = len(self.sent) % len(names)
                return min([*names[first:], *names[:first]], key=lambda name: self.lines[name].num_inside)
            case Way.ORACLE:
                return min(names, key=lambda name: (self.lines[name].cost(prompt), self.lines[name].num_inside))

    async def _read(self, sent: Sent, prompt: Sequence[int], executor_id: str) -> None:
        client = self.executors.of_executor.get(executor_id, self.executors.placing)
        stream = client.generate(token_ids=prompt, max_tokens=sent.request.num_output, ignore_eos=True, temperature=0.0)
        async for event in stream.events():
            if isinstance(event, Started):
                sent.executor_id, sent.cached_tokens = event.executor_id, event.cached_tokens
            elif isinstance(event, Delta) and event.num_tokens:
                sent.num_output += event.num_tokens
                if sent.ttft_s is None:
                    sent.ttft_s = self.now_s - sent.arrived_s
                    if executor_id:
                        self.lines[executor_id].first_token(sent.request.request_id)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one run, without its beginning."""

    load: str
    way: Way
    num_requests: int
    num_without_token: int
    requests_per_s: float
    ttft_ms: tuple[float, float, float]
    cached_fraction: float
    busiest: float
    expected: float | None
    num_failed: int

    @classmethod
    def of(cls, run: Run, load: str) -> Row:
        """Counts a request without a first token with its wait so far."""
        begin_s = WARM_FRACTION * run.duration_s
        sent = [one for one in run.sent if one.arrived_s >= begin_s and not one.error]
        started = [one for one in sent if one.ttft_s is not None]
        known = [one for one in started if one.expected_tokens is not None]
        waits_ms = [1e3 * (run.duration_s - one.arrived_s if one.ttft_s is None else one.ttft_s) for one in sent]
        computed = Counter(dict.fromkeys(run.lines, 0))
        for one in run.sent:
            if one.ttft_s is not None:
                computed[one.executor_id] += len(one.request.prompt) - one.cached_tokens + one.num_output
        first_tokens = [one.arrived_s + one.ttft_s for one in run.sent if one.ttft_s is not None]
        return cls(
            load,
            run.way,
            len(sent),
            len(sent) - len(started),
            sum(at_s >= begin_s for at_s in first_tokens) / (run.duration_s - begin_s),
            tuple(percentile(waits_ms, share) or 0.0 for share in (0.5, 0.9, 0.99)),  # type: ignore[arg-type]
            sum(one.cached_tokens for one in started) / max(1, sum(len(one.request.prompt) for one in started)),
            max(computed.values()) * len(computed) / max(1, sum(computed.values())),
            sum(one.cached_tokens == one.expected_tokens for one in known) / len(known) if known else None,
            sum(bool(one.error) for one in run.sent),
        )

    def cells(self, rows: Sequence[Row]) -> list[str]:
        oracle = next((one for one in rows if (one.load, one.way) == (self.load, Way.ORACLE)), None)
        expected = UNKNOWN if self.expected is None else f"{self.expected:.0%}"
        ratio = UNKNOWN if oracle is None else f"{self.ttft_ms[1] / max(1e-9, oracle.ttft_ms[1]):.2f}"
        return [
            self.load, self.way.value, f"{self.num_requests}", f"{self.num_without_token}",
            f"{self.requests_per_s:.1f}",
            *(f"{wait:,.0f}" for wait in self.ttft_ms), ratio,
            f"{self.cached_fraction:.0%}", f"{self.busiest:.2f}", expected, f"{self.num_failed}",
        ]  # fmt: skip


async def measure(
    folder: Path, trace: Trace, scale: float, seed: int, say: Callable[[str], None], requests_per_s: float | None = None
) -> list[Row]:
    """Runs everything, with the second load of `requests_per_s`; None: 80 % of what was served at saturation. Raises
    `RuntimeError` if no request was served then."""
    rows: list[Row] = []
    async with real_executors(folder, EXECUTOR_ARGS) as executors:

        async def run(chats: Conversations, load: str, duration_s: float, way: Way) -> Row:
            requests = chats.requests(seed, duration_s, names_prefixes=False)
            one = Run(executors, way, 7919 * (len(rows) + 1), duration_s)
            await one.send_all(requests)
            row = Row.of(one, load)
            rows.append(row)
            say(" | ".join(row.cells(rows)))
            return row

        await run(replace(WARM_UP, rate_per_s=2.0), "warm-up", 3.0, Way.ROUND_ROBIN)
        rows.clear()
        tokens_per_s = await speed(executors)
        say(f"both executors compute {tokens_per_s:,.0f} tokens/s of prompts")
        chats = replace(trace.chats, rate_per_s=trace.saturating(tokens_per_s))
        saturated = [await run(chats, "saturated", scale * trace.saturated_s, way) for way in Way]
        load = "" if requests_per_s else "80 %, "
        requests_per_s = requests_per_s or SHARE_OF_SATURATED * saturated[0].requests_per_s
        if not requests_per_s:
            raise RuntimeError("no request was served: the machine is too busy, or the time too short")
        chats = replace(trace.chats, rate_per_s=requests_per_s / trace.chats.num_turns)
        for way in Way:
            await run(chats, f"{load}{requests_per_s:.1f} requests/s", scale * trace.duration_s, way)
    return rows


async def speed(executors: RealExecutors) -> float:
    """Returns the tokens of prompts that all executors together compute per second: the median of some prompts of which
    nothing is cached, one at a time on each."""

    async def first_token_s(client: AsyncClient, first: int) -> float:
        prompt = token_ids(range(first, first + SPEED_TOKENS))
        began_s = time.perf_counter()
        await client.generate(token_ids=prompt, max_tokens=1, temperature=0.0).result()
        return time.perf_counter() - began_s

    found: list[float] = []
    for number in range(SPEED_ROUNDS):
        clients = executors.of_executor.values()
        waits_s = await asyncio.gather(*(first_token_s(client, -(number + 1) * SPEED_TOKENS) for client in clients))
        found.append(sum(SPEED_TOKENS / wait_s for wait_s in waits_s))
    return statistics.median(found)


def page(trace: Trace, rows: Sequence[Row], command: str, load_average: float) -> Page:
    """Returns the report."""
    circumstances = {
        "command": command,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.machine()} with {num_usable_cores()} cores, Linux {platform.release()}; two executors "
        "of one thread, three routers, three Redis servers and this benchmark share them; load average at the "
        f"beginning: {load_average:.1f}",
        "model": f"SmolLM2-135M-Instruct; {POOL_TOKENS:,} tokens of KV cache for each executor",
        "requests": describe(trace.chats),
        "busiest executor / mean": "by computed tokens: prompts without what was cached, and outputs",
        "cached as expected": "requests with as many cached tokens as the benchmark's record of the executor said",
    }
    table = Table(HEADER, [row.cells(rows) for row in rows])
    note = (
        f"The first {WARM_FRACTION:.0%} of each run are left out, except from the last two columns. A request without "
        "a token at the end of its run counts with its wait until then. Where most requests have none, the TTFT "
        "compares nothing."
    )
    return Page(f"Placement on two real executors: {trace.name}", circumstances, [Part("Figures", note, table=table)])


def describe(chats: Conversations) -> str:
    """Returns the shape of the requests in words."""
    begins = f"{chats.num_systems} beginnings" if chats.num_systems > 1 else "one beginning"
    return (
        f"{begins} of {chats.system_tokens} tokens; {chats.num_turns} turns that add "
        f"{chats.turn_tokens[0]} to {chats.turn_tokens[1]} tokens, {chats.pause_s:g} s apart; "
        f"{chats.output_tokens[0]} to {chats.output_tokens[1]} output tokens"
    )


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark and writes its report."""
    parser = argparse.ArgumentParser(prog="python -m inflight.bench.placement.main", description=__doc__)
    parser.add_argument("--trace", choices=list(TRACES), default="agents", help="(default: agents)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time (default: 1, seven minutes)")
    parser.add_argument("--seed", type=int, default=0, help="of the trace (default: 0)")
    parser.add_argument(
        "--requests-per-s", type=float, help="second load (default: 80 %% of the requests/s served at saturation)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/reports"), help="folder (default: bench/reports)")
    options = parser.parse_args(argv)
    load_average, trace = os.getloadavg()[0], TRACES[options.trace]
    with tempfile.TemporaryDirectory() as folder:
        measuring = measure(
            Path(folder),
            trace,
            options.scale,
            options.seed,
            lambda line: print(line, flush=True),
            options.requests_per_s,
        )
        rows = asyncio.run(measuring)
    command = f"python -m inflight.bench.placement.main {' '.join(argv)}".strip()
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out / f"placement-{options.trace}.md"
    report.write_text(page(trace, rows, command, load_average).markdown(), encoding="utf-8")
    return 0 if not any(row.num_failed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
