"""Table of the placements on this executor, with the router that reads each of them.

A placement is held from its submit until its end. Its reader is one session or none:

| what happens            | reader becomes | the sequence                                                 |
| ----------------------- | -------------- | ------------------------------------------------------------ |
| submit                  | the submitter  | is offered to the engine                                     |
| its stream breaks       | none           | goes on as an orphan for `orphan_grace_s`, then is cancelled |
| another router attaches | that router    | goes on; the previous reader is told, and gets nothing more  |
| a newer attempt comes   | unchanged      | is ended by the engine; no router can attach to it any more  |
| it is handed back       |                | has ended for its router, whatever the engine does with it   |

Invariants: a router that attaches gets every token from the offset it asked for, once and in order. Tokens without a
reader are kept only in the sequence. Engine output about a sequence that was handed back is dropped. All calls come
from the event loop's thread. The engine's thread only appends to a sequence's tokens and to the log probabilities of
its prompt, of which the first `num_published` and `num_scored` have been published here. A router that attaches gets
all of the latter again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from inflight.executor.engine.output import EngineOutput, ReportedSequence
from inflight.executor.scheduler.admission import Refusal
from inflight.executor.scheduler.seat_view import SequencePhase
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, ScoredRows, Sequence
from inflight.executor.serving.finished import Ended, EndedSequences, Placed, output_array
from inflight.executor.serving.router_session import REJECT_REASON_PROTO, Session
from inflight.executor.serving.tracing import SequenceTrace
from inflight.v1 import executor_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """How long, in seconds, sequences without a reader are kept for another router: running ones and ended ones."""

    orphan_grace_s: float = 15.0
    retain_ended_s: float = 60.0


@dataclass(slots=True, eq=False)
class PlacedSequence:
    """A placement that waits or runs. `attaching` are the attaches that wait for the engine to accept it, in their
    order: the router and the offset that it wants. A router gets an answer to each of its attaches."""

    sequence: Sequence
    placed: Placed
    num_published: int
    reader: Session | None
    num_scored: int = 0
    is_accepted: bool = False
    has_started: bool = False
    is_preempted: bool = False
    cached_tokens: int = 0
    orphaned_s: float = 0.0
    attaching: list[tuple[Session, int]] = field(default_factory=list)
    trace: SequenceTrace | None = None

    def output(self, offset: int) -> list[int]:
        """Returns the output tokens `[offset, num_published)`."""
        num_prompt_tokens = self.sequence.num_prompt_tokens
        return self.sequence.token_ids[num_prompt_tokens + offset : num_prompt_tokens + self.num_published]

    def end(self, event: FinishEvent, now_s: float) -> Ended:
        """Returns the record to keep after the end."""
        return Ended(
            placed=self.placed,
            output_ids=output_array(self.output(0)),
            started=self.has_started,
            cached_tokens=self.cached_tokens,
            reason=event.reason,
            stop_token_id=event.stop_token_id,
            error=event.error,
            ended_s=now_s,
            logprobs=self.sequence.logprobs,
            prompt_logprobs=self.sequence.prompt_logprobs[: self.num_scored],
            constraint_unfinished=event.constraint_unfinished,
            pooled=event.pooled,
            used=self.sequence.used,
        )


class PlacementTable:
    """The placements of this executor. `cancel(request_id, attempt, reason)` asks the engine to end one. `clock` is in
    seconds. `trace` makes the spans of a placement whose request is traced."""

    def __init__(
        self,
        retention: RetentionPolicy,
        cancel: Callable[[str, int, FinishReason], None],
        clock: Callable[[], float],
        ended: EndedSequences | None = None,
        trace: Callable[[executor_pb2.Submit], SequenceTrace | None] = lambda submit: None,
    ) -> None:
        self._retention = retention
        self._cancel = cancel
        self._clock = clock
        self._trace = trace
        self._held: dict[Sequence, PlacedSequence] = {}
        # The newest attempt of each request, which is the one that can be attached to.
        self._newest: dict[str, PlacedSequence] = {}
        # In the order in which their routers left.
        self._orphans: dict[PlacedSequence, None] = {}
        # Handed back and not yet ended by the engine.
        self._handed_back: set[Sequence] = set()
        # How often the engine has become idle. The watchdog counts that as progress.
        self.num_times_idle = 0
        self.ended = ended or EndedSequences(retention.retain_ended_s)

    @property
    def num_held(self) -> int:
        """Placements that have not ended."""
        return len(self._held)

    @property
    def num_orphans(self) -> int:
        """Placements without a reader."""
        return len(self._orphans)

    @property
    def has_work(self) -> bool:
        """Whether the engine has sequences left, placements that were handed back included."""
        return bool(self._held or self._handed_back)

    # Submit and attach.

    def offer(self, sequence: Sequence, submit: executor_pb2.Submit, session: Session) -> bool:
        """Registers a placement that is about to be offered to the engine. Returns False if this attempt or a newer one
        is known here."""
        known = self._newest.get(submit.request_id)
        if known is not None and submit.attempt <= known.sequence.attempt:
            return False
        ended = self.ended.find(submit.request_id)
        if ended is not None and submit.attempt <= ended.placed.submit.attempt:
            return False
        self.ended.forget(submit.request_id)
        placement = PlacedSequence(sequence, self._placed(submit), sequence.num_output_tokens, session)
        placement.trace = self._trace(submit)
        self._held[sequence] = placement
        self._newest[submit.request_id] = placement
        return True

    def _placed(self, submit: executor_pb2.Submit) -> Placed:
        """Copies the submit, because the original keeps its whole frame in memory."""
        submit.ClearField("prior_output_ids")
        kept = executor_pb2.Submit()
        kept.CopyFrom(submit)
        deadline_s = self._clock() + submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None
        return Placed(kept, deadline_s)

    def attach(self, attach: executor_pb2.Attach, session: Session) -> None:
        """Makes a router the reader of a placement from an offset on. The previous reader gets nothing more; if it is
        the same router, it gets a new slot."""
        placement = self._newest.get(attach.request_id)
        if placement is not None and placement.sequence.attempt == attach.attempt:
            if placement.is_accepted:
                self._hand_over(placement, session, attach.offset)
            else:
                placement.attaching.append((session, attach.offset))
            return
        ended = self.ended.find(attach.request_id)
        if ended is not None and ended.placed.submit.attempt == attach.attempt:
            attached = ended.placed.attached(self._clock(), started=ended.started, cached_tokens=ended.cached_tokens)
            session.replay(attached, attach.offset, ended)
            return
        not_held = executor_pb2.REJECT_REASON_NOT_HELD
        session.reject(
            attach.request_id, attach.attempt, not_held, "this attempt neither runs here nor ended here recently"
        )

    def _hand_over(self, placement: PlacedSequence, session: Session, offset: int) -> None:
        if placement.reader is not None:
            placement.reader.detach(placement.sequence)
        self._orphans.pop(placement, None)
        placement.reader = session
        attached = placement.placed.attached(
            self._clock(), started=placement.has_started, cached_tokens=placement.cached_tokens
        )
        session.attach(placement.sequence, attached, offset, placement.output(offset))
        session.score(placement.sequence, 0, placement.num_scored)
        if placement.is_preempted:
            session.preempt(placement.sequence)

    # Engine output.

    def publish(self, output: EngineOutput) -> None:
        """Forwards the output of one engine iteration to the routers."""
        for sequence in output.accepted:
            self._accept(sequence)
        for sequence, refusal in output.rejected:
            self._reject(sequence, refusal)
        for sequence in output.preempted:
            self._preempt(sequence)
        for sequence in output.boarded:
            self._board(sequence)
        for rows in output.scored:
            self._score(rows)
        for sequence, offset, token_id in output.tokens:
            placement = self._held.get(sequence)
            if placement is not None:
                placement.num_published = offset + 1
                if placement.trace is not None:
                    placement.trace.token()
                if placement.reader is not None:
                    placement.reader.token(sequence, offset, token_id)
        for event in output.finished:
            self._finish(event)

    def _accept(self, sequence: Sequence) -> None:
        placement = self._find(sequence)
        if placement is None:
            return
        placement.is_accepted = True
        if placement.reader is not None:
            placement.reader.accept(sequence, placement.placed.submit.stream_interval)
        attaching, placement.attaching = placement.attaching, []
        for session, offset in attaching:
            self._hand_over(placement, session, offset)

    def _reject(self, sequence: Sequence, refusal: Refusal) -> None:
        placement = self._remove(sequence)
        if placement is not None:
            self._report_rejection(placement, REJECT_REASON_PROTO[refusal], refusal.value)

    def _preempt(self, sequence: Sequence) -> None:
        placement = self._find(sequence)
        if placement is None:
            return
        placement.is_preempted = True
        if placement.trace is not None:
            placement.trace.preempt()
        if placement.reader is not None:
            placement.reader.preempt(sequence)

    def _board(self, sequence: Sequence) -> None:
        placement = self._find(sequence)
        if placement is None:
            return
        placement.has_started, placement.is_preempted = True, False
        placement.cached_tokens = sequence.num_cached_tokens
        if placement.trace is not None:
            placement.trace.start(placement.cached_tokens)
        if placement.reader is not None:
            placement.reader.start(sequence)

    def _score(self, rows: ScoredRows) -> None:
        placement = self._held.get(rows.sequence)
        if placement is not None:
            placement.num_scored = rows.end
            if placement.reader is not None:
                placement.reader.score(rows.sequence, rows.start, rows.end)

    def _finish(self, event: FinishEvent) -> None:
        placement = self._remove(event.sequence)
        if placement is not None:
            self._report_end(placement, event)

    def _find(self, sequence: Sequence) -> PlacedSequence | None:
        """Returns the placement of a sequence; None if it was handed back."""
        placement = self._held.get(sequence)
        assert placement is not None or sequence in self._handed_back, f"{sequence.request_id} has no placement"
        return placement

    def _remove(self, sequence: Sequence) -> PlacedSequence | None:
        """Removes a sequence that the engine has ended or refused."""
        placement = self._find(sequence)
        self._held.pop(sequence, None)
        self._handed_back.discard(sequence)
        self.num_times_idle += not self.has_work
        return placement

    def _report_end(self, placement: PlacedSequence, event: FinishEvent) -> None:
        self._orphans.pop(placement, None)
        if placement.trace is not None:
            placement.trace.end(event.reason, event.error)
        if self._take_from_newest(placement):
            self.ended.keep(placement.end(event, self._clock()))
        if placement.reader is not None:
            placement.reader.finish(event)

    def _report_rejection(self, placement: PlacedSequence, reason: executor_pb2.RejectReason, detail: str) -> None:
        self._orphans.pop(placement, None)
        self._take_from_newest(placement)
        if placement.trace is not None:
            placement.trace.refuse(detail)
        request_id, attempt = placement.sequence.request_id, placement.sequence.attempt
        if placement.reader is not None:
            placement.reader.reject(request_id, attempt, reason, detail)
        for session, _ in placement.attaching:
            session.reject(request_id, attempt, executor_pb2.REJECT_REASON_NOT_HELD, f"refused: {detail}")

    def _take_from_newest(self, placement: PlacedSequence) -> bool:
        """Returns False if there is a newer attempt."""
        request_id = placement.sequence.request_id
        if self._newest.get(request_id) is not placement:
            return False
        del self._newest[request_id]
        return True

    # Routers that leave.

    def leave(self, session: Session) -> int:
        """Turns the placements of a router whose stream broke into orphans and returns their number. They are cancelled
        if the router does not know Attach, because its submits lack what another router would need."""
        left = [placement for placement in self._held.values() if placement.reader is session]
        for placement in self._held.values():
            placement.attaching = [one for one in placement.attaching if one[0] is not session]
        for placement in left:
            placement.reader = None
            placement.orphaned_s = self._clock()
            self._orphans[placement] = None
        if not session.knows_attach or self._retention.orphan_grace_s == 0:
            self._cancel_orphans(left)
        return len(left)

    def _cancel_orphans(self, orphans: Iterable[PlacedSequence]) -> None:
        for placement in orphans:
            self._orphans.pop(placement, None)
            self._cancel(placement.sequence.request_id, placement.sequence.attempt, FinishReason.CANCELLED)

    def expire(self) -> float | None:
        """Cancels orphans whose grace period is over and drops expired records. Returns the time of the next expiry."""
        now_s, grace_s = self._clock(), self._retention.orphan_grace_s
        due = [placement for placement in self._orphans if placement.orphaned_s + grace_s <= now_s]
        if due:
            log.info("no router took over %d sequences; they are cancelled", len(due))
        self._cancel_orphans(due)
        self.ended.expire(now_s)
        orphan = next(iter(self._orphans), None)
        dues = (None if orphan is None else orphan.orphaned_s + grace_s, self.ended.next_due_s())
        return min((due_s for due_s in dues if due_s is not None), default=None)

    # Handing back.

    def hand_back_unstarted(self) -> None:
        """Asks the engine to hand back the sequences that have had no seat, including those not accepted yet."""
        for sequence, placement in self._held.items():
            if not placement.has_started:
                self._cancel(sequence.request_id, sequence.attempt, FinishReason.PREEMPTED)

    def hand_back(self, error: str = "") -> int:
        """Hands all placements back to the routers at once, without waiting for the engine. Returns their number.

        Later engine output about them is dropped. `error` goes to those that had a seat, since they may have caused it.
        """
        held, self._held = self._held, {}
        self._handed_back.update(held)
        for sequence, placement in held.items():
            self._cancel(sequence.request_id, sequence.attempt, FinishReason.PREEMPTED)
            if placement.is_accepted:
                blamed = error if placement.has_started else ""
                self._report_end(placement, FinishEvent(sequence, FinishReason.PREEMPTED, error=blamed))
            else:
                self._report_rejection(placement, executor_pb2.REJECT_REASON_DRAINING, "handed back")
        return len(held)

    # Reports.

    def reported(self, held: Iterable[ReportedSequence]) -> list[ReportedSequence]:
        """Returns the sequences to report as held: those of the engine's newest status that were not handed back, and
        those that the engine has not accepted or refused yet, since it does so only between steps."""
        gone = {(sequence.request_id, sequence.attempt) for sequence in self._handed_back}
        known = [one for one in held if (one.request_id, one.attempt) not in gone] if gone else list(held)
        known += [
            ReportedSequence(sequence.request_id, sequence.attempt, sequence.num_reserved_blocks, SequencePhase.STANDBY)
            for sequence, placement in self._held.items()
            if not placement.is_accepted
        ]
        return known
