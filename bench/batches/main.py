"""Latency of interactive requests with and without a running batch: `make bench-batch ARGS="--lines 10000"`.

A local stack gets the same interactive requests twice in each round, alone and while a batch runs through its gateway.
Writes the figures as JSON and as a page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inflight import AsyncClient
from inflight.bench.measures.run import NO_SLO, Outcome, TokenTimes, measure
from inflight.bench.report.page import Page, Part, write_report
from inflight.bench.report.table import Table, shown
from inflight.bench.targets.load import sample_seats
from inflight.bench.targets.model import local_model
from inflight.bench.workloads.generate import Arrivals, build_workload
from inflight.bench.workloads.plan import PlannedRequest
from inflight.catalogue import Model
from inflight.cli.doctor import processor
from inflight.common.machine import num_usable_cores
from inflight.errors import InflightError
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack

ALONE, BESIDE = "alone", "beside a batch"
ENDED = ("completed", "failed", "expired", "cancelled")
ENDPOINT = "/v1/chat/completions"
HEAD = (
    '--bench\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    '--bench\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
)
HTTP_TIMEOUT_S = 60.0
POLL_S = 0.2
FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "inter_token_p50_ms", "inter_token_p99_ms")
TITLES = ("mode", "TTFT p50 ms", "TTFT p99 ms", "inter-token p50 ms", "inter-token p99 ms", "failed", "lines/s")


@dataclass(frozen=True, slots=True)
class Trial:
    """How requests went, and the lines of the batch that were completed in a time."""

    mode: str
    outcomes: tuple[Outcome, ...]
    num_lines: int = 0
    elapsed_s: float = 0.0

    def values(self) -> dict[str, Any]:
        """Returns the figures."""
        lines_per_s = self.num_lines / self.elapsed_s if self.num_lines else None
        return {"mode": self.mode, **asdict(measure(self.outcomes, (), None, NO_SLO)), "lines_per_s": lines_per_s}

    def cells(self) -> list[str]:
        """Returns a row of a table."""
        values = self.values()
        figures = [shown(values[name], ".1f") for name in FIGURES]
        return [self.mode, *figures, str(values["num_failed"]), shown(values["lines_per_s"], ".2f")]


def call(url: str, body: bytes | None = None, content_type: str = "application/json") -> dict[str, Any]:
    """Calls the gateway."""
    request = urllib.request.Request(url, data=body, headers={"content-type": content_type})
    with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def begin_batch(url: str, bodies: Sequence[dict[str, Any]]) -> str:
    """Starts a batch of chats. Returns its address when a line has its result."""
    lines = ({"custom_id": f"{n}", "method": "POST", "url": ENDPOINT, "body": one} for n, one in enumerate(bodies))
    form = HEAD + "".join(json.dumps(line) + "\n" for line in lines) + "\r\n--bench--\r\n"
    file = call(f"{url}/files", form.encode(), "multipart/form-data; boundary=bench")
    asked = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    batch_url = f"{url}/batches/{call(f'{url}/batches', json.dumps(asked).encode())['id']}"
    while (batch := call(batch_url))["status"] not in ENDED and not batch["request_counts"]["completed"]:
        time.sleep(POLL_S)
    return batch_url


def end_batch(batch_url: str) -> int:
    """Cancels a batch. Returns the number of its completed lines."""
    if (status := call(batch_url)["status"]) in ENDED:
        raise SystemExit(f"the batch was {status} before the requests had ended: give it more --lines")
    call(f"{batch_url}/cancel", b"")
    while (batch := call(batch_url))["status"] not in ENDED:
        time.sleep(POLL_S)
    return int(batch["request_counts"]["completed"])


async def sent(client: AsyncClient, planned: PlannedRequest) -> Outcome:
    """Sends an interactive request at its time, and reads it."""
    await asyncio.sleep(planned.arrival_s)
    times, error = TokenTimes(time.perf_counter()), None
    options: dict[str, Any] = {"max_tokens": planned.output_tokens, "ignore_eos": True, "priority": "interactive"}
    try:
        async for delta in client.generate(token_ids=planned.prompt_ids, **options):
            times.take(time.perf_counter(), delta.num_tokens)
    except InflightError as failed:
        error = str(failed)
    return times.outcome(time.perf_counter(), error)


async def tried(client: AsyncClient, url: str, options: argparse.Namespace, number: int, mode: str) -> Trial:
    """Sends the requests of a round. Those of the two modes differ in their tokens, so that none is cached."""
    model: Model = (await client.list_models())[0]
    workload = build_workload(
        options.workload,
        vocabulary_size=model.vocabulary_size,
        num_requests=options.requests,
        seed=number,
        variant=int(mode == BESIDE),
        arrivals=Arrivals(options.rate),
    )
    body = {"model": model.name, "max_tokens": options.line_tokens, "ignore_eos": True}
    began_s, batch_url, num_lines = time.perf_counter(), "", 0
    if mode == BESIDE:
        texts = (f"Tell me about {number}-{line}." for line in range(options.lines))
        bodies = [body | {"messages": [{"role": "user", "content": text}]} for text in texts]
        batch_url = await asyncio.to_thread(begin_batch, url, bodies)
    outcomes = await asyncio.gather(*(sent(client, one) for one in workload.requests))
    if batch_url:
        num_lines = await asyncio.to_thread(end_batch, batch_url)
    elapsed_s = time.perf_counter() - began_s
    while True:  # lines that were under way run on for some seconds
        left = await sample_seats(client, 0.0)
        if not left.seats_used + left.num_queued:
            break
        await asyncio.sleep(POLL_S)
    return Trial(mode, tuple(outcomes), num_lines, elapsed_s)


async def measured(options: argparse.Namespace, folder: Path) -> list[Trial]:
    """Returns the trials, in turns."""
    gateway_args = ("--batch-max-running-each", str(options.running))
    stack_options = StackOptions(gateways=1, model=options.model, run_dir=folder, gateway_args=gateway_args)
    async with LocalStack(stack_options) as stack, AsyncClient(stack.address) as client:
        await asyncio.gather(*(sent(client, PlannedRequest((number,), 8, 0.0)) for number in range(4)))  # warms up
        trials = []
        for number in range(options.rounds):
            for mode in (ALONE, BESIDE)[:: -1 if number % 2 else 1]:
                trials.append(await tried(client, f"http://{stack.gateway_addresses[0]}/v1", options, number, mode))
                print(f"round {number}: {', '.join(trials[-1].cells())}", flush=True)
    return trials


def report(options: argparse.Namespace, trials: Sequence[Trial]) -> tuple[dict[str, Any], Page]:
    """Returns the figures of each trial, and of each mode over all rounds, as plain values and as a page."""
    modes = []
    for mode in (ALONE, BESIDE):
        of_mode = [trial for trial in trials if trial.mode == mode]
        num_lines, elapsed_s = (sum(getattr(trial, name) for trial in of_mode) for name in ("num_lines", "elapsed_s"))
        modes.append(Trial(mode, tuple(one for trial in of_mode for one in trial.outcomes), num_lines, elapsed_s))
    facts = {
        "machine": f"{num_usable_cores()} cores, {processor().text}",
        **{name.replace("_", " "): str(value) for name, value in vars(options).items() if name != "out"},
        "model": local_model(options.model).name,
    }
    note = "Percentiles over the requests of all rounds; lines/s of the batch."
    details = Table(TITLES, [trial.cells() for trial in trials])  # in the order of the rounds
    errors = sorted({one.error for trial in trials for one in trial.outcomes if one.error})
    part = Part("Interactive requests", note, (), Table(TITLES, [one.cells() for one in modes]), details, errors)
    values = {"circumstances": facts, "modes": [m.values() for m in modes], "trials": [t.values() for t in trials]}
    return values, Page("Interactive requests beside a batch", facts, [part])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(prog="make bench-batch", description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--lines", type=int, default=10_000, help="of a batch")
    parser.add_argument(
        "--running", type=int, default=64, help="lines at routers at a time; the default is the gateway's"
    )
    parser.add_argument("--line-tokens", type=int, default=128, help="output tokens of a line")
    parser.add_argument("--workload", default="chat", help="of the interactive requests")
    parser.add_argument("--requests", type=int, default=60, help="interactive ones of a trial")
    parser.add_argument("--rate", type=float, default=0.5, help="interactive ones per second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder of the report")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-batch-") as folder:
        values, page = report(options, asyncio.run(measured(options, Path(folder))))
    print(page.markdown(), *write_report(options.out, "batch", values, page), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
