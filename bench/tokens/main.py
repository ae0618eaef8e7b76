"""Processor time per token of router, gateway and client: `make bench-tokens ARGS="--streams 512 --rate 50000"`.

A real router, and with `--through gateway` a real gateway, get the tokens of an executor that computes nothing and
produces `--rate` tokens per second. `--through` says what reads them: `router`, a client that reads messages of
`GenerateMany` and counts; `client`, the Python client; `gateway`, connections that read server-sent events and count.
Processor time counts user and system time of each process while all streams run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc.aio

from inflight import AsyncClient
from inflight.common.rpc.options import NO_PROXY
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.v1 import inference_pb2

# As the Python client shares calls.
STREAMS_PER_CALL = 32
MAX_TOKENS = 500_000
# A router refuses requests that come faster than the ledger takes them.
STARTS_PER_S = 200
WARM_UP_S = 2.0


@dataclass(slots=True)
class Readings:
    """When the newest event of each stream came, and the gaps between the events of a stream while it counts."""

    counts: bool = False
    last_s: dict[tuple[int, int], float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)

    def take(self, stream: tuple[int, int]) -> None:
        """Takes an event with tokens of a stream."""
        now_s = time.monotonic()
        if self.counts and stream in self.last_s:
            self.gaps_s.append(now_s - self.last_s[stream])
        self.last_s[stream] = now_s

    def begin(self) -> None:
        """Counts from now on."""
        self.counts = True
        self.last_s.clear()


def request_of(options: argparse.Namespace, number: int) -> inference_pb2.GenerateRequest:
    """Returns the request of a stream."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1 + number % 1000] * 8), idempotency_key=f"stream-{number}"
    )
    request.stopping.max_tokens, request.stopping.ignore_eos = MAX_TOKENS, True
    request.stopping.stop.extend(f"never {index}" for index in range(options.stops))
    request.output.text, request.output.stream_interval = True, options.stream_interval
    request.output.token_ids = True  # as the Python client and the gateway ask for, to resume
    return request


