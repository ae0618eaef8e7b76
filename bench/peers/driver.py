"""The common part of all engine drivers: the protocol on stdin and stdout, and the loop that sends and notes times.

Standard library only: drivers run in the engines' own environments. One JSON object per line.

    in   {"setup": {...}}                                     once; fields of `Setup`
    out  {"ready": {"engine": "vllm 0.32.0", ...}}            what runs, in words; or {"failed": "why"} and the end
    in   {"run": {"requests": 48, "concurrency": null}}       then that many lines of `Request`, then {"go": true}
    out  {"sent": [[id, at_s], …]}                            requests given to the engine
    out  {"at_s": 0.123, "tokens": [[id, number], …]}         tokens that came together
    out  {"done": {"at_s": 12.3, "figures": {…}}}             then the next run, or the end of stdin

Times are seconds of this process's monotonic clock since it read "go". The engine's own prints go to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

# What `vllm serve` runs. That command asks for the package's metadata, which builds for CPUs have under another name.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
CONTEXT_STEP_TOKENS = 2048


class CannotRun(Exception):
    """The engine cannot do what the setup asks for. The text says why."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is to be. `model` is a Hugging Face folder, `cache_folder` keeps what is made of it.

    `arguments` are flags of our own executor.
    """

    model: str
    cache_folder: str
    seats: int
    max_request_tokens: int
    num_threads: int
    dtype: str = "bfloat16"
    variant: str = ""
    arguments: tuple[str, ...] = ()


def context_tokens(setup: Setup) -> int:
    """Room for the longest request, in steps: vLLM compiles again for each length, which takes a minute or more."""
    wanted = -(-setup.max_request_tokens // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS
    config = json.loads((Path(setup.model) / "config.json").read_text())
    return min(wanted, int(config.get("max_position_embeddings", wanted)))


@dataclass(frozen=True, slots=True)
class Request:
    """One request: greedy, end-of-sequence ignored, exactly `output_tokens` come back."""

    id: int
    prompt_ids: list[int]
    output_tokens: int
    arrival_s: float


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens that came together at `at`, a reading of `time.monotonic()`: request id and number."""

    at: float
    tokens: list[tuple[int, int]]


class DrivenEngine(Protocol):
    """An engine behind its driver."""

    def describe(self) -> dict[str, str]:
        """What runs, in words: `engine` with its version, and settings worth knowing."""
        ...

    def add(self, request: Request) -> None:
        """Takes a request."""
        ...

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """Works on what it holds until something came.

        An engine that runs on a thread of its own waits for it at most `wait_s`, then returns nothing.
        """
        ...

    def figures(self) -> dict[str, float]:
        """What the engine knows of the run that has just ended; `num_steps` for one."""
        ...


@dataclass(slots=True)
class _Run:
    """The requests of a run that are not sent yet, and how many tokens each sent one still owes."""

    waiting: deque[Request]
    concurrency: int | None
    owed: dict[int, int] = field(default_factory=dict)

    def next_to_send(self, now_s: float) -> Request | None:
        """Returns a request that is due: its time has come, and a place is free where their number is bounded."""
        if not self.waiting or (self.concurrency is not None and len(self.owed) >= self.concurrency):
            return None
        return self.waiting.popleft() if self.waiting[0].arrival_s <= now_s else None

    def wait_s(self, now_s: float) -> float | None:
        """Until the next arrival; None if only an answer can bring one."""
        if not self.waiting or (self.concurrency is not None and len(self.owed) >= self.concurrency):
            return None
        return max(0.0, self.waiting[0].arrival_s - now_s)

    def take(self, tokens: Sequence[tuple[int, int]]) -> None:
        """Notes tokens that came; a request that has all of its tokens is done."""
        for request_id, number in tokens:
            self.owed[request_id] -= number
            if self.owed[request_id] <= 0:
                del self.owed[request_id]


def serve(make_engine: Callable[[Setup], DrivenEngine]) -> int:
    """Runs a driver from its setup to the end of stdin; returns the exit code."""
    out = _own_stdout()
    lines = (json.loads(line) for line in sys.stdin if line.strip())
    try:
        engine = make_engine(Setup(**next(lines)["setup"]))
    except (CannotRun, ImportError, OSError, RuntimeError, ValueError) as error:
        _write(out, {"failed": f"{type(error).__name__}: {error}"})
        return 1
    # What the engine has built lives as long as it does: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    _write(out, {"ready": engine.describe()})
    for command in lines:
        requests = [Request(**next(lines)) for _ in range(command["run"]["requests"])]
        assert next(lines)["go"]
        _write(out, {"done": drive(engine, requests, command["run"]["concurrency"], lambda line: _write(out, line))})
    return 0


def drive(
    engine: DrivenEngine,
    requests: Sequence[Request],
    concurrency: int | None,
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Sends every request at its time, reports tokens as they come, and returns the end of the run."""
    run = _Run(deque(sorted(requests, key=lambda request: request.arrival_s)), concurrency)
    start = time.monotonic()
    last_s = 0.0
    while run.waiting or run.owed:
        _send_due(engine, run, start, report)
        wait_s = run.wait_s(time.monotonic() - start)
        if not run.owed:
            time.sleep(wait_s or 0.0)
            continue
        for batch in engine.advance(wait_s):
            last_s = batch.at - start
            run.take(batch.tokens)
            report({"at_s": round(last_s, 6), "tokens": batch.tokens})
    return {"at_s": round(last_s, 6), "figures": engine.figures()}


def _send_due(engine: DrivenEngine, run: _Run, start: float, report: Callable[[dict[str, Any]], None]) -> None:
    """An arrival during a step counts from its arrival; with bounded concurrency it counts from when it is sent."""
    sent: list[tuple[int, float]] = []
    while (request := run.next_to_send(now_s := time.monotonic() - start)) is not None:
        run.owed[request.id] = request.output_tokens
        engine.add(request)
        sent.append((request.id, round(request.arrival_s if run.concurrency is None else now_s, 6)))
    if sent:
        report({"sent": sent})


def _own_stdout() -> TextIO:
    """Keeps stdout for the protocol: whatever the engine or its children print goes to stderr."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return kept


def _write(out: TextIO, line: dict[str, Any]) -> None:
    out.write(json.dumps(line, separators=(",", ":")) + "\n")
    out.flush()
