"""The life cycle of one request: the whole table, the fence, and what is illegal."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.types import (
    Adopted,
    Cancelled,
    CancelOutcome,
    CancelRequested,
    Dropped,
    DropReason,
    Duplicate,
    HandBackOutcome,
    HandBackRefusal,
    LeaseLapsed,
    LedgerState,
    Lost,
    Placement,
    PreemptRequested,
    Queued,
    Refused,
    TakenOver,
)
from inflight.router.lifecycle import lifecycle
from inflight.router.lifecycle.events import (
    CANCELLED_END,
    DEADLINE_END,
    FENCED,
    AdoptedElsewhere,
    AttachAnswered,
    AttachResult,
    CancelFound,
    Detached,
    DrainWaiting,
    Event,
    FirstToken,
    Forgotten,
    GiveUp,
    HandBackAnswered,
    Leave,
    LifecycleState,
    NoExecutor,
    NotLinked,
    PendingCall,
    ReaderEnded,
    Rejected,
    Release,
    RequeueReason,
    ResubmitAnswered,
    ResubmitDue,
    SequenceEnded,
    Submit,
    SubmitAnswer,
    SubmitAnswered,
    Unlinked,
    WithdrawAnswered,
    WithdrawDue,
    Withdrawn,
)
from inflight.router.lifecycle.lifecycle import (
    CHANGING,
    CHANGING_FIELDS,
    ExpectReport,
    Forget,
    HandBack,
    IllegalTransition,
    Lifecycle,
    PublishEnd,
    RecordRequeued,
    ScheduleResubmit,
    ScheduleWithdraw,
    Send,
    Settle,
)
from inflight.router.lifecycle.transitions import TRANSITIONS, UNSERVED
from inflight.v1 import types_pb2
from tests.support.lifecycle.world import Output

Transition = tuple[LifecycleState, type, LifecycleState]

MAX_ATTEMPT = 2
ERROR = RequestError(Reason.DRAINING, "")
AWAY = RequestError(Reason.STORE_UNAVAILABLE, "")
DROPPED = Dropped("r", DropReason.EXPIRED)
PLACEMENTS = tuple(Placement("r", attempt, "e", 1) for attempt in range(1, MAX_ATTEMPT + 1))
ADOPTED = tuple(Adopted(placement, ended) for placement in PLACEMENTS for ended in (True, False))
SUBMITTED: tuple[SubmitAnswer, ...] = (
    *PLACEMENTS,
    *ADOPTED,
    Queued(0),
    DROPPED,
    AWAY,
    Refused(Reason.QUEUE_FULL),
    Refused(Reason.NO_EXECUTOR),
    Duplicate(LedgerState.PLACED),
)
HANDED_BACK: tuple[HandBackOutcome, ...] = (
    *PLACEMENTS,
    Queued(0),
    DROPPED,
    HandBackRefusal.EXHAUSTED,
    HandBackRefusal.STALLED,
    HandBackRefusal.STALE,
    HandBackRefusal.UNKNOWN,
)
REASONS = (
    types_pb2.FINISH_REASON_LENGTH,
    types_pb2.FINISH_REASON_CANCELLED,
    types_pb2.FINISH_REASON_PREEMPTED,
)


def possible_events(life: Lifecycle) -> Iterator[Event]:
    """What can happen to a request next."""
    yield ReaderEnded(DEADLINE_END)
    yield from _answers(life)
    if life.state is LifecycleState.NEW:
        yield Submit()
        yield from (AdoptedElsewhere(adopted) for adopted in ADOPTED)
    if life.state not in UNSERVED:
        yield from (Release(), DrainWaiting(ERROR), Leave(ERROR), NoExecutor(ERROR), LeaseLapsed())
        yield from (CancelFound(state) for state in LedgerState)
        yield from (CancelRequested("r", 1), Cancelled("r"), DROPPED, TakenOver("r"), TakenOver("r", is_certain=False))
        yield from PLACEMENTS
        yield from (Lost("r", placement.attempt, "e", 1) for placement in PLACEMENTS)
    if life.is_in_queue:
        yield Forgotten()
    if life.current_attempt:
        yield from _fenced(life.current_attempt)


def _answers(life: Lifecycle) -> Iterator[Event]:
    for call in set(life.calls):
        match call:
            case PendingCall.SUBMIT:
                yield from (SubmitAnswered(outcome) for outcome in SUBMITTED)
            case PendingCall.RESUBMIT_QUEUED:
                yield from (ResubmitDue(), GiveUp(ERROR))
            case PendingCall.RESUBMIT:
                yield from (ResubmitAnswered(outcome) for outcome in SUBMITTED)
            case PendingCall.ATTACH:
                for is_first in {False, PendingCall.SUBMIT in life.calls}:
                    for adopted in ADOPTED:
                        yield from (AttachAnswered(adopted, result, is_first) for result in AttachResult)
            case PendingCall.HAND_BACK:
                for outcome in HANDED_BACK:
                    yield HandBackAnswered(PLACEMENTS[0], RequeueReason.LOST, outcome, 2)
            case PendingCall.WITHDRAW_QUEUED:
                yield from (WithdrawDue(), WithdrawDue(is_replaced=True))
            case PendingCall.WITHDRAW:
                found = CancelOutcome(LedgerState.PLACED, PLACEMENTS[0])
                yield from (WithdrawAnswered(outcome) for outcome in (None, CancelOutcome(None), found))


def _fenced(attempt: int) -> Iterator[Event]:
    yield from (NotLinked(attempt), Unlinked(attempt), Withdrawn(attempt), Detached(attempt), FirstToken(attempt))
    yield from (
        Rejected(attempt),
        Rejected(attempt, RequestError(Reason.INTERNAL, "no executor would take it")),
        PreemptRequested("r", attempt),
    )
    yield from (SequenceEnded(attempt, reason) for reason in REASONS)
    yield SequenceEnded(attempt, types_pb2.FINISH_REASON_PREEMPTED, error="stalled")
    yield SequenceEnded(attempt, types_pb2.FINISH_REASON_ERROR, error="failed")


def copied(life: Lifecycle) -> Lifecycle:
    """Another request that is where this one is."""
    copy = Lifecycle(life.request_id, life.output, life.deadline, is_repeatable=life.is_repeatable)
    for name, value in zip(CHANGING_FIELDS, CHANGING(life), strict=True):
        setattr(copy, name, value)
    return copy


def explore(first: Lifecycle, max_calls: int) -> tuple[set[Transition], list[Lifecycle]]:
    """Every transition that can follow, and a request in each situation that it can come to. At most so many calls are
    under way at once."""
    seen = {_situation(first): first}
    transitions: set[Transition] = set()
    pending = [first]
    while pending:
        life = pending.pop()
        for event in possible_events(life):
            after = copied(life)
            after.handle(event)
            transitions.add((life.state, type(event), after.state))
            situation = _situation(after)
            if situation not in seen and len(after.calls) <= max_calls:
                seen[situation] = after
                pending.append(after)
    return transitions, list(seen.values())


def _situation(life: Lifecycle) -> tuple[object, ...]:
    return (
        life.state,
        tuple(sorted(life.calls, key=lambda call: call.value)),
        life.current_attempt,
        life.attempt,
        life.admitted is not None,
        life.end is not None,
        life.error is not None,
        life.is_abandoned,
        life.is_cancelled,
        life.is_known_uncancelled,
        min(life.consecutive_preemptions, 1),
    )


S = LifecycleState
PLACEMENT = Placement("r", 1, "e", 1)
LOST = Lost("r", 2, "e", 1)


# Where the exploration begins, besides at the beginning: clients that leave while their first submit has no answer yet,
# and three calls are under way.
LEAVING: tuple[tuple[Event, ...], ...] = (
    (LeaseLapsed(), ResubmitDue(), PLACEMENT, Unlinked(1)),
    (LeaseLapsed(), PLACEMENT, Unlinked(1)),
    (PLACEMENT, Unlinked(1), LOST, HandBackAnswered(PLACEMENT, RequeueReason.LOST, Queued(0), 2)),
    (PLACEMENT, Unlinked(1), LOST, HandBackAnswered(PLACEMENT, RequeueReason.LOST, HandBackRefusal.UNKNOWN, 2)),
)


@functools.cache
def explored() -> tuple[frozenset[Transition], tuple[Lifecycle, ...]]:
    """Every transition, and a request in every situation."""
    found = [explore(Lifecycle("r", Output(), is_repeatable=True), 2), explore(Lifecycle("r", Output(), 1.0), 1)]
    for events in LEAVING:
        life = Lifecycle("r", Output())
        for event in (Submit(), *events, Release()):
            life.handle(event)
        found.append(explore(life, 3))
    transitions = frozenset(transition for each, _ in found for transition in each)
    return transitions, tuple(life for _, lives in found for life in lives)


@pytest.mark.slow
def test_table_has_what_can_happen_and_nothing_else() -> None:
    transitions, _ = explored()
    table = {(state, kind, after) for (state, kind), following in TRANSITIONS.items() for after in following}
    assert transitions == table


def one_of_each() -> Iterator[Event]:
    """An event of each kind."""
    _, lives = explored()
    events: dict[type, Event] = {}
    for life in lives:
        if len(events) == len({kind for _, kind in TRANSITIONS}):
            break
        for event in possible_events(life):
            events.setdefault(type(event), event)
    return iter(events.values())


@pytest.mark.slow
@pytest.mark.parametrize("state", LifecycleState)
def test_event_that_a_state_does_not_allow_raises_and_changes_nothing(state: LifecycleState) -> None:
    found = next(one for one in explored()[1] if one.state is state)
    before = CHANGING(found)
    for event in one_of_each():
        life, kind = copied(found), type(event)
        if kind in FENCED and not life.is_current(event.attempt):  # type: ignore[union-attr]
            assert life.handle(event) == []
        elif (state, kind) in TRANSITIONS:
            continue
        else:
            with pytest.raises(IllegalTransition, match=f"{kind.__name__} in state {state.name}"):
                life.handle(event)
        assert CHANGING(life) == before


@pytest.mark.parametrize(
    "event",
    [
        SubmitAnswered(Queued(0)),
        ResubmitAnswered(Queued(0)),
        HandBackAnswered(PLACEMENT, RequeueReason.LOST, Queued(0), 2),
        WithdrawAnswered(CancelOutcome(None)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_answer_to_a_call_that_was_not_made_raises_and_changes_nothing(event: Event) -> None:
    life = placed()
    life.handle(Release())
    before = CHANGING(life)
    with pytest.raises(IllegalTransition):
        life.handle(event)
    assert CHANGING(life) == before


def test_state_that_the_table_does_not_have_is_never_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {**TRANSITIONS, (S.PLACED, SequenceEnded): frozenset({S.HANDING_BACK})}
    monkeypatch.setattr(lifecycle, "TRANSITIONS", without)
    life = placed()
    before = CHANGING(life)
    with pytest.raises(IllegalTransition, match="SequenceEnded led to ENDED"):
        life.handle(SequenceEnded(1, CANCELLED_END.reason + 100))
    assert CHANGING(life) == before


def placed(attempt: int = 1, output: Output | None = None) -> Lifecycle:
    """A request on an executor."""
    life = Lifecycle("r", output or Output())
    life.handle(Submit())
    life.handle(SubmitAnswered(Placement("r", attempt, "e", 1)))
    assert life.state is S.PLACED
    return life


def test_request_is_sent_handed_back_and_settled() -> None:
    life = placed()
    effects = life.handle(Unlinked(1))
    assert [effect.placement.attempt for effect in effects if isinstance(effect, HandBack)] == [1]
    effects = life.handle(HandBackAnswered(PLACEMENT, RequeueReason.LOST, Placement("r", 2, "f", 1), 2))
    assert [effect.placement.attempt for effect in effects if isinstance(effect, Send)] == [2]
    effects = life.handle(SequenceEnded(2, 1))
    assert [type(effect) for effect in effects][1:] == [Settle, Forget]
    assert life.state is S.ENDED


def test_what_an_executor_says_of_a_former_placement_is_dropped() -> None:
    life = placed()
    life.handle(Unlinked(1))
    life.handle(HandBackAnswered(PLACEMENT, RequeueReason.LOST, Placement("r", 2, "f", 1), 2))
    before = CHANGING(life)
    assert [life.handle(event) for event in (Unlinked(1), SequenceEnded(1, 1), SequenceEnded(0, 1))] == [[], [], []]
    assert CHANGING(life) == before


def handing_back() -> Lifecycle:
    """A request whose placement is being returned to the queue."""
    life = placed()
    life.handle(Unlinked(1))
    assert life.state is S.HANDING_BACK
    return life


def handed_back(outcome: HandBackOutcome) -> HandBackAnswered:
    """The answer to the hand-back of the first placement."""
    return HandBackAnswered(PLACEMENT, RequeueReason.LOST, outcome, 2)


HAND_BACKS: tuple[tuple[HandBackOutcome, LifecycleState, list[type]], ...] = (
    (Placement("r", 2, "f", 1), S.PLACED, [Send]),
    (Queued(0), S.WAITING, []),
    (Dropped("r", DropReason.EXPIRED), S.ENDED, [PublishEnd, Forget]),
    (HandBackRefusal.EXHAUSTED, S.ENDED, [PublishEnd, Forget]),
    (HandBackRefusal.UNKNOWN, S.RESUBMITTING, [ScheduleResubmit]),
    (HandBackRefusal.STALE, S.RESUBMITTING, [ScheduleResubmit]),
)


@pytest.mark.parametrize(("outcome", "state", "effects"), HAND_BACKS)
def test_answer_to_a_hand_back_moves_a_wanted_request(
    outcome: HandBackOutcome, state: LifecycleState, effects: list[type]
) -> None:
    life = handing_back()
    assert [type(effect) for effect in life.handle(handed_back(outcome))] == [ExpectReport, *effects]
    assert life.state is state


@pytest.mark.parametrize("outcome", [HandBackRefusal.UNKNOWN, HandBackRefusal.STALE])
def test_request_that_its_client_left_is_not_submitted_again_after_a_hand_back(outcome: HandBackRefusal) -> None:
    life = handing_back()
    life.handle(Release())
    assert [type(effect) for effect in life.handle(handed_back(outcome))] == [ExpectReport]
    assert life.state is S.WITHDRAWING


def test_hand_back_that_overtakes_the_withdrawal_is_withdrawn_again() -> None:
    # The withdrawal found nothing in the queue; the hand-back put the request there afterwards.
    life = handing_back()
    assert [type(effect) for effect in life.handle(Release())] == [ScheduleWithdraw]
    life.handle(WithdrawDue())
    assert [type(effect) for effect in life.handle(WithdrawAnswered(CancelOutcome(None)))] == [Forget]
    assert [type(effect) for effect in life.handle(handed_back(Queued(0)))] == [ExpectReport, ScheduleWithdraw]
    assert life.state is S.ENDED


def test_hand_back_before_the_turn_of_the_withdrawal_needs_no_second_one() -> None:
    life = handing_back()
    life.handle(Release())
    assert [type(effect) for effect in life.handle(handed_back(Queued(0)))] == [ExpectReport]
    assert life.state is S.WITHDRAWING


def test_used_reservation_is_extended_and_says_nothing_against_the_executor() -> None:
    life = placed(output=Output(has_progressed=True, has_used_reservation=True))
    effects = life.handle(SequenceEnded(1, types_pb2.FINISH_REASON_PREEMPTED))
    assert effects == [RecordRequeued(life, RequeueReason.EXTENDED), HandBack(life, PLACEMENT, RequeueReason.EXTENDED)]
    answer = HandBackAnswered(PLACEMENT, RequeueReason.EXTENDED, Placement("r", 2, "e", 1), 2)
    assert [type(effect) for effect in life.handle(answer)] == [Send]


def test_used_reservation_of_a_draining_executor_is_handed_back_as_any_other() -> None:
    life = placed(output=Output(has_progressed=True, has_used_reservation=True))
    effects = life.handle(SequenceEnded(1, types_pb2.FINISH_REASON_PREEMPTED, is_draining=True))
    assert effects[-1] == HandBack(life, PLACEMENT, RequeueReason.HANDED_BACK)


def test_end_is_told_once() -> None:
    life = placed()
    assert len(life.handle(ReaderEnded(CANCELLED_END))) == 1
    assert life.handle(ReaderEnded(CANCELLED_END)) == []
    assert life.end == CANCELLED_END


def test_replay_is_not_settled() -> None:
    life = Lifecycle("r", Output())
    life.handle(AdoptedElsewhere(Adopted(PLACEMENT, ended=True)))
    effects = life.handle(SequenceEnded(1, 1))
    assert not [effect for effect in effects if isinstance(effect, Settle)]
    assert life.state is S.ENDED


def test_request_that_is_left_takes_no_answer_for_its_own() -> None:
    life = Lifecycle("r", Output())
    life.handle(Submit())
    life.handle(Leave(ERROR))
    effects = life.handle(SubmitAnswered(PLACEMENT))
    assert not [effect for effect in effects if isinstance(effect, Send | Settle)]
    assert life.state is S.LEFT
