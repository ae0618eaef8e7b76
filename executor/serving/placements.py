"""Who holds what for whom: each placement here, the router that reads it, and what routers are told of it.

A placement is held from its submit until its end. Its reader is one session or none:

| what happens            | reader becomes | the sequence                                                 |
| ----------------------- | -------------- | ------------------------------------------------------------ |
| submit                  | the submitter  | is offered to the engine                                     |
| its stream breaks       | none           | goes on as an orphan for `orphan_grace_s`, then is cancelled |
| another router attaches | that router    | goes on; who read it before is told so and nothing further   |
| a newer attempt comes   | as it is       | is ended by the engine; nobody can attach to it any more     |
| it is handed back       |                | has ended for its router, whatever the engine does with it   |

Invariants: a router that attaches gets every token from the offset it asked for once and in order. Tokens that nobody
reads collect nowhere but in the sequence. What the engine says of a sequence that was handed back goes to nobody. All
calls come from the event loop's thread; the engine's thread only appends to a sequence's tokens, of which the first
`num_published` are known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from executor.engine.output import EngineOutput, ReportedSequence
from executor.scheduler.admission import Refusal
from executor.scheduler.seat_view import SequencePhase
from executor.scheduler.sequence import FinishEvent, FinishReason, Sequence
from executor.serving.finished import Ended, EndedSequences, Placed, output_array
from executor.serving.router_session import REJECT_REASON_PROTO, Session
from executor.serving.tracing import SequenceTrace
from inflight.v1 import executor_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """How long, in seconds, what nobody reads is kept for a router to come: running, and ended."""

    orphan_grace_s: float = 15.0
    retain_ended_s: float = 60.0


@dataclass(slots=True, eq=False)
class PlacedSequence:
    """A placement that waits or runs. `attaching` are routers that wait for the engine's answer to it, with the offset
    that each wants, in the order in which they asked last."""

    sequence: Sequence
    placed: Placed
    num_published: int
    reader: Session | None
    is_accepted: bool = False
    has_started: bool = False
    is_paused: bool = False
    cached_tokens: int = 0
    orphaned_s: float = 0.0
    attaching: dict[Session, int] = field(default_factory=dict)
    trace: SequenceTrace | None = None

    def output(self, offset: int) -> list[int]:
        """Output tokens `[offset, num_published)`."""
        num_prompt_tokens = self.sequence.num_prompt_tokens
        return self.sequence.token_ids[num_prompt_tokens + offset : num_prompt_tokens + self.num_published]

    def end(self, event: FinishEvent, now_s: float) -> Ended:
        """What is left of it."""
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
        )


class PlacementTable:
    """The placements here. `cancel(request_id, attempt, reason)` asks the engine to end one; `clock` is in seconds;
    `trace` says what is to be told of one whose request is traced."""

    def __init__(
        self,
        keeping: RetentionPolicy,
        cancel: Callable[[str, int, FinishReason], None],
        clock: Callable[[], float],
        ended: EndedSequences | None = None,
        trace: Callable[[executor_pb2.Submit], SequenceTrace | None] = lambda submit: None,
    ) -> None:
        self._keeping = keeping
        self._cancel = cancel
        self._clock = clock
        self._trace = trace
        self._held: dict[Sequence, PlacedSequence] = {}
        # The newest attempt of each request, which is the one that can be attached to.
        self._newest: dict[str, PlacedSequence] = {}
        # In the order in which their routers left.
        self._orphans: dict[PlacedSequence, None] = {}
        # Handed back, and the engine has not ended them yet.
        self._disowned: set[Sequence] = set()
        # How often the engine has come to have nothing to do: it was not at a standstill in between.
        self.num_times_idle = 0
        self.ended = ended or EndedSequences(keeping.retain_ended_s)

    @property
    def num_held(self) -> int:
        """Placements that are owed an end."""
        return len(self._held)

    @property
    def num_orphans(self) -> int:
        """Of these, those that nobody reads."""
        return len(self._orphans)

    @property
    def has_work(self) -> bool:
        """Whether the engine has something left to do, for anybody or for nobody."""
        return bool(self._held or self._disowned)

    # Coming.

    def offer(self, sequence: Sequence, submit: executor_pb2.Submit, session: Session) -> bool:
        """Notes a placement that is about to be offered to the engine; False where this attempt or a newer one is known
        here."""
        known = self._newest.get(submit.request_id)
        if known is not None and submit.attempt <= known.sequence.attempt:
            return False
        ended = self.ended.find(submit.request_id)
        if ended is not None and submit.attempt <= ended.placed.submit.attempt:
            return False
        self.ended.forget(submit.request_id)
        holding = PlacedSequence(sequence, self._placed(submit), sequence.num_output_tokens, session)
        holding.trace = self._trace(submit)
        self._held[sequence] = holding
        self._newest[submit.request_id] = holding
        return True

    def _placed(self, submit: executor_pb2.Submit) -> Placed:
        """A copy: what came keeps everything alive that came with it."""
        submit.ClearField("prior_output_ids")
        kept = executor_pb2.Submit()
        kept.CopyFrom(submit)
        deadline_s = self._clock() + submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None
        return Placed(kept, deadline_s)

    def attach(self, attach: executor_pb2.Attach, session: Session) -> None:
        """Lets a router read a placement from an offset on. Whoever read it before does no longer; where it is the same
        router, it gets a new slot."""
        holding = self._newest.get(attach.request_id)
        if holding is not None and holding.sequence.attempt == attach.attempt:
            if holding.is_accepted:
                self._hand_over(holding, session, attach.offset)
            else:
                holding.attaching.pop(session, None)
                holding.attaching[session] = attach.offset
            return
        ended = self.ended.find(attach.request_id)
        if ended is not None and ended.placed.submit.attempt == attach.attempt:
            attached = ended.placed.attached(self._clock(), started=ended.started, cached_tokens=ended.cached_tokens)
            session.replay(attached, attach.offset, ended)
            return
        not_held = executor_pb2.REJECT_REASON_NOT_HELD
        session.reject(attach.request_id, attach.attempt, not_held, "neither runs here nor is remembered")

    def _hand_over(self, holding: PlacedSequence, session: Session, offset: int) -> None:
        if holding.reader is not None:
            holding.reader.detach(holding.sequence)
        self._orphans.pop(holding, None)
        holding.reader = session
        attached = holding.placed.attached(
            self._clock(), started=holding.has_started, cached_tokens=holding.cached_tokens
        )
        session.attach(holding.sequence, attached, offset, holding.output(offset))
        if holding.is_paused:
            session.pause(holding.sequence)

    # What the engine says.

    def publish(self, output: EngineOutput) -> None:
        """Tells the routers what one turn of the engine brought."""
        for sequence in output.accepted:
            self._accept(sequence)
        for sequence, refusal in output.rejected:
            self._reject(sequence, refusal)
        for sequence in output.paused:
            self._pause(sequence)
        for sequence in output.started:
            self._start(sequence)
        for sequence, offset, token_id in output.tokens:
            holding = self._held.get(sequence)
            if holding is not None:
                holding.num_published = offset + 1
                if holding.trace is not None:
                    holding.trace.token()
                if holding.reader is not None:
                    holding.reader.token(sequence, offset, token_id)
        for event in output.finished:
            self._finish(event)

    def _accept(self, sequence: Sequence) -> None:
        holding = self._find(sequence)
        if holding is None:
            return
        holding.is_accepted = True
        if holding.reader is not None:
            holding.reader.accept(sequence)
        attaching, holding.attaching = holding.attaching, {}
        for session, offset in attaching.items():
            self._hand_over(holding, session, offset)

    def _reject(self, sequence: Sequence, refusal: Refusal) -> None:
        holding = self._let_go(sequence)
        if holding is not None:
            self._tell_rejected(holding, REJECT_REASON_PROTO[refusal], refusal.value)

    def _pause(self, sequence: Sequence) -> None:
        holding = self._find(sequence)
        if holding is None:
            return
        holding.is_paused = True
        if holding.trace is not None:
            holding.trace.pause()
        if holding.reader is not None:
            holding.reader.pause(sequence)

    def _start(self, sequence: Sequence) -> None:
        holding = self._find(sequence)
        if holding is None:
            return
        holding.has_started, holding.is_paused = True, False
        holding.cached_tokens = sequence.num_cached_tokens
        if holding.trace is not None:
            holding.trace.start(holding.cached_tokens)
        if holding.reader is not None:
            holding.reader.start(sequence)

    def _finish(self, event: FinishEvent) -> None:
        holding = self._let_go(event.sequence)
        if holding is not None:
            self._tell_ended(holding, event)

    def _find(self, sequence: Sequence) -> PlacedSequence | None:
        """The holding of a sequence; None where it was handed back."""
        holding = self._held.get(sequence)
        assert holding is not None or sequence in self._disowned, f"{sequence.request_id} is nobody's"
        return holding

    def _let_go(self, sequence: Sequence) -> PlacedSequence | None:
        """The engine is through with a sequence."""
        holding = self._find(sequence)
        self._held.pop(sequence, None)
        self._disowned.discard(sequence)
        self.num_times_idle += not self.has_work
        return holding

    def _tell_ended(self, holding: PlacedSequence, event: FinishEvent) -> None:
        self._orphans.pop(holding, None)
        if holding.trace is not None:
            holding.trace.end(event.reason, event.error)
        if self._take_from_newest(holding):
            self.ended.keep(holding.end(event, self._clock()))
        if holding.reader is not None:
            holding.reader.finish(event)

    def _tell_rejected(self, holding: PlacedSequence, reason: executor_pb2.RejectReason, detail: str) -> None:
        self._orphans.pop(holding, None)
        self._take_from_newest(holding)
        if holding.trace is not None:
            holding.trace.refuse(detail)
        request_id, attempt = holding.sequence.request_id, holding.sequence.attempt
        if holding.reader is not None:
            holding.reader.reject(request_id, attempt, reason, detail)
        for session in holding.attaching:
            session.reject(request_id, attempt, executor_pb2.REJECT_REASON_NOT_HELD, f"refused: {detail}")

    def _take_from_newest(self, holding: PlacedSequence) -> bool:
        """False where a newer attempt has come."""
        request_id = holding.sequence.request_id
        if self._newest.get(request_id) is not holding:
            return False
        del self._newest[request_id]
        return True

    # Leaving.

    def leave(self, session: Session) -> int:
        """A router's stream broke: what it read are orphans now, whose number is returned. A router that does not know
        of Attach says too little with its submits for another to go on, so what it read is cancelled."""
        left = [holding for holding in self._held.values() if holding.reader is session]
        for holding in self._held.values():
            holding.attaching.pop(session, None)
        for holding in left:
            holding.reader = None
            holding.orphaned_s = self._clock()
            self._orphans[holding] = None
        if not session.knows_attach or self._keeping.orphan_grace_s == 0:
            self._cancel_orphans(left)
        return len(left)

    def _cancel_orphans(self, orphans: Iterable[PlacedSequence]) -> None:
        for holding in orphans:
            self._orphans.pop(holding, None)
            self._cancel(holding.sequence.request_id, holding.sequence.attempt, FinishReason.CANCELLED)

    def tend(self) -> float | None:
        """Cancels orphans whose grace is over and forgets what was kept long enough; says when there will be more to
        do."""
        now_s, grace_s = self._clock(), self._keeping.orphan_grace_s
        due = [holding for holding in self._orphans if holding.orphaned_s + grace_s <= now_s]
        if due:
            log.info("no router took over %d sequences; they are cancelled", len(due))
        self._cancel_orphans(due)
        self.ended.expire(now_s)
        orphan = next(iter(self._orphans), None)
        dues = (None if orphan is None else orphan.orphaned_s + grace_s, self.ended.next_due_s())
        return min((due_s for due_s in dues if due_s is not None), default=None)

    # Handing back.

    def hand_back_unstarted(self) -> None:
        """Asks the engine to hand back who has had no seat yet, and who is on the way to it."""
        for sequence, holding in self._held.items():
            if not holding.has_started:
                self._cancel(sequence.request_id, sequence.attempt, FinishReason.PREEMPTED)

    def hand_back(self, error: str = "") -> int:
        """Hands everyone back to the routers at once, without waiting for the engine, and says how many there were.
        What the engine still says of them is dropped. Who had a seat is told the error, if there was one: it may be to
        blame for it."""
        held, self._held = self._held, {}
        self._disowned.update(held)
        for sequence, holding in held.items():
            self._cancel(sequence.request_id, sequence.attempt, FinishReason.PREEMPTED)
            if holding.is_accepted:
                blamed = error if holding.has_started else ""
                self._tell_ended(holding, FinishEvent(sequence, FinishReason.PREEMPTED, error=blamed))
            else:
                self._tell_rejected(holding, executor_pb2.REJECT_REASON_DRAINING, "handed back")
        return len(held)

    # How it stands.

    def reported(self, held: Iterable[ReportedSequence]) -> list[ReportedSequence]:
        """What the ledger is to take as held: of what the engine said last, all that was not handed back; and what the
        engine has not answered for, as it answers between steps."""
        gone = {(sequence.request_id, sequence.attempt) for sequence in self._disowned}
        known = [one for one in held if (one.request_id, one.attempt) not in gone] if gone else list(held)
        known += [
            ReportedSequence(sequence.request_id, sequence.attempt, sequence.num_reserved_blocks, SequencePhase.STANDBY)
            for sequence, holding in self._held.items()
            if not holding.is_accepted
        ]
        return known
