"""A router's link to an executor in virtual time: the real one, with a session in place of the stream of gRPC."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, cast

from inflight.bench.simulation.invariants import InvariantViolation
from inflight.bench.simulation.session import Frame, Session
from inflight.bench.timeline.virtual_loop import VirtualLoop
from inflight.executor.scheduler.sequence import FinishReason
from inflight.executor.serving.router_session import REJECT_REASON_PROTO
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
        self._slots: dict[tuple[str, int], int] = {}
        self._slot_numbers = itertools.count()
        self._frame_numbers = itertools.count(1)

    def cut(self) -> None:
        """The session ended."""
        self._writer.cancel()
        self._break()

    def take_frame(self, frame: Frame) -> None:
        """Takes in what a turn of the executor's loop brought."""
        response = executor_pb2.ServeResponse(generation=self.description.generation)
        for request_id, attempt in frame.accepted:
            slot = self._slots[request_id, attempt] = next(self._slot_numbers)
            response.accepted.add(request_id=request_id, attempt=attempt, slots=[slot])
        for request_id, attempt, refusal in frame.rejected:
            why = executor_pb2.REJECT_REASON_NOT_HELD if refusal is None else REJECT_REASON_PROTO[refusal]
            response.rejected.add(request_id=request_id, attempt=attempt, reason=why)
        step = response.step
        step.frame = next(self._frame_numbers)
        for request_id, attempt, cached_tokens in frame.started:
            step.started.add(slot=self._slots[request_id, attempt], cached_tokens=cached_tokens)
        for request_id, attempt, offset, token_id in frame.tokens:
            step.slots.append(self._slots[request_id, attempt])
            step.offsets.append(offset)
            step.token_ids.append(token_id)
        for request_id, attempt, reason in frame.finished:
            error = "failed" if reason is FinishReason.ERROR else ""
            slot = self._slots.pop((request_id, attempt))
            step.finished.add(slot=slot, reason=f"FINISH_REASON_{reason.name}", error=error)
        self.take_in(response)

    def take_report(self, report: executor_pb2.Report) -> None:
        """Takes in how the executor stands."""
        self.take_in(executor_pb2.ServeResponse(generation=self.description.generation, report=report))

    def _mend(self, stream: RequestStream, attempt: int) -> None:
        """Ends the simulation: a session loses no token."""
        raise InvariantViolation(f"{stream.request_id}: token {len(stream.output_ids)} of attempt {attempt} is missing")
