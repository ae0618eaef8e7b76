"""The state of the loop of pod costs, and the port on which probes read it.

`/health` is 200 while rounds end in time, `/ready` while the last round succeeded; otherwise 503 with the reason.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A round waits for a router and the API server, each with a timeout of its own.
ROUND_S = 60.0


class LoopHealth:
    """When the last round ended, and its error. Any thread may call it."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = interval_s + ROUND_S
        self._clock = clock
        self._last: tuple[float, str] = (clock(), "no round has ended")

    def round_ended(self, error: str) -> None:
        """Notes the end of a round; `error` is empty if it succeeded."""
        self._last = (self._clock(), error)

    def reason(self, path: str) -> str | None:
        """Returns why a probe of the path fails, empty if it does not; None for an unknown path."""
        ended_at, error = self._last
        since_s = self._clock() - ended_at
        late = f"the last round ended {since_s:.0f} s ago" if since_s > self._limit_s else ""
        return {"/health": late, "/ready": late or error}.get(path)


@contextmanager
def served(health: LoopHealth, port: socket.socket) -> Iterator[None]:
    """Answers probes on a bound socket during the block, and closes it."""

    class Probes(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            reason = health.reason(self.path)
            status = (
                HTTPStatus.NOT_FOUND if reason is None else HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
            )
            content = f"{reason or status.phrase}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing: probes come every few seconds."""

    server = ThreadingHTTPServer(port.getsockname(), Probes, bind_and_activate=False)
    server.socket.close()
    server.socket = port
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever, name="probes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