async def read_router(address: str, options: argparse.Namespace, readings: Readings) -> None:
    """Reads the streams in shared calls, until cancelled."""
    channel_options = [NO_PROXY, ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(address, channel_options) as channel, asyncio.TaskGroup() as tasks:
        many: Any = channel.stream_stream(
            "/inflight.v1.InferenceService/GenerateMany",
            request_serializer=inference_pb2.GenerateManyRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateManyResponse.FromString,
        )
        for first in range(0, options.streams, STREAMS_PER_CALL):
            last = min(first + STREAMS_PER_CALL, options.streams)
            tasks.create_task(_read_call(many, range(first, last), options, readings))


async def _read_call(many: Any, numbers: range, options: argparse.Namespace, readings: Readings) -> None:
    async def messages() -> Any:
        for number in numbers:
            yield inference_pb2.GenerateManyRequest(stream=number, generate=request_of(options, number))
        await asyncio.Event().wait()

    await asyncio.sleep(numbers.start / STARTS_PER_S)
    async for response in many(messages()):
        for update in response.updates:
            if update.event.HasField("delta"):
                readings.take((numbers.start, update.stream))
            elif update.HasField("ended"):
                raise RuntimeError(f"a stream ended: {update.ended.status!r}")


async def read_client(address: str, options: argparse.Namespace, readings: Readings) -> None:
    """Reads the streams with the Python client, until cancelled."""
    async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:

        async def read(number: int) -> None:
            await asyncio.sleep(number / STARTS_PER_S)
            async for _ in client.send(request_of(options, number)):
                readings.take((0, number))

        for number in range(options.streams):
            tasks.create_task(read(number))


async def read_gateway(address: str, options: argparse.Namespace, readings: Readings) -> None:
    """Reads the streams as server-sent events, until cancelled."""
    host, _, port = address.rpartition(":")
    stops = "".join(f', "never {index}"' for index in range(options.stops))[2:]
    stop = f', "stop": [{stops}]' if stops else ""

    async def read(number: int) -> None:
        await asyncio.sleep(number / STARTS_PER_S)
        reader, writer = await asyncio.open_connection(host, int(port))
        body = (
            f'{{"model": "{options.model}", "prompt": "hello {number}", "max_tokens": {MAX_TOKENS}, '
            f'"ignore_eos": true, "stream": true{stop}}}'
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with suppress(ConnectionError):
            while received := await reader.read(1 << 16):
                if b"data: " in received:
                    readings.take((0, number))
        raise RuntimeError(f"a stream ended after {received[-200:]!r}")

    async with asyncio.TaskGroup() as tasks:
        for number in range(options.streams):
            tasks.create_task(read(number))


READERS: dict[str, Callable[[str, argparse.Namespace, Readings], Any]] = {
    "router": read_router,
    "client": read_client,
    "gateway": read_gateway,
}


def cpu_s(pid: int) -> float:
    """Returns the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tokens_sent(http_address: str) -> float:
    """Returns the number of tokens that a router has sent to clients, by its metrics."""
    with urlopen(f"http://{http_address}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("inflight_output_tokens_total{"))


async def measure(options: argparse.Namespace, folder: Path) -> str:
    """Runs the stack and returns a line with the figures."""
    stack_options = StackOptions(
        gateways=int(options.through == "gateway"),
        run_dir=folder,
        router_args=("--router-id", "router", *options.router_args.split()),
        program=(sys.executable, "-P", "-m", "inflight.bench.tokens.modelled", str(options.rate)),
    )
    async with LocalStack(stack_options) as stack:
        router, readings = stack.routers[0], Readings()
        address = stack.gateways[0].address if stack.gateways else router.address
        reading = asyncio.create_task(READERS[options.through](address, options, readings))
        pids = {"router": router.pid, "executor": stack.executors[0].pid, "client": os.getpid()}
        if stack.gateways:
            pids["gateway"] = stack.gateways[0].pid
        try:
            await _until(lambda: len(readings.last_s) == options.streams, reading)
            await asyncio.sleep(WARM_UP_S)
            if options.pause:
                print(f"pids: {pids}", flush=True)
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            began_s, sent = time.monotonic(), await asyncio.to_thread(tokens_sent, router.http_address)
            readings.begin()
            await asyncio.wait((reading,), timeout=options.seconds)
            readings.counts = False
            num_tokens = await asyncio.to_thread(tokens_sent, router.http_address) - sent
            elapsed_s = time.monotonic() - began_s
            spent = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            await asyncio.wait((reading,))
    gaps = sorted(readings.gaps_s)
    p50, p99 = (1000 * gaps[int(len(gaps) * share)] for share in (0.5, 0.99)) if gaps else (0.0, 0.0)
    costs = " ".join(f"{name}_us={1e6 * spent[name] / num_tokens:.1f}" for name in pids)
    return (
        f"tokens: through={options.through} streams={options.streams} rate={options.rate} stops={options.stops} "
        f"interval={options.stream_interval} tokens_per_s={num_tokens / elapsed_s:.0f} {costs} "
        f"router_cores={spent['router'] / elapsed_s:.2f} "
        f"tokens_per_event={num_tokens / max(1, len(gaps)):.2f} gap_p50_ms={p50:.1f} gap_p99_ms={p99:.1f} "
        f"gap_max_ms={1000 * max(gaps, default=0.0):.1f} gap_mean_ms={1000 * statistics.fmean(gaps or [0.0]):.1f}"
    )


async def _until(is_true: Callable[[], bool], reading: asyncio.Task[None]) -> None:
    """Waits for a condition on what is read. Raises the reader's error."""
    while not is_true():
        await asyncio.sleep(0.1)
        if reading.done():
            reading.result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inflight.bench.tokens.main", description=__doc__)
    parser.add_argument("--through", choices=READERS, default="router", help="what reads the streams")
    parser.add_argument("--streams", type=int, default=512, help="concurrent streams; default %(default)s")
    parser.add_argument("--rate", type=float, default=50_000, help="tokens per second of all; default %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured time; default %(default)s")
    parser.add_argument("--stops", type=int, default=0, help="stop strings of each request; default %(default)s")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens per event; default %(default)s")
    parser.add_argument("--router-args", default="", help="further flags of the router")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="name of the default model")
    parser.add_argument("--pause", action="store_true", help="print the process ids before the measurement")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints a line."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        print(asyncio.run(measure(options, Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
