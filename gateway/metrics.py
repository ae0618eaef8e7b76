"""Metrics of the gateway; docs/metrics.md has their names and meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from inflight.common.http.metrics_page import new_registry

# From an answer of one token to a long one on a slow machine.
BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


class Metrics:
    """Counts requests and streams."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self._requests = Counter(
            "inflight_gateway_requests", "HTTP requests that ended.", ("route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "inflight_gateway_request_seconds",
            "Time from the arrival of a request to the last byte of the response.",
            ("route",),
            registry=self.registry,
            buckets=BUCKETS_S,
        )
        self._waiting = Gauge(
            "inflight_gateway_requests_waiting", "Requests at routers without output yet.", registry=self.registry
        )
        self._running = Gauge(
            "inflight_gateway_requests_running", "Requests at routers with output.", registry=self.registry
        )
        self._streams = Gauge("inflight_gateway_streams", "Responses that are being streamed.", registry=self.registry)

        self._batches = Counter(
            "inflight_gateway_batches", "Batches that this gateway has ended.", ("status",), registry=self.registry
        )
        self._lines = Counter(
            "inflight_gateway_batch_lines",
            "Requests of batches whose results this gateway has written.",
            ("result",),
            registry=self.registry,
        )
        self._running_lines = Gauge(
            "inflight_gateway_batch_lines_running", "Requests of batches at routers.", registry=self.registry
        )

    def ended(self, route: str, status: int, seconds: float) -> None:
        """Counts an HTTP request that has ended."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    @contextmanager
    def generating(self) -> Iterator[Callable[[], None]]:
        """Counts a request to the routers: as waiting, and from the call of the yielded function on as running."""
        counted = self._waiting

        def begin() -> None:
            nonlocal counted
            if counted is self._waiting:
                counted.dec()
                counted = self._running
                counted.inc()

        counted.inc()
        try:
            yield begin
        finally:
            counted.dec()

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Counts an answer while it is being streamed."""
        with self._streams.track_inprogress():
            yield

    def batch_ended(self, status: str) -> None:
        """Counts a batch that has ended."""
        self._batches.labels(status).inc()

    def batch_lines_ended(self, result: str, number: int) -> None:
        """Counts lines of batches that have a result: completed, failed, or why they were not run."""
        if number:
            self._lines.labels(result).inc(number)

    @contextmanager
    def batch_line_running(self) -> Iterator[None]:
        """Counts a line while its request is at routers."""
        with self._running_lines.track_inprogress():
            yield
