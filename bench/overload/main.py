"""Goodput under overload, beside `vllm serve`: `make bench-overload ARGS="--seconds 120"`.

A tenant that floods and a few light ones send `--factor` times what can be served. They send the same requests at the
same times to a stack with a vLLM executor and to `vllm serve`, in turns. The queue of `vllm serve` is as long as what
can begin within the deadline of first tokens. Goodput counts the requests of which all tokens came before the deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from inflight import AsyncClient
from inflight.bench.comparison.options import VLLM_MODE, BenchOptions, parse_options
from inflight.bench.comparison.stacks import stack_options, vllm_flags, vllm_program
from inflight.bench.measures.run import NO_SLO, percentile
from inflight.bench.overload.sides import End, Ending, Patience, ServeSide, Side, StackSide
from inflight.bench.peers.driver import SERVER_MODULE
from inflight.bench.report.table import Table
from inflight.bench.targets.driven import START_TIMEOUT_S, STOP_GRACE_S
from inflight.bench.targets.model import LocalModel, local_model
from inflight.bench.targets.stack import StackTarget, sessions_of
from inflight.bench.workloads.generate import Arrivals, build_workload
from inflight.bench.workloads.plan import PlannedRequest
from inflight.local.ports import free_ports
from inflight.local.process import ChildProcess
from inflight.local.stack import LocalStack

WORKLOAD = "short"
FLOODING, LIGHT = "flood", "light"
# The share of the load that the light tenants send together.
LIGHT_SHARE = 0.1
# Requests that measure the capacity, for each seat.
TURNS = 4
WARM_UP_REQUESTS = 2
MAX_WARM_UPS = 10
HOST = "127.0.0.1"
LOG_FILE = Path("run") / "bench-overload" / "vllm-serve.log"
POLL_S = 0.5


def planned(model: LocalModel, rate_per_s: float, seconds: float, seed: int, variant: int) -> list[PlannedRequest]:
    """Returns the requests that arrive at a rate."""
    num_requests = max(1, round(rate_per_s * seconds))
    workload = build_workload(
        WORKLOAD,
        vocabulary_size=model.vocabulary_size,
        num_requests=num_requests,
        seed=seed,
        variant=variant,
        arrivals=Arrivals(rate_per_s, None),
    )
    return list(workload.requests)


def load(
    model: LocalModel, rate_per_s: float, options: argparse.Namespace, number: int
) -> list[tuple[str, PlannedRequest]]:
    """Returns the requests of a round with their tenants."""
    flood = planned(model, rate_per_s * (1 - LIGHT_SHARE), options.seconds, options.seed, 2 * number)
    light = planned(model, rate_per_s * LIGHT_SHARE, options.seconds, options.seed + 1, 2 * number + 1)
    tenants = [f"{LIGHT}-{index % options.light}" for index in range(len(light))]
    return [*((FLOODING, one) for one in flood), *zip(tenants, light, strict=True)]


async def offer(side: Side, requests: Sequence[tuple[str, PlannedRequest]]) -> list[Ending]:
    """Sends every request at its time. Returns when all have ended."""

    async def send(tenant: str, request: PlannedRequest) -> Ending:
        await asyncio.sleep(request.arrival_s)
        return await side.send(request, tenant)

    async with side.working():
        return await asyncio.gather(*(send(tenant, request) for tenant, request in requests))


async def capacity_per_s(side: Side, model: LocalModel, options: argparse.Namespace, variant: int) -> float:
    """Returns the requests per second of a closed loop that has as many under way as there are seats."""
    places = asyncio.Semaphore(options.seats)

    async def send(request: PlannedRequest) -> Ending:
        async with places:
            return await side.send(request, FLOODING)

    requests = planned(model, 1.0, TURNS * options.seats, options.seed, variant)
    async with side.working():
        for _ in range(MAX_WARM_UPS):  # vLLM compiles some functions at their first use, which takes its time
            if all(one.end is End.COMPLETED for one in [await send(one) for one in requests[:WARM_UP_REQUESTS]]):
                break
        began_s = time.perf_counter()
        endings = await asyncio.gather(*(send(one) for one in requests))
    return sum(one.end is End.COMPLETED for one in endings) / (time.perf_counter() - began_s)


@asynccontextmanager
async def stack_side(bench: BenchOptions, patience: Patience) -> AsyncIterator[StackSide]:
    """Starts the stack."""
    async with LocalStack(stack_options(bench, VLLM_MODE)) as stack, AsyncClient(stack.address) as client:
        paused = tuple(child.pid for child in stack.executors)
        target = StackTarget(VLLM_MODE, stack.address, client, NO_SLO, sessions_of(stack), {}, paused=paused)
        try:
            yield StackSide(target, patience)
        finally:
            target.signal(signal.SIGCONT)  # a stopped process cannot end


@asynccontextmanager
async def serve_side(bench: BenchOptions, queue: int, patience: Patience) -> AsyncIterator[ServeSide]:
    """Starts `vllm serve`, whose requests under way and in line are at most the seats and `queue`."""
    (port,), model = free_ports(HOST, 1), local_model(bench.model)
    python, environment = vllm_program()
    flags = ["--host", HOST, "--port", str(port), "--model", str(model.folder), "--served-model-name", "model"]
    flags += ["--max-num-seqs", str(bench.seats), "--max-num-queued-reqs", str(bench.seats + queue)]
    address = f"{HOST}:{port}"
    command = (python, "-P", "-m", SERVER_MODULE, *flags, *vllm_flags(bench, model))
    child = await ChildProcess.start("vllm-serve", "peer", address, command, LOG_FILE, environment)
    side = ServeSide(address, child.pid, patience)
    try:
        await _until_ready(child)
        yield side
    finally:
        side.signal(signal.SIGCONT)
        await child.stop(STOP_GRACE_S)


async def _until_ready(child: ChildProcess) -> None:
    def is_ready() -> bool:
        try:
            urllib.request.urlopen(f"http://{child.address}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    async with asyncio.timeout(START_TIMEOUT_S):
        while not await asyncio.to_thread(is_ready):
            if child.exit_code is not None:
                raise SystemExit("\n".join(["vllm serve does not start:", *child.log_tail()]))
            await asyncio.sleep(POLL_S)


COLUMNS = (
    *("", "offered", "completed", "goodput/s", "tokens/s", "refused", "late", "failed"),
    *("light %", "light p50", "light p99"),
)


def row(name: str, endings: Sequence[Ending], seconds: float) -> list[str]:
    """Returns a row of the table. TTFT is that of the light tenants' requests that got a token, in milliseconds."""
    completed = [one for one in endings if one.end is End.COMPLETED]
    light = [one for one in endings if one.tenant != FLOODING]
    ttfts = [one.first_token_s for one in light if one.first_token_s is not None]
    p50, p99 = (1000 * (percentile(ttfts, fraction) or math.nan) for fraction in (0.5, 0.99))
    share = 100 * sum(one.end is End.COMPLETED for one in light) / max(1, len(light))
    counts = [sum(one.end is end for one in endings) for end in (End.REFUSED, End.LATE, End.FAILED)]
    num_tokens = sum(one.num_tokens for one in completed)
    return [
        *(name, str(len(endings)), str(len(completed))),
        *(f"{len(completed) / seconds:.2f}", f"{num_tokens / seconds:.1f}"),
        *map(str, counts),
        *(f"{figure:.0f}" for figure in (share, p50, p99)),
    ]


