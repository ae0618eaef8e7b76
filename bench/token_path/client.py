"""The client process of the token path's measurement: streams of one event loop through the client library.

    python client.py ADDRESS NUM_STREAMS NUM_TOKENS STREAM_INTERVAL [shared]

Prints `Mark` as a line of JSON when every stream has its first tokens and again when the first stream ends: in between
all streams run. Imports only the library, so that it runs in the tree of an older commit.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from typing import Any

from inflight import AsyncClient

# Tokens of every stream before the first mark.
BEGUN_TOKENS = 8


class Marks:
    """Counts tokens and events, and prints the two marks."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._num_begun = 0
        self._has_ended = False
        self.num_tokens = 0
        self.num_events = 0

    def begun(self) -> None:
        """A stream has its first tokens."""
        self._num_begun += 1
        if self._num_begun == self._num_streams:
            self._print()

    def ended(self) -> None:
        """A stream has ended."""
        if not self._has_ended:
            self._has_ended = True
            self._print()

    def _print(self) -> None:
        counts = {"tokens": self.num_tokens, "events": self.num_events, "cpu_s": time.process_time()}
        print(json.dumps(counts), flush=True)


async def read_stream(client: AsyncClient, number: int, num_tokens: int, interval: int, marks: Marks) -> None:
    """Reads one stream to its end."""
    options: dict[str, Any] = {} if interval == 1 else {"stream_interval": interval}
    num_own = 0
    stream = client.generate(f"{number}: once upon a time", max_tokens=num_tokens, ignore_eos=True, **options)
    async for delta in stream:
        before, num_own = num_own, num_own + delta.num_tokens
        marks.num_tokens += delta.num_tokens
        marks.num_events += 1
        if before < BEGUN_TOKENS <= num_own:
            marks.begun()
    marks.ended()
    if num_own != num_tokens:
        raise SystemExit(f"stream {number} has {num_own} tokens instead of {num_tokens}")


async def main(address: str, num_streams: int, num_tokens: int, interval: int, *, is_shared: bool) -> None:
    """Runs all streams at once, on shared calls if `is_shared`."""
    marks = Marks(num_streams)
    # Clients of older trees do not know the keyword.
    knows = "share_calls" in inspect.signature(AsyncClient).parameters
    options: dict[str, Any] = {"share_calls": is_shared} if knows or is_shared else {}
    async with AsyncClient(address, **options) as client, asyncio.TaskGroup() as group:
        for number in range(num_streams):
            group.create_task(read_stream(client, number, num_tokens, interval, marks))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5]), is_shared=sys.argv[5:] == ["shared"]))
