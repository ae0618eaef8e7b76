"""The steady state: the waiting and seated requests, and the calls that maintain it.

Every end frees a seat that a waiting request takes, and for every placed request a new one arrives: the queue keeps its
length. Knows the calls and what their replies mean; sends nothing.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial

from bench.ledger.commands import EXECUTOR_MARKER, FIRST_SEQ, ID_MARKERS, SEQ_MARKER, Commands
from bench.ledger.scale import PoolScale, executor_id, request_id

REPORT_S, RENEW_S, REAP_S = 1.0, 1.5, 1.0
# A placement as an event, in a reply or from a mailbox, and as the outcome of a submit.
PLACED_EVENT = re.compile(
    rb"\nplaced\r\n\$10\r\nrequest_id\r\n\$32\r\n(\w+)\r\n(?s:.*?)executor_id\r\n\$\d+\r\n([^\r]+)\r\n"
)
PLACED_OUTCOME = re.compile(rb"\$6\r\nPLACED\r\n:\d+\r\n\$\d+\r\n([^\r]+)\r\n")
QUEUED_OUTCOME = b"\r\n$6\r\nQUEUED\r\n"
SETTLED_OUTCOME = re.compile(rb"\$7\r\nSETTLED\r\n:(\d+)\r\n")


class TrafficError(Exception):
    """The pool did not behave as in a steady state. The text contains its reply."""


class CallKind(Enum):
    """The purpose of a call."""

    SUBMIT = auto()
    SETTLE = auto()
    CANCEL = auto()
    EXPLAIN = auto()
    UPKEEP = auto()
    """Reports, renewals and reaping, which go on whatever else happens."""


@dataclass(frozen=True, slots=True)
class Call:
    """One script call: `ids` are the requests that it is about, `due_s` is when it was to be sent."""

    kind: CallKind
    encoded: bytes
    ids: tuple[bytes, ...] = ()
    due_s: float = 0.0


class Traffic:
    """One pool's requests, as all its routers together know them."""

    def __init__(self, scale: PoolScale, commands: Commands, seed: int) -> None:
        self._scale = scale
        self._commands = commands
        self._random = random.Random(seed)
        self._num_made = 0
        self._num_reported = 0
        self._seated_on: dict[bytes, bytes] = {}
        self._held: dict[bytes, dict[bytes, None]] = {executor_id(n): {} for n in range(scale.executors)}
        # Seated, by executor in the order of their ends; executors end some of theirs in turn.
        self._ending: dict[bytes, deque[bytes]] = {executor: deque() for executor in self._held}
        self._turns = deque(self._held)
        self._freed: dict[bytes, deque[float]] = {executor: deque() for executor in self._held}
        self._upkeep: list[tuple[float, int, Callable[[], Call]]] = []
        self._intervals_s: list[float] = []
        self.num_waiting = 0
        self._num_submitting = 0
        self._num_free = scale.num_seats  # seats of which nothing says yet who has them, the ends sent counted in
        self.num_placed = 0
        self.submit_s: list[float] = []
        self.seat_s: list[float] = []

    # Calls -----------------------------------------------------------------------------------------------------

    @property
    def explains(self) -> bool:
        """Whether the store can explain."""
        return bool(self._commands.explains)

    def can_settle(self, count: int) -> bool:
        """Returns whether an executor has this many seated; then the next settle is of that one."""
        for _ in range(len(self._turns)):
            if len(self._ending[self._turns[0]]) >= count:
                return True
            self._turns.rotate(-1)
        return False

    @property
    def num_reported(self) -> int:
        return self._num_reported

    @property
    def expected_waiting(self) -> int:
        """The requests that wait once everything sent is done, with full seats."""
        return self.num_waiting + self._num_submitting - self._num_free

    def submit(self, due_s: float = 0.0, *, ages_at_once: bool = False) -> Call:
        """Returns the submit of a new request of any router and tenant. One that ages at once moves up all classes."""
        commands = self._commands
        templates = self._random.choice(commands.ageing_submits if ages_at_once else commands.submits)
        self._num_made += 1
        self._num_submitting += 1
        new_id = request_id(self._num_made)
        encoded = self._random.choice(templates).fill({ID_MARKERS[0]: new_id})
        return Call(CallKind.SUBMIT, encoded, (new_id,), due_s)

    def settle(self, count: int, due_s: float = 0.0) -> Call:
        """Returns the end of those seated longest on one executor, as in its step frame; `count` as in
        `Commands.settles`."""
        if not self.can_settle(count):
            raise TrafficError(f"no executor has {count} requests seated")
        executor = self._turns[0]
        self._turns.rotate(-1)
        ids = tuple(self._ending[executor].popleft() for _ in range(count))
        self._num_free += count
        self._freed[executor].extend([due_s] * count)
        template = self._random.choice(self._random.choice(self._commands.settles[count]))
        return Call(CallKind.SETTLE, template.fill(dict(zip(ID_MARKERS, ids, strict=False))), ids, due_s)

    def cancel(self, waiting_id: bytes) -> Call:
        """Returns the cancellation of a waiting request."""
        template = self._random.choice(self._commands.cancels)
        return Call(CallKind.CANCEL, template.fill({ID_MARKERS[0]: waiting_id}), (waiting_id,))

    def explain(self, waiting_id: bytes) -> Call:
        """Asks for the state of a waiting request."""
        template = self._random.choice(self._commands.explains)
        return Call(CallKind.EXPLAIN, template.fill({ID_MARKERS[0]: waiting_id}), (waiting_id,))

    def report(self, executor: bytes) -> Call:
        """Reports the current state of an executor."""
        held = self._held[executor]
        self._num_reported += 1
        blanks = dict(zip(ID_MARKERS, held, strict=False))
        blanks[EXECUTOR_MARKER] = executor
        blanks[SEQ_MARKER] = b"%d" % (FIRST_SEQ + self._num_reported)
        return Call(CallKind.UPKEEP, self._random.choice(self._commands.reports)[len(held)].fill(blanks))

    def all_reports(self) -> Iterator[Call]:
        return (self.report(executor) for executor in self._held)

    def all_renewals(self) -> Iterator[Call]:
        """Yields the renewal of every router's lease."""
        return (Call(CallKind.UPKEEP, encoded) for encoded in self._commands.renews)

    # Upkeep ----------------------------------------------------------------------------------------------------

    def start_upkeep(self, now_s: float) -> None:
        """Starts reports, renewals and reaping, evenly spread."""
        self._upkeep.clear()
        every: list[tuple[float, Callable[[], Call]]] = []
        every += [(REPORT_S, partial(self.report, executor)) for executor in self._held]
        every += [(RENEW_S, partial(Call, CallKind.UPKEEP, encoded)) for encoded in self._commands.renews]
        every += [(REAP_S, partial(Call, CallKind.UPKEEP, encoded)) for encoded in self._commands.reaps]
        for number, (interval_s, made) in enumerate(every):
            self._upkeep.append((now_s + interval_s * self._random.random(), number, made))
        heapq.heapify(self._upkeep)
        self._intervals_s = [interval_s for interval_s, _ in every]

    @property
    def upkeep_due_s(self) -> float:
        return self._upkeep[0][0]

    def upkeep(self) -> Call:
        """Returns the call of upkeep that is due first."""
        due_s, number, made = self._upkeep[0]
        heapq.heapreplace(self._upkeep, (due_s + self._intervals_s[number], number, made))
        return replace(made(), due_s=due_s)

    # Replies ---------------------------------------------------------------------------------------------------

    def take(self, call: Call, reply: bytes, now_s: float) -> None:
        """Takes in the reply to a call."""
        match call.kind:
            case CallKind.SUBMIT:
                self._submitted(call, reply, now_s)
            case CallKind.SETTLE:
                self._settled(call, reply)
            case CallKind.CANCEL:
                if b"WAITING" not in reply:
                    raise _unexpected("cancel", reply)
                self.num_waiting -= 1
        self.take_events(reply, now_s)

    def take_events(self, reply: bytes, now_s: float) -> None:
        """The placements in a reply of any script or of a mailbox."""
        for placed_id, executor in PLACED_EVENT.findall(reply):
            if placed_id in self._seated_on:
                continue  # a submit says it twice: as its outcome and as an event
            self._seat(placed_id, executor)
            self.num_waiting -= 1
            self.num_placed += 1
            freed = self._freed[executor]
            if freed:
                self.seat_s.append(now_s - freed.popleft())

    def _submitted(self, call: Call, reply: bytes, now_s: float) -> None:
        self.submit_s.append(now_s - call.due_s)
        self._num_submitting -= 1
        outcome = PLACED_OUTCOME.search(reply)
        if outcome:
            if call.ids[0] not in self._seated_on:
                self._seat(call.ids[0], outcome[1])
                self.num_placed += 1
                if self._freed[outcome[1]]:
                    self._freed[outcome[1]].popleft()
        elif QUEUED_OUTCOME in reply:
            self.num_waiting += 1
        else:
            raise _unexpected("submit", reply)

    def _settled(self, call: Call, reply: bytes) -> None:
        outcome = SETTLED_OUTCOME.search(reply)
        if outcome is None or int(outcome[1]) != len(call.ids):
            raise _unexpected("settle", reply)
        for ended in call.ids:
            del self._held[self._seated_on.pop(ended)][ended]

    def _seat(self, placed_id: bytes, executor: bytes) -> None:
        self._seated_on[placed_id] = executor
        self._held[executor][placed_id] = None
        self._ending[executor].append(placed_id)
        self._num_free -= 1


def _unexpected(script: str, reply: bytes) -> TrafficError:
    return TrafficError(f"{script} was answered {reply.decode(errors='replace').splitlines()[:24]}")
