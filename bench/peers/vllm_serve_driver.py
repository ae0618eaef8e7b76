"""A driver of `vllm serve`: a client of its HTTP server, with a stream for each request, as users have it. Runs in
vLLM's own environment.

The client is in this process, as the client of a stack is in that of the benchmark: both use the cores that are shared.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import aiohttp
from vllm import __version__ as vllm_version

from inflight.bench.peers.driver import SERVER_MODULE, CannotRun, Request, Setup, TokenBatch, context_tokens, serve

HOST = "127.0.0.1"
START_TIMEOUT_S = 900.0
PREFIX = b"data: "
END = b"[DONE]"


class VllmServer:
    """`vllm serve` as a child, and streams to it on a thread of their own."""

    def __init__(self, setup: Setup) -> None:
        port = _free_port()
        self._url = f"http://{HOST}:{port}"
        flags = {
            "--host": HOST,
            "--port": port,
            "--served-model-name": "model",
            "--dtype": setup.dtype,
            "--max-num-seqs": setup.seats,
            "--max-model-len": context_tokens(setup),
        }
        words = [str(word) for flag in flags.items() for word in flag]
        self._server = subprocess.Popen(
            [sys.executable, "-m", SERVER_MODULE, "--model", setup.model, *words], stdout=sys.stderr
        )
        atexit.register(self._server.terminate)
        self._wait_until_ready()
        self._came: queue.SimpleQueue[TokenBatch | Exception] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._session = asyncio.run_coroutine_threadsafe(_open_session(), self._loop).result()
        self._num_runs = 0

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._server.poll() is not None:
                raise CannotRun(f"vllm serve ended with code {self._server.returncode}")
            try:
                urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
            else:
                return
        raise CannotRun(f"vllm serve was not ready after {START_TIMEOUT_S:.0f} s")

    def describe(self) -> dict[str, str]:
        return {"engine": f"vLLM {vllm_version}", "mode": "vllm serve, compiled, over HTTP"}

    def add(self, request: Request) -> None:
        asyncio.run_coroutine_threadsafe(self._stream(request), self._loop)

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """Returns what has come."""
        batches: list[TokenBatch] = []
        try:
            taken = self._came.get(timeout=wait_s)
            while True:
                if isinstance(taken, Exception):
                    raise taken
                batches.append(taken)
                taken = self._came.get_nowait()
        except queue.Empty:
            return batches

    def figures(self) -> dict[str, float]:
        self._num_runs += 1
        return {}

    async def _stream(self, request: Request) -> None:
        """Reads a stream. Each chunk tells how many tokens there are by then."""
        body = {
            "model": "model",
            "prompt": request.prompt_ids,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            # No run finds the KV of an earlier one, also where their prompts are the same.
            "cache_salt": f"run {self._num_runs}",
        }
        num_tokens = 0
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(PREFIX) or line.startswith(PREFIX + END):
                        continue
                    number = int(json.loads(line[len(PREFIX) :])["usage"]["completion_tokens"])
                    if number > num_tokens:
                        self._came.put(TokenBatch(time.monotonic(), [(request.id, number - num_tokens)]))
                        num_tokens = number
            if num_tokens != request.output_tokens:
                raise CannotRun(f"{num_tokens} tokens came of {request.output_tokens}")
        except Exception as error:
            self._came.put(error)


async def _open_session() -> Any:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
    )


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind((HOST, 0))
        return int(opened.getsockname()[1])


if __name__ == "__main__":
    sys.exit(serve(VllmServer))
