"""TTFT of interactive requests with and without a running batch: `make bench-batches ARGS="--lines 10000"`.

A local stack gets interactive requests at a fixed rate, first alone and then while a batch runs through its gateway. It
prints how long their first tokens took, and how many lines of the batch were completed meanwhile.
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
from contextlib import aclosing
from pathlib import Path
from typing import Any

from inflight import AsyncClient
from inflight.bench.measures.run import percentile
from inflight.events import Delta
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack

BOUNDARY = "inflight-bench"
HTTP_TIMEOUT_S = 60.0
POLL_S = 0.2
WARM_UP_REQUESTS = 4


class Batches:
    """The files and batches of a gateway. Its calls block."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/v1"

    def start(self, lines: Sequence[dict[str, Any]]) -> str:
        """Starts a batch. Returns its id."""
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n'
        head += 'Content-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
        form = head.encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()
        file = self._call("/files", form, f"multipart/form-data; boundary={BOUNDARY}")
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self._call("/batches", json.dumps(asked).encode(), "application/json")["id"])

    def state(self, batch_id: str) -> dict[str, Any]:
        """Returns a batch."""
        return self._call(f"/batches/{batch_id}")

    def begun(self, batch_id: str) -> dict[str, Any]:
        """Returns a batch, when it has results."""
        while not (batch := self.state(batch_id))["request_counts"]["completed"]:
            time.sleep(POLL_S)
        return batch

    def _call(self, path: str, body: bytes | None = None, content_type: str = "") -> dict[str, Any]:
        headers = {"content-type": content_type} if body is not None else {}
        request = urllib.request.Request(self._url + path, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
            return answer


async def first_token_s(client: AsyncClient, number: int, max_tokens: int) -> float:
    """Returns the time to the first token of an interactive request."""
    chat = [{"role": "user", "content": f"Tell me about the number {number}."}]
    began_s, first_s = time.perf_counter(), 0.0
    stream = client.generate(chat=chat, max_tokens=max_tokens, ignore_eos=True, priority="interactive")
    async with aclosing(stream.events()) as events:
        async for event in events:
            if isinstance(event, Delta) and not first_s:
                first_s = time.perf_counter() - began_s
    return first_s


async def interactive(client: AsyncClient, options: argparse.Namespace) -> list[float]:
    """Sends requests at the rate. Returns the times to their first tokens."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(options.requests):
            tasks.append(group.create_task(first_token_s(client, number, options.max_tokens)))
            await asyncio.sleep(1 / options.rate)
    return [task.result() for task in tasks]


def line(name: str, model: str, times_s: Sequence[float]) -> str:
    """Returns a row of the table, in milliseconds."""
    figures = [percentile(times_s, fraction) or 0.0 for fraction in (0.5, 0.9, 0.99)]
    return f"{name:<16}{model:<24}" + "".join(f"{figure * 1000:>10.1f}" for figure in figures)


async def measure(options: argparse.Namespace, folder: Path) -> str:
    """Returns the table."""
    stack_options = StackOptions(
        executors=options.executors,
        routers=1,
        gateways=1,
        model=options.model,
        run_dir=folder,
        executor_args=("--max-num-sequences", str(options.seats)),
        router_args=("--preempt-for-priority",) if options.preempt else (),
    )
    async with LocalStack(stack_options) as stack, AsyncClient(stack.address) as client:
        (model,) = await client.list_models()
        batches = Batches(stack.gateway_addresses[0])
        for number in range(WARM_UP_REQUESTS):
            await first_token_s(client, number, options.max_tokens)
        alone = await interactive(client, options)
        body = {"model": model.name, "max_tokens": options.max_tokens, "ignore_eos": True}
        lines = [
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {**body, "messages": [{"role": "user", "content": f"Tell me about the number {-number}."}]},
            }
            for number in range(options.lines)
        ]
        batch_id = await asyncio.to_thread(batches.start, lines)
        before = await asyncio.to_thread(batches.begun, batch_id)
        began_s = time.perf_counter()
        beside = await interactive(client, options)
        after = await asyncio.to_thread(batches.state, batch_id)
        seconds = time.perf_counter() - began_s
    completed = after["request_counts"]["completed"] - before["request_counts"]["completed"]
    rows = [
        f"{'TTFT, ms':<16}{'model':<24}{'p50':>10}{'p90':>10}{'p99':>10}",
        line("alone", model.name, alone),
        line("beside a batch", model.name, beside),
        f"lines of the batch: {completed} in {seconds:.0f} s, {after['status']} then",
    ]
    if after["status"] != "in_progress":
        rows.append("the batch ended before the requests did: give it more --lines")
    return "\n".join(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-batches", description=__doc__)
    parser.add_argument("--model", help="folder of the model; default: SmolLM2-135M-Instruct")
    parser.add_argument("--executors", type=int, default=1, help="default %(default)s")
    parser.add_argument("--seats", type=int, default=8, help="of an executor; default %(default)s")
    parser.add_argument("--lines", type=int, default=10_000, help="of the batch; default %(default)s")
    parser.add_argument("--requests", type=int, default=120, help="interactive ones, each time; default %(default)s")
    parser.add_argument("--rate", type=float, default=1.0, help="interactive requests per second; default %(default)s")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each request and line; default %(default)s")
    parser.add_argument("--preempt", action="store_true", help="routers preempt lines for interactive requests")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns the exit code."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="inflight-batches-") as folder:
        print(asyncio.run(measure(options, Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
