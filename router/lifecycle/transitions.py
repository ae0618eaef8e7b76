"""The table of a request's transitions: every state that an event can lead to. Plain data.

An event that a state does not allow is illegal (`inflight.router.lifecycle.lifecycle`). An answer is legal only while
its call is under way, whatever the state.
"""

from __future__ import annotations

from collections.abc import Mapping

from inflight.router.ledger.types import (
    Cancelled,
    CancelRequested,
    Dropped,
    LeaseLapsed,
    Lost,
    Placement,
    PreemptRequested,
    TakenOver,
)
from inflight.router.lifecycle.events import (
    AdoptedElsewhere,
    AttachAnswered,
    CancelFound,
    Detached,
    DrainWaiting,
    FirstToken,
    Forgotten,
    GiveUp,
    HandBackAnswered,
    Leave,
    LifecycleState,
    NoExecutor,
    NotLinked,
    ReaderEnded,
    Rejected,
    Release,
    ResubmitAnswered,
    ResubmitDue,
    SequenceEnded,
    Submit,
    SubmitAnswered,
    Unlinked,
    WithdrawAnswered,
    WithdrawDue,
    Withdrawn,
)

ALL = frozenset(LifecycleState)
UNSERVED = frozenset({LifecycleState.NEW, LifecycleState.ENDED, LifecycleState.LEFT})
SERVED = ALL - UNSERVED

