"""The files of the router that a request passes on its way to an executor: few, and mostly one after the other.

A request of the default client is traced from its stream of a shared call to its `Submit` at the executor's link. What
the tasks that it starts call belongs to it, because they inherit its context. All files count in which it calls a
function. For the order only those functions count that pass it on to another file, each at its first call. The others
are read where they are called. `python -m tests.integration.test_request_path` prints the path.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from inflight.local.redis_server import PrivateRedis
from inflight.v1 import inference_pb2, types_pb2
from tests.support.stack.cluster import run_cluster

REPOSITORY = Path(__file__).parents[2]
# The folder, and the link to it by which the router is imported.
ROUTER = (f"{REPOSITORY}/inflight/router/", f"{REPOSITORY}/router/")
BEGIN, END = "ManyCall._run", "ExecutorLink.submit"
# What only observes requests, and what wires the router's parts, whose closures forward.
LEFT_OUT = ("telemetry/", "app.py")

NUM_TRACED = 3
MAX_FILES = 25
MAX_RETURNS = 10


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the router, by its file below the router's folder and its qualified name."""

    file: str
    name: str


@dataclass(slots=True)
class Trace:
    """The functions that a request calls, in the order of their first calls, each with the files that it calls in turn.
    A profile function."""

    calls: dict[Function, set[str]] = field(default_factory=dict)
    _is_inside: contextvars.ContextVar[bool] = field(
        default_factory=lambda: contextvars.ContextVar("is_inside", default=False)
    )
    _has_ended: bool = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Takes one event of the interpreter."""
        function = function_of(frame)
        if event != "call" or self._has_ended or function is None:
            return
        if function.name == BEGIN:
            self._is_inside.set(True)
        if not self._is_inside.get():
            return
        self.calls.setdefault(function, set())
        caller = frame.f_back
        while caller is not None and function_of(caller) is None:
            caller = caller.f_back
        if caller is not None and (calling := function_of(caller)) in self.calls:
            self.calls[calling].add(function.file)
        self._has_ended = function.name == END

    @property
    def files(self) -> set[str]:
        """The files that the request enters."""
        return {function.file for function in self.calls}

    @property
    def visits(self) -> list[tuple[str, list[str]]]:
        """The files in the order in which the request is passed on, with the functions that pass it on."""
        passing = [
            function for function, called in self.calls.items() if called - {function.file} or function.name == END
        ]
        groups = groupby(passing, key=lambda function: function.file)
        return [(file, [function.name for function in group]) for file, group in groups]

    @property
    def num_returns(self) -> int:
        """How often the request is passed back to a file that it had left."""
        files = [file for file, _ in self.visits]
        return len(files) - len(set(files))


def function_of(frame: FrameType) -> Function | None:
    """Returns the router's function that a frame runs, if it counts."""
    path = frame.f_code.co_filename
    if not path.startswith(ROUTER):
        return None
    file = path.partition("/router/")[2]
    return None if file.startswith(LEFT_OUT) else Function(file, frame.f_code.co_qualname)


async def traced(redis_url: str) -> Trace:
    """Returns the trace of one of several requests for text, the one in the fewest files: where the machine stands
    still for seconds, a reply says that a lease has lapsed, which other files handle."""
    traces = [Trace() for _ in range(NUM_TRACED)]
    async with run_cluster(redis_url, "traced") as cluster:
        for number, trace in enumerate(traces):
            request = inference_pb2.GenerateRequest(
                text="t1 t2 t3",
                stopping=types_pb2.StoppingParams(max_tokens=3, ignore_eos=True),
                idempotency_key=f"the default client sends one {number}",
            )
            call = cluster.routers[0].stub.GenerateMany()
            sys.setprofile(trace)
            try:
                await call.write(inference_pb2.GenerateManyRequest(stream=1, generate=request))
                await call.done_writing()
                async for _ in call:
                    pass
            finally:
                sys.setprofile(None)
    return min(traces, key=lambda trace: (len(trace.files), trace.num_returns))


async def test_request_passes_few_files_mostly_one_after_the_other(redis_url: str) -> None:
    trace = await traced(redis_url)
    assert {"api/generate_many.py", "ledger/redis_ledger.py", "executors/link.py"} <= trace.files
    assert len(trace.files) <= MAX_FILES, sorted(trace.files)
    assert trace.num_returns <= MAX_RETURNS, trace.visits


def main() -> None:
    """Prints the path, a line for each time that it enters a file, and the files beside it."""
    with tempfile.TemporaryDirectory() as folder, PrivateRedis.start(Path(folder) / "redis.log") as redis:
        trace = asyncio.run(traced(redis.url))
    seen: set[str] = set()
    for file, names in trace.visits:
        print("returns to" if file in seen else "          ", file, ", ".join(names))
        seen.add(file)
    print("also calls", ", ".join(sorted(trace.files - seen)))
    print(f"{len(trace.files)} files, {trace.num_returns} returns to a file that the path had left")


if __name__ == "__main__":
    main()
