"""A router's link to an executor in virtual time: the real one, with a session in place of the stream of gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from inflight.bench.simulation.invariants import InvariantViolation
from inflight.bench.simulation.session import Session
from inflight.bench.timeline.virtual_loop import VirtualLoop
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.executors.link import ExecutorLink, LinkRegistry
from inflight.router.lifecycle.events import LinkEvent
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2


@dataclass(frozen=True, slots=True)
class _Events:
    """Passes the events of a link to the dispatcher. Implements `inflight.router.executors.link.LinkEvents`."""

    dispatcher: Dispatcher

    def on_request(self, link: ExecutorLink, stream: RequestStream, event: LinkEvent) -> None:
        self.dispatcher.on_request(stream, event)

    def on_report(self, link: ExecutorLink, report: executor_pb2.Report) -> None:
        self.dispatcher.on_report(link, report)

    def on_usage(self, link: ExecutorLink, usage: executor_pb2.UsageReport) -> None:
        self.dispatcher.on_usage(link, usage)

    def on_unlinked(self, link: ExecutorLink, streams: Any) -> None:
        self.dispatcher.on_unlinked(link, streams)


class SimLink(ExecutorLink):
    """The link of one session, which is up from its beginning to its end."""

    def __init__(self, session: Session, dispatcher: Dispatcher, loop: VirtualLoop) -> None:
        executor = session.executor
        super().__init__(executor.executor_id, session.router.router_id, cast(LinkRegistry, None))
        self.session = session
        self.description = executor.describe()
        dispatcher.on_linked(self)
        self.come_up(_Events(dispatcher))
        self._writer = loop.start(self._write(cast(Any, session)))

    def cut(self) -> None:
        """The session ended."""
        self._writer.cancel()
        self._break()

    def _mend(self, stream: RequestStream, attempt: int) -> None:
        """Ends the simulation: a session loses no token."""
        raise InvariantViolation(f"{stream.request_id}: token {len(stream.output_ids)} of attempt {attempt} is missing")