async def measure(options: argparse.Namespace) -> str:
    """Returns the table."""
    flags = ["--seats", str(options.seats), "--workload", WORKLOAD]
    bench = parse_options([*flags, *(["--model", options.model] if options.model else [])])
    patience = Patience(options.deadline_s, options.deadline_s * options.first_token_share)
    model = local_model(options.model)
    async with AsyncExitStack() as opened:
        sides: list[Side] = [await opened.enter_async_context(stack_side(bench, patience))]
        rates = [await capacity_per_s(sides[0], model, options, -1)]
        queue = options.peer_queue or math.ceil(rates[0] * patience.first_token_s)
        serve = serve_side(bench, queue, patience)
        sides.append(await opened.enter_async_context(serve))
        rates.append(await capacity_per_s(sides[1], model, options, -1))
        found = ", ".join(f"{side.name} {rate:.2f}" for side, rate in zip(sides, rates, strict=True))
        capacity = (
            f"capacity: {found} requests/s; offered {options.factor:g} times the larger; "
            f"deadline {patience.deadline_s:g} s, of first tokens {patience.first_token_s:g} s; "
            f"queue of vllm-serve {queue}"
        )
        endings: dict[str, list[Ending]] = {side.name: [] for side in sides}
        for number in range(options.rounds):
            requests = load(model, options.factor * max(rates), options, number)
            for side in sides if number % 2 == 0 else reversed(sides):
                endings[side.name] += await offer(side, requests)
    rows = [row(name, ended, options.rounds * options.seconds) for name, ended in endings.items()]
    errors = {one.error for ended in endings.values() for one in ended if one.end is End.FAILED}
    return "\n".join([capacity, Table(COLUMNS, rows).text(), *sorted(errors)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-overload", description=__doc__)
    parser.add_argument("--model", help="folder of the model; default: SmolLM2-135M-Instruct")
    parser.add_argument("--seats", type=int, default=8, help="of the executor and of vllm serve; default %(default)s")
    parser.add_argument("--factor", type=float, default=3.0, help="load over capacity; default %(default)s")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a round; default %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="default %(default)s")
    parser.add_argument("--light", type=int, default=4, help="light tenants; default %(default)s")
    parser.add_argument("--deadline-s", type=float, default=20.0, help="for all tokens; default %(default)s")
    parser.add_argument("--first-token-share", type=float, default=0.5, help="of the deadline; default %(default)s")
    parser.add_argument("--peer-queue", type=int, default=0, help="of vllm serve; default: by capacity and deadline")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the table."""
    LOG_FILE.parent.mkdir(parents=True, exist_ok=True)
    print(asyncio.run(measure(_parser().parse_args(argv))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
