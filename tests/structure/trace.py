"""The router's modules that one `Generate` call enters until its `Submit` is written, measured by running the call.

A check on the lists of `request_path`, which people write; it counts telemetry, which they leave out. Tasks that the
call starts belong to it, because they inherit its context; the router's permanent loops do not. As a program it traces
the tree in the current folder, with the Redis at `argv[1]`, and prints the modules in the order of first entry. It
imports only what trees of any age have.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from inflight.v1 import inference_pb2, types_pb2
from tests.cluster import run_cluster

# The folder, and the link to it by which the router is imported.
ROUTER = (f"{Path.cwd() / 'router'}/", f"{Path.cwd() / 'inflight' / 'router'}/")
BEGIN = "InferenceService.Generate"
END = "ExecutorLink.submit"


class Trace:
    """The modules entered so far, as a profile function."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self._is_inside = contextvars.ContextVar("is_inside", default=False)
        self._has_ended = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Takes one event of the interpreter."""
        file = frame.f_code.co_filename
        if event != "call" or self._has_ended or not file.startswith(ROUTER):
            return
        name = frame.f_code.co_qualname
        if name == BEGIN:
            self._is_inside.set(True)
        if not self._is_inside.get():
            return
        within = file.partition(f"{Path.cwd()}/")[2].removeprefix("inflight/")
        module = within.removesuffix(".py").replace("/", ".")
        if module not in self.modules:
            self.modules.append(module)
        self._has_ended = name == END


async def trace(redis_url: str) -> list[str]:
    """The modules that one request for text enters."""
    request = inference_pb2.GenerateRequest(
        text="w1 w2 w3",
        stopping=types_pb2.StoppingParams(max_tokens=3, ignore_eos=True),
    )
    found = Trace()
    async with run_cluster(redis_url, "traced") as cluster:
        sys.setprofile(found)
        try:
            async for _ in cluster.routers[0].stub.Generate(request):
                pass
        finally:
            sys.setprofile(None)
    return found.modules


if __name__ == "__main__":
    print(*asyncio.run(trace(sys.argv[1])), sep="\n")
