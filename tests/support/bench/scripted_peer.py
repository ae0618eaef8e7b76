"""An engine for tests of the drivers' protocol: each step brings one token to everyone on a seat.

Run as a process it is what a peer is. Its variant says how it goes wrong: `absent`, `noisy`, `dies`.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections import deque
from contextlib import suppress

from inflight.bench.peers.driver import CannotRun, Request, Setup, TokenBatch, serve


class ScriptedEngine:
    """Seats by arrival."""

    def __init__(self, setup: Setup) -> None:
        if setup.variant == "absent":
            raise CannotRun("this machine has no such engine")
        if setup.variant == "noisy":
            print("the engine greets its users on stdout")
            os.system("echo and so do its children")
        self._variant = setup.variant
        self._seats = setup.seats
        self._waiting: deque[Request] = deque()
        self._owed: dict[int, int] = {}
        self.most_held = 0
        self._num_steps = 0

    def describe(self) -> dict[str, str]:
        """What runs."""
        return {"engine": "scripted 1.0"}

    def add(self, request: Request) -> None:
        """Takes a request."""
        self._waiting.append(request)
        self.most_held = max(self.most_held, len(self._waiting) + len(self._owed))

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """One step."""
        if self._variant == "dies" and self._num_steps == 2:
            _end_output()
            time.sleep(0.2)  # the interpreter's way to its end, on a busy machine
            sys.exit("the engine ran out of luck")
        while self._waiting and len(self._owed) < self._seats:
            request = self._waiting.popleft()
            self._owed[request.id] = request.output_tokens
        self._num_steps += 1
        tokens = [(request_id, 1) for request_id in self._owed]
        self._owed = {request_id: owed - 1 for request_id, owed in self._owed.items() if owed > 1}
        return [TokenBatch(time.monotonic(), tokens)]

    def figures(self) -> dict[str, float]:
        """Steps of the run."""
        num_steps, self._num_steps = self._num_steps, 0
        return {"num_steps": num_steps, "device_busy_fraction": 0.5}


def _end_output() -> None:
    """Closes the pipe of the protocol, as the end of the interpreter may do before it writes the last words."""
    for descriptor in range(sys.stderr.fileno() + 1, 16):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.dup2(sys.stderr.fileno(), descriptor)


if __name__ == "__main__":
    sys.exit(serve(ScriptedEngine))
