"""The steady state: the waiting and seated requests, and the calls that maintain it.

Every end frees a seat that a waiting request takes, and for every placed request a new one arrives: the queue keeps its
length. Knows the calls and what their replies mean; sends nothing.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from inflight.bench.ledger.commands import (
    EXECUTOR_MARKER,
    FIRST_SEQ,
    ID_MARKERS,
    PREFIX_MARKERS,
    SEQ_MARKER,
    Call,
    CallKind,
    Commands,
)
from inflight.bench.ledger.scale import PoolScale, executor_id, request_id, router_id
from inflight.bench.ledger.upkeep import REAP_S, RENEW_S, Periodic, Relay, Repeated, Upkeep
from inflight.router.dispatch.report_pacer import MAX_PER_CALL, ReportPacer

# A placement as an event, in a reply or from a mailbox, and as the outcome of a submit.
PLACED_EVENT = re.compile(
    rb"\nplaced\r\n\$10\r\nrequest_id\r\n\$32\r\n(\w+)\r\n(?s:.*?)executor_id\r\n\$\d+\r\n([^\r]+)\r\n"
    rb"(?s:.*?)at_ms\r\n\$\d+\r\n(\d+)\r\n"
)
DROPPED_EVENT = re.compile(rb"\n(?:expired|never_fits)\r\n\$10\r\nrequest_id\r\n\$32\r\n(\w+)\r\n")
# What became of each request of a submit, and where it was placed.
SUBMIT_OUTCOME = re.compile(rb"\*\d\r\n\$\d\r\n(PLACED|QUEUED|REFUSED|DROPPED)\r\n(?::\d+\r\n\$\d+\r\n([^\r]+)\r\n)?")
AGAIN_OUTCOME = b"*1\r\n$5\r\nAGAIN\r\n"
# A call that stopped at its bound: its router calls `board`.
MAX_END_BYTES = 64
STOPPED = re.compile(rb":1\r\n:[01]\r\n:\d+\r\n\Z")
REPLY_TIME = re.compile(rb":(\d+)\r\n\Z")
SETTLED_OUTCOME = re.compile(rb"\$7\r\nSETTLED\r\n:(\d+)\r\n")


class TrafficError(Exception):
    """The pool did not behave as in a steady state. The text contains its reply."""


def shares(executors: Sequence[bytes], num_routers: int) -> list[list[bytes]]:
    """Returns the executors whose reports each router relays."""
    names = frozenset(router_id(number) for number in range(num_routers))
    pacers = [ReportPacer(router_id(number)) for number in range(num_routers)]
    for pacer in pacers:
        pacer.follow(names - {pacer.router_id}, 0.0)
    return [[one for one in executors if pacer.rank(one.decode()) == 0] for pacer in pacers]


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
        # By executor and the ledger's time of a call: when the ends were due that freed its seats, and when the news of
        # placements there came before the reply to that call.
        self._ended_s: dict[tuple[bytes, bytes], float] = {}
        self._told_s: dict[tuple[bytes, bytes], list[float]] = {}
        # Found here, because it takes long: reports that became due meanwhile would all be sent at once.
        self._shares = shares(list(self._held), len(commands.reports))
        self._upkeep = Upkeep()
        self.num_waiting = 0
        self.num_refused = 0
        self.num_dropped = 0
        # To be made again at once: they needed mailboxes.
        self.repeats: deque[Call] = deque()
        self._num_submitting = 0
        self._num_free = scale.num_seats  # seats of which nothing says yet who has them, the ends sent counted in
        self.num_placed = 0
        self.submit_s: list[float] = []
        self.seat_s: list[float] = []

    # Calls -----------------------------------------------------------------------------------------------------

    def can_settle(self, count: int) -> bool:
        """Returns whether an executor has this many seated; then the next settle is of that one."""
        for _ in range(len(self._turns)):
            if len(self._ending[self._turns[0]]) >= count:
                return True
            self._turns.rotate(-1)
        return False

    @property
    def expected_waiting(self) -> int:
        """The requests that wait once everything sent is done: with full seats, if only seats are scarce."""
        return self.num_waiting + self._num_submitting - (0 if self._scale.is_mixed else self._num_free)

    @property
    def num_short(self) -> int:
        """How many requests more than seats became free should come next: some are refused, and some ends place
        several or none."""
        return max(-2, min(4, self._scale.queued - self.expected_waiting)) if self._scale.is_mixed else 0

    def submit(self, due_s: float = 0.0) -> Call:
        """Returns the submit of a new request of any router and tenant."""
        self._num_made += 1
        self._num_submitting += 1
        new_id = request_id(self._num_made)
        blanks = {marker: b"%016x" % self._random.getrandbits(64) for marker in PREFIX_MARKERS}
        blanks[ID_MARKERS[0]] = new_id
        template, again = self._random.choice(self._random.choice(self._commands.submits))
        return Call(CallKind.SUBMIT, template.fill(blanks), (new_id,), due_s, again=partial(again.fill, blanks))

    def submit_together(self, count: int, due_s: float = 0.0) -> Call:
        """Returns one call with as many new requests as a recorded call has, up to `count`. In a router those that come
        while two calls are under way share the next one."""
        fitting = [number for number in self._commands.batches if number <= count]
        return self.submit_batch(max(fitting), due_s) if fitting else self.submit(due_s)

    def submit_batch(self, count: int, due_s: float = 0.0) -> Call:
        """Returns one call with so many new requests; `count` as in `Commands.batches`."""
        ids = tuple(request_id(self._num_made + number) for number in range(1, count + 1))
        self._num_made += count
        self._num_submitting += count
        blanks = {marker: b"%016x" % self._random.getrandbits(64) for marker in PREFIX_MARKERS}
        blanks.update(zip(ID_MARKERS, ids, strict=False))
        template = self._random.choice(self._commands.batches[count])
        return Call(CallKind.SUBMIT, template.fill(blanks), ids, due_s)

    def settle(self, count: int, due_s: float = 0.0) -> Call:
        """Returns the end of those seated longest on one executor, as in its step frame; `count` as in
        `Commands.settles`."""
        if not self.can_settle(count):
            raise TrafficError(f"no executor has {count} requests seated")
        executor = self._turns[0]
        self._turns.rotate(-1)
        ids = tuple(self._ending[executor].popleft() for _ in range(count))
        self._num_free += count
        template = self._random.choice(self._random.choice(self._commands.settles[count]))
        return Call(CallKind.SETTLE, template.fill(dict(zip(ID_MARKERS, ids, strict=False))), ids, due_s, executor)

    def cancel(self, waiting_id: bytes) -> Call:
        """Returns the cancellation of a waiting request."""
        template = self._random.choice(self._commands.cancels)
        return Call(CallKind.CANCEL, template.fill({ID_MARKERS[0]: waiting_id}), (waiting_id,))

    def report(self, executors: Sequence[bytes], router: int | None = None) -> Call:
        """Reports the current state of executors in one call, by any router if none is named."""
        filled = []
        for executor in executors:
            held = self._held[executor]
            self._num_reported += 1
            blanks = dict(zip(ID_MARKERS, held, strict=False))
            blanks[EXECUTOR_MARKER] = executor
            blanks[SEQ_MARKER] = b"%d" % (FIRST_SEQ + self._num_reported)
            filled.append((len(held), blanks))
        routers = self._commands.reports
        chosen = self._random.choice(routers) if router is None else routers[router]
        return Call(CallKind.UPKEEP, chosen.fill(filled))

    def all_reports(self, num_together: int = 1) -> Iterator[Call]:
        """Yields a report of every executor, so many in a call."""
        executors = list(self._held)
        return (
            self.report(executors[start : start + num_together]) for start in range(0, len(executors), num_together)
        )

    def all_renewals(self) -> Iterator[Call]:
        """Yields the renewal of every router's lease."""
        return (Call(CallKind.UPKEEP, encoded) for encoded in self._commands.renews)

    def all_reaps(self) -> Iterator[Call]:
        """Yields a reap of every router."""
        return (Call(CallKind.UPKEEP, encoded) for encoded in self._commands.reaps)

    # Upkeep ----------------------------------------------------------------------------------------------------

    def start_upkeep(self, now_s: float) -> None:
        """Starts every router's reports, renewals and reaping, evenly spread. Each router relays the reports of its
        share of the executors."""
        every: list[tuple[float, Repeated]] = []
        for interval_s, commands in ((RENEW_S, self._commands.renews), (REAP_S, self._commands.reaps)):
            for encoded in commands:
                periodic = Periodic(Call(CallKind.UPKEEP, encoded), interval_s)
                every.append((now_s + interval_s * self._random.random(), periodic))
        for router, share in enumerate(self._shares):
            if share:
                relay = Relay(share, partial(self.report, router=router), self._random, now_s, MAX_PER_CALL)
                every.append((relay.next_due_s(now_s), relay))
        self._upkeep.start(every)

    @property
    def upkeep_due_s(self) -> float:
        return self._upkeep.due_s

    def upkeep(self, now_s: float) -> Call:
        """Returns the call of upkeep that is due first."""
        return self._upkeep.next_call(now_s)

    # Replies ---------------------------------------------------------------------------------------------------

    def take(self, call: Call, reply: bytes, now_s: float) -> None:
        """Takes in the reply to a call."""
        match call.kind:
            case CallKind.SUBMIT:
                self._submitted(call, reply, now_s)
            case CallKind.SETTLE:
                self._settled(call, reply)
            case CallKind.UPKEEP:
                self._upkeep.done(call, now_s)
            case CallKind.CANCEL:
                if b"WAITING" in reply:
                    self.num_waiting -= 1
                elif not self._scale.is_mixed:
                    raise _unexpected("cancel", reply)
        self.take_events(reply, now_s)
        if STOPPED.search(reply, max(0, len(reply) - MAX_END_BYTES)):
            self.repeats.append(Call(CallKind.BOARD, self._random.choice(self._commands.boards)))

    def take_events(self, reply: bytes, now_s: float) -> None:
        """The placements in a reply of any script or of a mailbox."""
        for placed_id, executor, at_ms in PLACED_EVENT.findall(reply):
            if placed_id in self._seated_on:
                continue  # a submit says it twice: as its outcome and as an event
            self._seat(placed_id, executor)
            self.num_waiting -= 1
            self.num_placed += 1
            self._told(executor, at_ms, now_s)
        num_dropped = len(DROPPED_EVENT.findall(reply))
        self.num_dropped += num_dropped
        self.num_waiting -= num_dropped

    def _told(self, executor: bytes, at_ms: bytes, now_s: float) -> None:
        """Takes the time from an end to the news of the placement that it caused."""
        ended_s = self._ended_s.get((executor, at_ms))
        if ended_s is None:
            self._told_s.setdefault((executor, at_ms), []).append(now_s)
        else:
            self.seat_s.append(now_s - ended_s)

    def forget_latencies(self) -> None:
        """Starts the distributions of latencies."""
        for collected in (self.submit_s, self.seat_s, self._ended_s, self._told_s):
            collected.clear()

    def _submitted(self, call: Call, reply: bytes, now_s: float) -> None:
        if AGAIN_OUTCOME in reply and call.again is not None:
            self.repeats.append(replace(call, encoded=call.again(), again=None))
            return
        self.submit_s.append(now_s - call.due_s)
        self._num_submitting -= len(call.ids)
        outcomes = SUBMIT_OUTCOME.findall(reply)
        if len(outcomes) != len(call.ids):
            raise _unexpected("submit", reply)
        for submitted, (status, executor) in zip(call.ids, outcomes, strict=True):
            if status == b"PLACED":
                if submitted not in self._seated_on:
                    self._seat(submitted, executor)
                    self.num_placed += 1
            elif status == b"REFUSED":
                if not self._scale.is_mixed:
                    raise _unexpected("submit", reply)
                self.num_refused += 1
            else:  # an event says so if it was dropped
                self.num_waiting += 1

    def _settled(self, call: Call, reply: bytes) -> None:
        outcome = SETTLED_OUTCOME.search(reply)
        if outcome is None or int(outcome[1]) != len(call.ids):
            raise _unexpected("settle", reply)
        for ended in call.ids:
            del self._held[self._seated_on.pop(ended)][ended]
        replied = REPLY_TIME.search(reply)
        assert replied is not None
        key = (call.executor, replied[1])
        self._ended_s[key] = call.due_s
        self.seat_s += (told_s - call.due_s for told_s in self._told_s.pop(key, ()))

    def _seat(self, placed_id: bytes, executor: bytes) -> None:
        self._seated_on[placed_id] = executor
        self._held[executor][placed_id] = None
        self._ending[executor].append(placed_id)
        self._num_free -= 1


def _unexpected(script: str, reply: bytes) -> TrafficError:
    return TrafficError(f"{script} was answered {reply.decode(errors='replace').splitlines()[:24]}")