# By event: the states that allow it, and those that it can lead to; "=" is the same state, "SERVED" are all but NEW,
# ENDED and LEFT.
_TABLE: Mapping[tuple[type, ...], Mapping[str, str]] = {
    (Submit,): {"NEW": "SUBMITTING"},
    (AdoptedElsewhere,): {"NEW": "PLACED REPLAYING"},
    (Release,): {
        "SUBMITTING PLACED REPLAYING WITHDRAWING": "=",
        "WAITING RESUBMITTING ATTACHING HANDING_BACK": "= WITHDRAWING",
    },
    (ReaderEnded,): {"ANY": "="},
    (DrainWaiting,): {
        "SUBMITTING PLACED REPLAYING": "=",
        "WAITING RESUBMITTING ATTACHING HANDING_BACK": "= WITHDRAWING LEFT",
        "WITHDRAWING": "= LEFT",
    },
    (Leave,): {"SERVED": "LEFT"},
    (TakenOver,): {
        "SUBMITTING WAITING": "RESUBMITTING LEFT",
        "PLACED": "RESUBMITTING LEFT",
        "RESUBMITTING ATTACHING HANDING_BACK": "= LEFT",
        "REPLAYING WITHDRAWING": "LEFT",
    },
    (NoExecutor,): {
        "SUBMITTING WAITING RESUBMITTING ATTACHING HANDING_BACK": "= WITHDRAWING",
        "PLACED REPLAYING WITHDRAWING": "=",
    },
    (GiveUp,): {
        "WAITING RESUBMITTING": "= ENDED",
        "ATTACHING PLACED REPLAYING HANDING_BACK WITHDRAWING ENDED LEFT": "=",
    },
    (SubmitAnswered,): {
        "SUBMITTING": "WAITING ATTACHING PLACED WITHDRAWING ENDED",
        "WAITING": "= ATTACHING PLACED HANDING_BACK WITHDRAWING ENDED",
        "RESUBMITTING": "= WAITING ATTACHING PLACED HANDING_BACK WITHDRAWING ENDED",
        "ATTACHING": "= PLACED HANDING_BACK WITHDRAWING ENDED",
        "PLACED WITHDRAWING": "= ENDED",
        "REPLAYING": "= PLACED ENDED",
        "HANDING_BACK": "= PLACED WITHDRAWING ENDED",
        "ENDED LEFT": "=",
    },
    (ResubmitDue,): {"WAITING RESUBMITTING ATTACHING PLACED REPLAYING HANDING_BACK WITHDRAWING ENDED LEFT": "="},
    (ResubmitAnswered,): {
        "WAITING": "= ATTACHING PLACED HANDING_BACK WITHDRAWING ENDED LEFT",
        "RESUBMITTING": "= WAITING ATTACHING PLACED HANDING_BACK WITHDRAWING ENDED LEFT",
        "ATTACHING": "= PLACED HANDING_BACK WITHDRAWING ENDED LEFT",
        "PLACED WITHDRAWING": "= ENDED LEFT",
        "REPLAYING": "= PLACED ENDED LEFT",
        "HANDING_BACK": "= PLACED WITHDRAWING ENDED LEFT",
        "ENDED LEFT": "=",
    },
    (HandBackAnswered,): {
        "WAITING": "= RESUBMITTING PLACED HANDING_BACK WITHDRAWING ENDED",
        "RESUBMITTING ATTACHING": "= PLACED HANDING_BACK WITHDRAWING ENDED",
        "PLACED WITHDRAWING": "= ENDED",
        "REPLAYING": "= PLACED ENDED",
        "HANDING_BACK": "= WAITING RESUBMITTING PLACED WITHDRAWING ENDED",
        "ENDED LEFT": "=",
    },
    (WithdrawDue,): {"PLACED REPLAYING WITHDRAWING ENDED LEFT": "="},
    (WithdrawAnswered,): {"PLACED REPLAYING WITHDRAWING": "ENDED", "ENDED LEFT": "="},
    (CancelFound,): {"SERVED": "= ENDED"},
    (Forgotten,): {"WAITING": "RESUBMITTING"},
    (LeaseLapsed,): {
        "SUBMITTING WAITING": "= RESUBMITTING",
        "RESUBMITTING ATTACHING PLACED REPLAYING HANDING_BACK WITHDRAWING": "=",
    },
    (Placement,): {
        "SUBMITTING": "PLACED ENDED",
        "WAITING RESUBMITTING ATTACHING": "PLACED HANDING_BACK ENDED",
        "PLACED": "= ENDED",
        "REPLAYING HANDING_BACK": "= PLACED ENDED",
        "WITHDRAWING": "ENDED",
    },
    (Lost,): {
        "SUBMITTING WAITING RESUBMITTING ATTACHING": "= HANDING_BACK",
        "PLACED": "= HANDING_BACK ENDED",
        "REPLAYING": "= ENDED",
        "HANDING_BACK WITHDRAWING": "=",
    },
    (CancelRequested,): {"SERVED": "="},
    (PreemptRequested, FirstToken): {"PLACED REPLAYING ENDED": "="},
    (Cancelled, Dropped): {"SERVED": "ENDED"},
    (AttachAnswered,): {
        "WAITING RESUBMITTING": "= PLACED HANDING_BACK ENDED",
        "ATTACHING": "PLACED REPLAYING HANDING_BACK ENDED",
        "PLACED": "= ENDED",
        "REPLAYING HANDING_BACK": "= PLACED ENDED",
        "WITHDRAWING": "= PLACED REPLAYING ENDED",
        "ENDED LEFT": "=",
    },
    (NotLinked, Unlinked, Rejected, Withdrawn, SequenceEnded): {
        "PLACED": "HANDING_BACK ENDED",
        "REPLAYING": "ENDED",
        "ENDED": "=",
    },
    (Detached,): {"PLACED": "RESUBMITTING LEFT", "REPLAYING": "LEFT", "ENDED": "="},
}


def _states(words: str, state: LifecycleState | None = None) -> frozenset[LifecycleState]:
    """Returns the states that a cell of the table names."""
    groups = {"ANY": ALL, "SERVED": SERVED, "=": frozenset({state})}
    return frozenset(
        one for word in words.split() for one in groups.get(word) or {LifecycleState[word]} if one is not None
    )


TRANSITIONS: Mapping[tuple[LifecycleState, type], frozenset[LifecycleState]] = {
    (state, kind): _states(following, state)
    for kinds, rows in _TABLE.items()
    for states, following in rows.items()
    for state in _states(states)
    for kind in kinds
}
