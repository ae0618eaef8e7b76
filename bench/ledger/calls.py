"""One call of the load, and what it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto


class CallKind(Enum):
    """The purpose of a call."""

    SUBMIT = auto()
    SETTLE = auto()
    CANCEL = auto()
    EXPLAIN = auto()
    BOARD = auto()
    """Continues a call that stopped at its bound."""
    UPKEEP = auto()
    """Reports, renewals and reaping, which go on whatever else happens."""


@dataclass(frozen=True, slots=True)
class Call:
    """One script call: `ids` are the requests that it is about, `due_s` is when it was to be sent, `executor` the one
    whose requests it ends."""

    kind: CallKind
    encoded: bytes
    ids: tuple[bytes, ...] = ()
    due_s: float = 0.0
    executor: bytes = b""
    upkeep: int | None = None
    """Which of the periodic calls it is."""
    again: Callable[[], bytes] | None = None
    """Makes the command for the case that it needs the mailboxes of other routers."""
