"""A router: what clients and executors tell it. One object is one start of it; a restart is another with a new id."""

from __future__ import annotations

from collections.abc import Mapping

from bench.simulation.session import Frame, Session
from bench.simulation.sim_dispatch import Dispatch
from bench.simulation.sim_stream import RouterShape, SimStream
from bench.simulation.store_link import StoreLink
from bench.simulation.timeline import US_PER_MS, Process, Timeline
from bench.simulation.traffic import SimRequest
from bench.simulation.witness import Fate, Witness
from executor.scheduler.admission import Refusal
from executor.scheduler.sequence import FinishReason
from router.store.types import Ending, ExecutorReport

# As `StoreSettings`, without their jitter: routers begin at different times.
RENEW_US, REAP_US = 1_500 * US_PER_MS, 1_000 * US_PER_MS
# As `router.dispatch.waiting_audit`'s.
LOOK_US = 1_500 * US_PER_MS
FATES = {
    FinishReason.STOP_TOKEN: Fate.COMPLETED,
    FinishReason.STOP_STRING: Fate.COMPLETED,
    FinishReason.LENGTH: Fate.COMPLETED,
    FinishReason.CANCELLED: Fate.CANCELLED,
    FinishReason.DEADLINE: Fate.EXPIRED,
    FinishReason.ERROR: Fate.FAILED,
}
BY_ITSELF = (FinishReason.STOP_TOKEN, FinishReason.LENGTH)


class SimRouter:
    """One start of a router."""

    def __init__(
        self, router_id: str, shape: RouterShape, link: StoreLink, timeline: Timeline, witness: Witness
    ) -> None:
        self.router_id = router_id
        self.process = Process(timeline)
        self.dispatch = Dispatch(router_id, shape, link, timeline, self.process, witness)
        self._timeline = timeline
        self._witness = witness

    @property
    def streams(self) -> Mapping[str, SimStream]:
        """The requests that it serves."""
        return self.dispatch.streams

    def start(self, phase_us: int) -> None:
        """Renews and reaps from now on; `phase_us` keeps routers apart."""
        self.dispatch.ledger.renew()
        self._timeline.after(phase_us % RENEW_US, self.process.run, self._renew)
        self._timeline.after(phase_us % REAP_US, self.process.run, self._reap)
        self._timeline.after(phase_us % LOOK_US, self.process.run, self._look_for_forgotten)

    def die(self) -> None:
        """It is gone, and its clients see it."""
        self.process.kill()
        self.dispatch.ledger.close()
        for stream in self.dispatch.streams.values():
            self.dispatch.end(stream, Fate.ROUTER_LOST)

    def _renew(self) -> None:
        self._timeline.after(RENEW_US, self.process.run, self._renew)
        self.dispatch.ledger.renew()

    def _reap(self) -> None:
        self._timeline.after(REAP_US, self.process.run, self._reap)
        self.dispatch.ledger.reap()

    def _look_for_forgotten(self) -> None:
        self._timeline.after(LOOK_US, self.process.run, self._look_for_forgotten)
        self.dispatch.look_for_forgotten()

    # What clients ask for.

    def arrive(self, request: SimRequest) -> None:
        """A client's request."""
        stream = SimStream(request, self._witness.submitted(request, self.router_id, self._timeline.now_us), [])
        deadline_ms = request.ledger_deadline_ms
        if deadline_ms is not None:
            # The relay keeps the exact deadline; the ledger drops what waits by itself.
            self._timeline.after(deadline_ms * US_PER_MS, self.process.run, self._first_token_is_late, stream)
        if request.gone_after_us is not None:
            self._timeline.after(request.gone_after_us, self.process.run, self._client_gone, stream)
        self.dispatch.submit(stream)

    def _client_gone(self, stream: SimStream) -> None:
        if not stream.has_ended:
            stream.record.may_be_cancelled = True
            self.dispatch.end(stream, Fate.CANCELLED, "client gone")
            self.dispatch.release(stream)

    def _first_token_is_late(self, stream: SimStream) -> None:
        if not stream.has_ended and not stream.output:
            self.dispatch.end(stream, Fate.EXPIRED, "by the router")
            self.dispatch.release(stream)

    # What executors tell.

    def on_linked(self, session: Session) -> None:
        """An executor can be used."""
        self.dispatch.on_linked(session)

    def on_unlinked(self, session: Session) -> None:
        """A stream broke."""
        self.dispatch.on_unlinked(session)

    def on_report(self, session: Session, report: ExecutorReport) -> None:
        """An executor says how it stands."""
        self.dispatch.writer.report(report)

    def on_frame(self, session: Session, frame: Frame) -> None:
        """What a turn of an executor's loop brought. See `ExecutorLink._receive`."""
        offered = self.dispatch.offered[session]
        for request_id, attempt, refusal in frame.rejected:
            stream = offered.pop((request_id, attempt), None)
            if stream is not None and stream.is_current(attempt):
                self._rejected(stream, attempt, refusal)
        for request_id, attempt, cached_tokens in frame.started:
            stream = offered[request_id, attempt]
            if stream.is_current(attempt) and not stream.has_ended:
                stream.cached_tokens = cached_tokens
                stream.record.cached_tokens += cached_tokens
                self._witness.boarded(stream.record, self._timeline.now_us)
        for request_id, attempt, offset, token_id in frame.tokens:
            stream = offered[request_id, attempt]
            if stream.is_current(attempt):
                self._token(stream, offset, token_id)
        for request_id, attempt, reason in frame.finished:
            self._finished(offered.pop((request_id, attempt)), attempt, reason)

    def _rejected(self, stream: SimStream, attempt: int, refusal: Refusal) -> None:
        if refusal is Refusal.INVALID:
            self.dispatch.end(stream, Fate.FAILED, "refused by the executor")
            self.dispatch.writer.settle(Ending(stream.request.request_id, attempt))
            self.dispatch.forget(stream)
        else:
            self.dispatch.void(stream, was_rejected=True)

    def _token(self, stream: SimStream, offset: int, token_id: int) -> None:
        expected = len(stream.output)
        missing = f"{stream.request.request_id}: token {expected} is missing before {offset}"
        self._witness.require(offset <= expected, missing)
        if offset == expected:
            stream.output.append(token_id)
            if stream.is_suspect:
                stream.is_suspect = False
                self.dispatch.ledger.absolve(stream.request.request_id, stream.attempt)
            if not stream.has_ended:
                self._witness.delivered(stream.record, offset, token_id, self._timeline.now_us)

    def _finished(self, stream: SimStream, attempt: int, reason: FinishReason) -> None:
        is_current = stream.is_current(attempt)
        if is_current and reason is FinishReason.CANCELLED and not (stream.is_cancelled or stream.has_ended):
            self.dispatch.void(stream)  # the ledger had it cancelled, which knows of another placement
            return
        if is_current and reason is FinishReason.PREEMPTED:
            self.dispatch.void(stream, was_preempted=True)
            return
        if is_current:
            self.dispatch.end(stream, FATES[reason], reason.value)
        self.dispatch.writer.settle(
            Ending(
                stream.request.request_id,
                attempt,
                computed_tokens=len(stream.request.prompt) - stream.cached_tokens,
                output_tokens=len(stream.output),
                by_itself=is_current and reason in BY_ITSELF,
            )
        )
        if is_current:
            self.dispatch.forget(stream)
