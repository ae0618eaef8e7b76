"""A small pure system around `LiveRequests`: a ledger, an executor, routers and clients, whose every step is a choice.

Nothing here waits or uses a clock. `World.actions` are the steps that can be next: a message or an answer arrives, a
sequence ends, a client leaves or comes to another router, a call is lost, a process fails. What takes a lease, a pause
or an audit happens only when nothing else is left. A world can be copied, and equal worlds have equal keys, so that
every order can be explored.

The ledger follows `router/ledger/scripts`, without fairness, rates and deadlines; the executor has one seat.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.types import (
    Adopted,
    Cancelled,
    CancelOutcome,
    CancelRequested,
    Duplicate,
    Ending,
    HandBackRefusal,
    LeaseLapsed,
    LedgerEvent,
    LedgerState,
    Lost,
    Placement,
    Queued,
    TakenOver,
)
from inflight.router.lifecycle.events import (
    AdoptedElsewhere,
    AttachAnswered,
    AttachResult,
    CancelFound,
    Detached,
    DrainWaiting,
    Event,
    Forgotten,
    HandBackAnswered,
    Leave,
    LifecycleState,
    NoExecutor,
    NotLinked,
    Rejected,
    RequeueReason,
    SequenceEnded,
    Unlinked,
    WithdrawAnswered,
)
from inflight.router.lifecycle.lifecycle import (
    CHANGING,
    CHANGING_FIELDS,
    Answer,
    Attach,
    CancelSequence,
    Effect,
    Effects,
    Forget,
    HandBack,
    Lifecycle,
    LiveRequests,
    PublishEnd,
    ReadOutput,
    ScheduleResubmit,
    ScheduleWithdraw,
    Send,
    Settle,
    SettleUnused,
    SubmitToLedger,
)
from inflight.v1 import types_pb2

EXECUTOR = "x"
MAX_ATTEMPTS = 2
LENGTH = types_pb2.FINISH_REASON_LENGTH
CANCELLED = types_pb2.FINISH_REASON_CANCELLED
PREEMPTED = types_pb2.FINISH_REASON_PREEMPTED
DRAINING = RequestError(Reason.DRAINING, "the router drains")
NO_EXECUTOR = RequestError(Reason.NO_EXECUTOR, "there is no executor")
AWAY = RequestError(Reason.STORE_UNAVAILABLE, "Redis is away")

Outcome = object
Asked = tuple[int | None, Adopted, bool]
Action = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """What a stream is to the machine."""

    has_progressed: bool = False
    is_complete: bool = False
    has_been_accepted: bool = False
    has_used_reservation: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A request in the ledger; `order` is its place in the queue, `generation` that of its placement."""

    state: LedgerState
    attempt: int
    owner: str
    order: int
    generation: int = 0
    failures: int = 0
    is_adopted: bool = False

    def placement(self, request_id: str) -> Placement:
        return Placement(request_id, self.attempt, EXECUTOR, self.generation)


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended; `generation` of its last placement, 0: it had none."""

    attempt: int
    was_cancelled: bool
    generation: int


@dataclass(slots=True)
class Ledger:
    """What the scripts do."""

    num_seats: int = 1
    entries: dict[str, Entry] = field(default_factory=dict)
    ended: dict[str, Ended | None] = field(default_factory=dict)
    living: frozenset[str] = frozenset()
    mail: dict[str, tuple[tuple[int, LedgerEvent], ...]] = field(default_factory=dict)
    is_suspended: bool = False
    generation: int = 1
    now: int = 0

    def copy(self) -> Ledger:
        return Ledger(
            self.num_seats,
            dict(self.entries),
            dict(self.ended),
            self.living,
            dict(self.mail),
            self.is_suspended,
            self.generation,
            self.now,
        )

    def tell(self, router: str, event: LedgerEvent) -> None:
        if router in self.living:
            self.mail[router] = (*self.mail.get(router, ()), (self.now, event))

    def board(self) -> None:
        """Places what fits, and tells the owners."""
        while not self.is_suspended:
            num_placed = sum(entry.state is LedgerState.PLACED for entry in self.entries.values())
            waiting = [name for name, entry in self.entries.items() if entry.state is LedgerState.WAITING]
            if num_placed >= self.num_seats or not waiting:
                return
            name = min(waiting, key=lambda one: self.entries[one].order)
            entry = self.entries[name]
            if entry.owner not in self.living:
                del self.entries[name]
                continue
            placed = self.entries[name] = dataclasses.replace(
                entry,
                state=LedgerState.PLACED,
                attempt=entry.attempt + 1,
                generation=self.generation,
                is_adopted=False,
            )
            self.tell(entry.owner, placed.placement(name))

    def standing(self, name: str, caller: str) -> Outcome:
        """How the caller's request stands; its placement is part of the answer, and no event."""
        entry = self.entries[name]
        if entry.state is not LedgerState.PLACED:
            return Queued(0)
        placement = entry.placement(name)
        self.mail[caller] = tuple(one for one in self.mail.get(caller, ()) if one[1] != placement)
        return Adopted(placement, ended=False) if entry.is_adopted else placement

    def submit(self, name: str, caller: str, digest: bool, is_served: bool, last_attempt: int) -> Outcome:
        entry = self.entries.get(name)
        is_same = digest or is_served
        if entry is not None:
            is_owner_free = not is_served or entry.owner == caller or entry.owner not in self.living
            if is_same and is_owner_free and (entry.owner != caller or entry.state is LedgerState.LOST):
                return self._take_over(name, entry, caller)
            if entry.owner != caller or entry.state is LedgerState.LOST:
                return Duplicate(entry.state)
            self.board()
            return self.standing(name, caller)
        attempt = last_attempt
        if name in self.ended:
            ended = self.ended[name]
            if not is_same:
                return Duplicate(LedgerState.ENDED)
            if ended is not None and not ended.was_cancelled and ended.generation:
                return Adopted(Placement(name, ended.attempt, EXECUTOR, ended.generation), ended=True)
            if is_served:
                return Duplicate(LedgerState.ENDED)
            attempt = max(attempt, 0 if ended is None else ended.attempt)
            del self.ended[name]
        self.entries[name] = Entry(LedgerState.WAITING, attempt, caller, self.now)
        self.board()
        return self.standing(name, caller)

    def _take_over(self, name: str, entry: Entry, caller: str) -> Outcome:
        if entry.owner != caller:
            self.tell(entry.owner, TakenOver(name))
        entry = dataclasses.replace(entry, owner=caller, is_adopted=entry.state is LedgerState.PLACED)
        if entry.state is LedgerState.LOST:
            entry = dataclasses.replace(entry, state=LedgerState.WAITING, generation=0)
        self.entries[name] = entry
        self.board()
        return self.standing(name, caller)

    def adopt(self, name: str, caller: str) -> Outcome:
        entry = self.entries.get(name)
        if entry is None:
            ended = self.ended.get(name)
            if ended is not None and ended.generation:
                return Adopted(Placement(name, ended.attempt, EXECUTOR, ended.generation), ended=True)
            return LedgerState.ENDED if name in self.ended else None
        if entry.state is not LedgerState.PLACED:
            return entry.state
        if entry.owner != caller:
            self.tell(entry.owner, TakenOver(name))
        self.entries[name] = dataclasses.replace(entry, owner=caller, is_adopted=True)
        return Adopted(entry.placement(name), ended=False)

    def settle(self, ending: Ending, caller: str) -> None:
        entry = self.entries.get(ending.request_id)
        if entry is None:
            self.ended.setdefault(ending.request_id, None)
            return
        is_anothers = entry.owner != caller and entry.owner in self.living
        if entry.attempt != ending.attempt or entry.state is LedgerState.WAITING or (ending.cancelled and is_anothers):
            return
        self._bury(ending.request_id, was_cancelled=ending.cancelled)
        self.board()

    def _bury(self, name: str, *, was_cancelled: bool) -> None:
        entry = self.entries.pop(name)
        self.ended[name] = Ended(entry.attempt, was_cancelled, entry.generation)

    def cancel(self, name: str, caller: str, is_own: bool) -> CancelOutcome:
        entry = self.entries.get(name)
        if entry is None:
            return CancelOutcome(LedgerState.ENDED if name in self.ended else None)
        is_anothers = entry.owner != caller and entry.owner in self.living
        if is_own and is_anothers:
            return CancelOutcome(None)
        is_placed = entry.state is LedgerState.PLACED
        if not is_placed:
            self._bury(name, was_cancelled=True)
        if is_anothers:
            self.tell(entry.owner, CancelRequested(name, entry.attempt) if is_placed else Cancelled(name))
        self.board()
        return CancelOutcome(entry.state, entry.placement(name) if is_placed else None, entry.owner, is_anothers)

    def hand_back(self, placement: Placement, why: RequeueReason, progressed: bool, caller: str) -> Outcome:
        name = placement.request_id
        entry = self.entries.get(name)
        if entry is None:
            return HandBackRefusal.STALE if name in self.ended else HandBackRefusal.UNKNOWN
        is_anothers = entry.owner != caller and (entry.state is LedgerState.WAITING or entry.owner in self.living)
        if entry.attempt != placement.attempt or is_anothers:
            return HandBackRefusal.STALE
        if entry.state is not LedgerState.WAITING:
            if entry.state is LedgerState.PLACED and why is not RequeueReason.PREEMPTED:
                self.is_suspended = True
            failures = 0 if progressed else entry.failures
            if why is RequeueReason.LOST and not progressed and placement.generation != self.generation:
                failures += 1
            if failures >= MAX_ATTEMPTS:
                self._bury(name, was_cancelled=False)
                self.board()
                return HandBackRefusal.EXHAUSTED
            self.entries[name] = dataclasses.replace(
                entry, state=LedgerState.WAITING, owner=caller, generation=0, failures=failures
            )
        self.board()
        return self.standing(name, caller)

    def lose(self, name: str) -> None:
        """The executor does not have it."""
        entry = self.entries[name]
        self.entries[name] = dataclasses.replace(entry, state=LedgerState.LOST)
        self.tell(entry.owner, Lost(name, entry.attempt, EXECUTOR, entry.generation))


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence on the executor: the router that reads it, and the end that it has come to."""

    router: str
    end: int | None = None


# To an executor and from it.
@dataclass(frozen=True, slots=True)
class Message:
    """`kind`: submit, cancel, attach; rejected, attached, not held, detached, finished."""

    kind: str
    request_id: str
    attempt: int
    reason: int = 0
    started: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """A call of the ledger that is under way; answered where `outcome` is there. `life` is its number."""

    kind: str
    request_id: str
    life: int | None = None
    args: tuple[object, ...] = ()
    outcome: tuple[object] | None = None
    at: int = 0


@dataclass(slots=True)
class Router:
    """One start of a router."""

    requests: LiveRequests
    lives: list[Lifecycle] = field(default_factory=list)
    calls: tuple[Sent, ...] = ()
    # Attaches without an answer, by request and attempt, in their order: the request's number, None for an adoption;
    # what was adopted; whether the first submit led to it.
    attaching: dict[tuple[str, int], tuple[Asked, ...]] = field(default_factory=dict)
    # Waits for its turn at once, and after a pause.
    due: tuple[tuple[str, int], ...] = ()
    retries: tuple[tuple[str, int], ...] = ()
    is_linked: bool = True
    missed_reply: bool = False
    since: dict[str, int] = field(default_factory=dict)
    # Endings told to the reader, of each request.
    num_ends: dict[int, int] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()

    @property
    def owes(self) -> bool:
        """Whether it waits for something."""
        return bool(self.requests.served or self.retries or self.attaching)

    def copy(self) -> Router:
        lives = [_copied(life) for life in self.lives]
        requests = LiveRequests(0.0)
        numbers = {id(life): number for number, life in enumerate(self.lives)}
        for name, life in self.requests.served.items():
            requests._served[name] = lives[numbers[id(life)]]
        requests._left |= self.requests._left
        requests._draining = self.requests._draining
        requests._to_resubmit = {lives[numbers[id(life)]]: None for life in self.requests._to_resubmit}
        return Router(
            requests,
            lives,
            self.calls,
            dict(self.attaching),
            self.due,
            self.retries,
            self.is_linked,
            self.missed_reply,
            dict(self.since),
            dict(self.num_ends),
            self.gone,
        )


def _copied(life: Lifecycle) -> Lifecycle:
    copy = Lifecycle(life.request_id, life.output, life.deadline, is_repeatable=life.is_repeatable)
    for name, value in zip(CHANGING_FIELDS, CHANGING(life), strict=True):
        setattr(copy, name, value)
    return copy


class Violation(AssertionError):
    """Something happened that must not."""


@dataclass(slots=True)
class World:
    """Everything. `faults` are the failures and the choices of clients that may still happen, each once. `seen`
    collects the transitions that happened."""

    ledger: Ledger = field(default_factory=Ledger)
    routers: dict[str, Router] = field(default_factory=dict)
    held: dict[tuple[str, int], Held] = field(default_factory=dict)
    # Attempts that this start of the executor has taken.
    taken: frozenset[tuple[str, int]] = frozenset()
    to_executor: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    to_router: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    has_lost_ledger: bool = False
    ever_sent: frozenset[tuple[str, int, int]] = frozenset()
    num_timers: int = 0
    seen: set[tuple[LifecycleState, type, LifecycleState]] = field(default_factory=set)

    def copy(self) -> World:
        return World(
            self.ledger.copy(),
            {name: router.copy() for name, router in self.routers.items()},
            dict(self.held),
            self.taken,
            dict(self.to_executor),
            dict(self.to_router),
            self.faults,
            self.has_lost_ledger,
            self.ever_sent,
            self.num_timers,
            self.seen,
        )

    # What can be next ---------------------------------------------------------------------------------------------

    def is_at_rest(self) -> bool:
        """Whether nothing is left to do but what clients may choose."""
        return not any(action[0] != "choose" or str(action[1]).startswith("leave_all") for action in self.actions())

    def actions(self) -> list[Action]:
        """The steps that can be next; only timers where nothing else is left."""
        urgent = list(self._urgent())
        chosen = list(self._chosen())
        if urgent:
            return urgent + chosen
        draining = [action for action in chosen if str(action[1]).startswith("leave_all")]
        if draining:
            return draining
        return [("timer",), *chosen] if self._owes() else chosen

    def _urgent(self) -> Iterator[Action]:
        for name, router in self.routers.items():
            if self.to_executor.get(name):
                yield "to executor", name
            if self.to_router.get(name):
                yield "to router", name
            mail = self.ledger.mail.get(name)
            if mail and not self._is_held_back(router, mail[0][1]):
                yield "mail", name
                if self._is_late(router, *mail[0]):
                    yield "mail of now", name
            for number, call in enumerate(router.calls):
                yield ("answer" if call.outcome else "call"), name, number
            for number in range(len(router.due)):
                yield "due", name, number
            for number, life in enumerate(router.lives):
                if life.has_ended and life.is_served and not life.is_abandoned:
                    yield "read end", name, number
            if not router.is_linked:
                yield "link", name
        if self.ledger.is_suspended and all(router.is_linked for router in self.routers.values()):
            yield ("report",)
        for (name, attempt), held in self.held.items():
            if held.end is None:
                yield "finish", name, attempt

    def _is_held_back(self, router: Router, event: LedgerEvent) -> bool:
        return isinstance(event, TakenOver | Cancelled) and any(
            call.kind in ("submit", "resubmit", "adopt") and call.request_id == event.request_id
            for call in router.calls
        )

    def _is_late(self, router: Router, at: int, event: LedgerEvent) -> bool:
        """Whether an event is of the time before this router's ownership."""
        return isinstance(event, TakenOver | Cancelled) and at < router.since.get(event.request_id, 0)

    def _chosen(self) -> Iterator[Action]:
        for fault in dict.fromkeys(self.faults):
            kind, _, argument = fault.partition(" ")
            match kind:
                case "leave" | "cancel" | "preempt":
                    if self._can(kind, argument):
                        yield "choose", fault
                case "repeat" | "resume" | "crash" | "unlink" | "grace" | "stop":
                    target = self.routers.get(argument.split()[-1])
                    wants_link = {"unlink": True, "grace": False}
                    if target is not None and wants_link.get(kind, target.is_linked) == target.is_linked:
                        yield "choose", fault
                case "lost" | "unanswered":
                    for number, call in enumerate(self.routers[argument].calls if argument in self.routers else ()):
                        if call.outcome is None and call.kind != "settle":
                            yield "choose", fault, number
                case "leave_all":
                    if argument in self.routers:
                        yield "choose", fault
                case _:
                    yield "choose", fault

    def _can(self, kind: str, name: str) -> bool:
        if kind == "leave":
            return any(name in router.requests.served for router in self.routers.values())
        if kind == "preempt":
            return any(key[0] == name and held.end is None for key, held in self.held.items())
        return bool(self.routers)

    # Steps --------------------------------------------------------------------------------------------------------

    def step(self, action: Action) -> None:
        """Does one of `actions`."""
        self.ledger.now += 1
        _STEPS[str(action[0])](self, *action[1:])

    def arrive(self, request_id: str, router_id: str, *, digest: bool) -> None:
        """A client submits a request."""
        router = self.routers[router_id]
        if request_id in router.requests.served:
            return  # the service finds the request that it repeats
        life = Lifecycle(request_id, Output(), is_repeatable=digest)
        router.lives.append(life)
        self._execute(router_id, self._observed(life, lambda: router.requests.submit(life), object))

    def _send_next(self, router_id: str) -> None:
        message, *rest = self.to_executor[router_id]
        self.to_executor[router_id] = tuple(rest)
        key = (message.request_id, message.attempt)
        held = self.held.get(key)
        match message.kind:
            case "submit" if key in self.taken:
                self._reply(router_id, "rejected", key)
            case "submit":
                self.taken |= {key}
                self.held[key] = Held(router_id)
            case "cancel" if held is not None and held.end is None:
                self._end(key, message.reason)
            case "attach" if held is None:
                self._reply(router_id, "not held", key)
            case "attach":
                assert held is not None
                if held.router != router_id and held.end is None:
                    self._reply(held.router, "detached", key)
                self.held[key] = dataclasses.replace(held, router=router_id)
                self._reply(router_id, "attached", key)
                if held.end is not None:
                    self._reply(router_id, "finished", key, held.end)

    def _reply(self, router_id: str, kind: str, key: tuple[str, int], reason: int = 0) -> None:
        router = self.routers.get(router_id)
        if router is not None and router.is_linked:
            self.to_router[router_id] = (*self.to_router.get(router_id, ()), Message(kind, *key, reason))

    def _end(self, key: tuple[str, int], reason: int) -> None:
        held = self.held[key]
        self.held[key] = dataclasses.replace(held, end=reason)
        self._reply(held.router, "finished", key, reason)

    def _finish(self, request_id: str, attempt: int) -> None:
        self._end((request_id, attempt), LENGTH)

    def _receive(self, router_id: str) -> None:
        message, *rest = self.to_router[router_id]
        self.to_router[router_id] = tuple(rest)
        router, key = self.routers[router_id], (message.request_id, message.attempt)
        if message.kind in ("attached", "not held"):
            found, *others = router.attaching.pop(key, (None,))
            if others:
                router.attaching[key] = tuple(others)
            if found is not None:
                result = AttachResult.ATTACHED if message.kind == "attached" else AttachResult.NOT_HELD
                self._attached(router_id, found, result)
            elif message.kind == "attached":
                self._send(router_id, "cancel", key, CANCELLED)
            return
        for life in list(router.lives):
            if life.request_id == message.request_id and life.is_current(message.attempt):
                self._link_event(router_id, life, message)

    def _link_event(self, router_id: str, life: Lifecycle, message: Message) -> None:
        match message.kind:
            case "rejected":
                self._tell(router_id, life, Rejected(message.attempt))
            case "detached":
                self._tell(router_id, life, Detached(message.attempt))
            case "finished":
                has_token = message.reason == LENGTH
                life.output = Output(has_progressed=has_token, has_been_accepted=True)
                self._tell(router_id, life, SequenceEnded(message.attempt, message.reason))

    def _attached(self, router_id: str, found: Asked, result: AttachResult) -> None:
        number, adopted, is_first = found
        router = self.routers[router_id]
        key = (adopted.placement.request_id, adopted.placement.attempt)
        if number is not None:
            life = router.lives[number]
            self._tell(router_id, life, AttachAnswered(adopted, result, is_first, has_started=True))
            is_read = life.is_current(key[1]) or life.state is LifecycleState.LEFT
            if result is AttachResult.ATTACHED and not is_read:
                self._send(router_id, "cancel", key, CANCELLED)
        elif result is AttachResult.ATTACHED:
            life = Lifecycle(key[0], Output(has_been_accepted=True), is_repeatable=True)
            router.lives.append(life)
            event = AdoptedElsewhere(adopted, has_started=True)
            self._execute(router_id, self._observed(life, lambda: router.requests.adopt(life, event), AdoptedElsewhere))
        elif result is AttachResult.NOT_HELD and not adopted.ended:
            self.ledger.settle(Ending(*key, cancelled=True), router_id)

    def _read_mail(self, router_id: str, *, is_tie: bool = False) -> None:
        """Reads an event. `is_tie`: it is of the millisecond in which this router took the request."""
        (at, event), *rest = self.ledger.mail[router_id]
        self.ledger.mail[router_id] = tuple(rest)
        router = self.routers[router_id]
        if is_tie and isinstance(event, TakenOver):
            event = TakenOver(event.request_id, is_certain=False)
        elif self._is_late(router, at, event):
            return
        life = None if isinstance(event, LeaseLapsed) else router.requests.served.get(event.request_id)
        if life is None:
            self._execute(router_id, router.requests.on_ledger_event(event))
        else:
            served = life
            self._execute(
                router_id, self._observed(served, lambda: router.requests.on_ledger_event(event), type(event))
            )

    def _run_call(self, router_id: str, number: int) -> None:
        router = self.routers[router_id]
        call = router.calls[number]
        outcome = self._outcome_of(router_id, call)
        if call.kind == "settle":  # its answer says nothing
            self._replace_call(router, number)
            return
        self._replace_call(router, number, dataclasses.replace(call, outcome=(outcome,), at=self.ledger.now))

    def _outcome_of(self, router_id: str, call: Sent) -> Outcome:
        ledger, name = self.ledger, call.request_id
        match call.kind, call.args:
            case (("submit" | "resubmit"), (bool(digest), bool(is_served), int(last_attempt))):
                return ledger.submit(name, router_id, digest, is_served, last_attempt)
            case "hand back", (Placement() as placement, RequeueReason() as why, bool(progressed)):
                return ledger.hand_back(placement, why, progressed, router_id)
            case "withdraw", _:
                return ledger.cancel(name, router_id, True)
            case "cancel", _:
                return ledger.cancel(name, router_id, False)
            case "adopt", _:
                return ledger.adopt(name, router_id)
            case "settle", (Ending() as ending,):
                ledger.settle(ending, router_id)
                return None
        raise AssertionError(call)

    def _replace_call(self, router: Router, number: int, *calls: Sent) -> None:
        router.calls = (*router.calls[:number], *calls, *router.calls[number + 1 :])

    def _take_answer(self, router_id: str, number: int) -> None:
        router = self.routers[router_id]
        call = router.calls[number]
        assert call.outcome is not None
        self._replace_call(router, number)
        (outcome,) = call.outcome
        if not isinstance(outcome, RequestError) and router.missed_reply:
            router.missed_reply = False
            self._lapse(router_id)
        if isinstance(outcome, Placement | Queued | Adopted) and call.kind in ("submit", "resubmit", "adopt"):
            router.since[call.request_id] = max(call.at, router.since.get(call.request_id, 0))
        self._answered(router_id, call, outcome)

    def _lapse(self, router_id: str) -> None:
        router = self.routers[router_id]
        before = [(life, life.state) for life in router.requests.served.values()]
        effects = router.requests.on_ledger_event(LeaseLapsed())
        self.seen |= {(state, LeaseLapsed, life.state) for life, state in before}
        self._execute(router_id, effects)

    def _answered(self, router_id: str, call: Sent, outcome: Outcome) -> None:
        router = self.routers[router_id]
        requests = router.requests
        life = None if call.life is None else router.lives[call.life]
        match call.kind:
            case "submit":
                assert life is not None
                self._execute(
                    router_id,
                    self._observed(life, lambda: requests.submit_answered(life, outcome), "SubmitAnswered"),  # type: ignore[arg-type]
                )
            case "resubmit":
                assert life is not None
                self._execute(
                    router_id,
                    self._observed(life, lambda: requests.resubmit_answered(life, outcome, 0.0), "ResubmitAnswered"),  # type: ignore[arg-type]
                )
            case "hand back":
                assert life is not None
                placement, why, _ = call.args
                if isinstance(outcome, RequestError):  # again, until the ledger answers
                    router.calls += (dataclasses.replace(call, outcome=None),)
                else:
                    event = HandBackAnswered(placement, why, outcome, MAX_ATTEMPTS)  # type: ignore[arg-type]
                    self._tell(router_id, life, event)
            case "withdraw":
                assert life is not None
                found = outcome if isinstance(outcome, CancelOutcome) else None
                self._tell(router_id, life, WithdrawAnswered(found))
            case "cancel" if isinstance(outcome, CancelOutcome) and outcome.state is not None:
                served = requests.served.get(call.request_id)
                if served is not None:
                    self._tell(router_id, served, CancelFound(outcome.state))
                elif outcome.placement is not None and not outcome.owner_notified:
                    self._send(router_id, "cancel", (call.request_id, outcome.placement.attempt), CANCELLED)
            case "adopt" if isinstance(outcome, Adopted):
                self._attach(router_id, None, outcome, is_first=False)
            case "settle" if isinstance(outcome, RequestError):
                router.calls += (dataclasses.replace(call, outcome=None),)

    def _take_turn(self, router_id: str, number: int) -> None:
        router = self.routers[router_id]
        kind, life_number = router.due[number]
        router.due = (*router.due[:number], *router.due[number + 1 :])
        life = router.lives[life_number]
        if kind == "resubmit":
            effects = self._observed(life, lambda: router.requests.resubmit_due(life), "ResubmitDue")
            if effects:
                args = (life.is_repeatable, True, life.attempt)
                router.calls += (Sent("resubmit", life.request_id, life_number, args),)
        elif self._observed(life, lambda: router.requests.withdraw_due(life), "WithdrawDue"):
            router.calls += (Sent("withdraw", life.request_id, life_number),)

    def _read_end(self, router_id: str, number: int) -> None:
        router = self.routers[router_id]
        life = router.lives[number]
        self._execute(router_id, self._observed(life, lambda: router.requests.release(life), "Release"))

    def _link(self, router_id: str) -> None:
        self.routers[router_id].is_linked = True

    def _report(self) -> None:
        self.ledger.is_suspended = False
        self.ledger.board()

    # Choices of clients, and failures ------------------------------------------------------------------------------

    def _choose(self, fault: str, number: int = 0) -> None:
        remaining = list(self.faults)
        remaining.remove(fault)
        self.faults = tuple(remaining)
        kind, *arguments = fault.split()
        _FAULTS[kind](self, *arguments, *((number,) if kind in ("lost", "unanswered") else ()))

    def _leave(self, request_id: str) -> None:
        for router_id, router in self.routers.items():
            life = router.requests.served.get(request_id)
            if life is not None:
                effects = self._observed(life, lambda r=router, one=life: r.requests.release(one), "Release")  # type: ignore[misc]
                self._execute(router_id, effects)

    def _cancel(self, request_id: str) -> None:
        router = next(reversed(self.routers.values()))
        router.calls += (Sent("cancel", request_id),)

    def _preempt(self, request_id: str) -> None:
        key = next(key for key, held in self.held.items() if key[0] == request_id and held.end is None)
        self._end(key, PREEMPTED)
        del self.held[key]

    def _repeat(self, request_id: str, router_id: str) -> None:
        self.arrive(request_id, router_id, digest=True)

    def _resume(self, request_id: str, router_id: str) -> None:
        router = self.routers[router_id]
        if request_id not in router.requests.served:
            router.calls += (Sent("adopt", request_id),)

    def _crash_router(self, router_id: str) -> None:
        self._unlink(router_id, tells=False)
        del self.routers[router_id]
        self.to_router.pop(router_id, None)
        self.ledger.living -= {router_id}
        self.ledger.mail.pop(router_id, None)

    def _stop_router(self, router_id: str) -> None:
        """The router drains, and goes on its way when it has waited long enough."""
        router = self.routers[router_id]
        before = [(life, life.state) for life in router.requests.served.values()]
        effects = router.requests.drain_waiting(DRAINING)
        self.seen |= {(state, DrainWaiting, life.state) for life, state in before}
        self._execute(router_id, effects)
        self.faults += (f"leave_all {router_id}",)

    def _leave_all(self, router_id: str) -> None:
        router = self.routers[router_id]
        before = [(life, life.state) for life in router.requests.served.values()]
        effects = router.requests.leave_all(DRAINING)
        self.seen |= {(state, Leave, life.state) for life, state in before}
        self._execute(router_id, effects)
        self._crash_router(router_id)

    def _grace(self, router_id: str) -> None:
        """No executor has been linked for the grace period."""
        router = self.routers[router_id]
        before = [(life, life.state) for life in router.requests.served.values()]
        effects = router.requests.no_executor(NO_EXECUTOR)
        self.seen |= {(state, NoExecutor, life.state) for life, state in before}
        self._execute(router_id, effects)

    def _crash_executor(self) -> None:
        for router_id in self.routers:
            self._unlink(router_id)
        self.held, self.taken = {}, frozenset()
        self.ledger.generation += 1
        self._lose_all_but(())

    def _unlink(self, router_id: str, *, tells: bool = True) -> None:
        router = self.routers[router_id]
        router.is_linked = False
        self.to_executor[router_id] = self.to_router[router_id] = ()
        for key, held in self.held.items():
            if held.router == router_id:
                self.held[key] = dataclasses.replace(held, router="")
        if not tells:
            return
        for life in list(router.lives):
            if life.current_attempt:
                self._tell(router_id, life, Unlinked(life.current_attempt))
        attaching, router.attaching = router.attaching, {}
        for found in itertools.chain.from_iterable(attaching.values()):
            self._attached(router_id, found, AttachResult.LINK_LOST)

    def _lose_call(self, router_id: str, number: int) -> None:
        """The call does not reach the ledger."""
        router = self.routers[router_id]
        router.missed_reply = True
        self._replace_call(router, number, dataclasses.replace(router.calls[number], outcome=(AWAY,)))

    def _lose_answer(self, router_id: str, number: int) -> None:
        """The ledger does what it is asked for, and its answer is lost."""
        self._run_call(router_id, number)
        self._lose_call(router_id, number)

    def _lose_ledger(self) -> None:
        """Redis restarts empty."""
        self.ledger.entries, self.ledger.ended = {}, {}
        self.ledger.mail = {}
        self.has_lost_ledger = True
        for router_id in list(self.routers):
            self._lapse(router_id)

    # What happens when nothing else is left: pauses, leases, audits -------------------------------------------------

    def _owes(self) -> bool:
        return bool(self.ledger.entries) or any(
            router.requests.served or router.retries or router.attaching for router in self.routers.values()
        )

    def _timer(self) -> None:
        self.num_timers += 1
        if self.num_timers > 12:
            raise Violation("it does not come to an end")
        self._audit()
        for router_id, router in list(self.routers.items()):
            router.due, router.retries = router.due + router.retries, ()
            for life in router.requests.waiting():
                entry = self.ledger.entries.get(life.request_id)
                if entry is None or entry.owner != router_id or entry.state is not LedgerState.WAITING:
                    self._tell(router_id, life, Forgotten())
            attaching, router.attaching = router.attaching, {}
            for found in itertools.chain.from_iterable(attaching.values()):
                self._attached(router_id, found, AttachResult.LINK_LOST)
        for name, entry in list(self.ledger.entries.items()):
            if entry.owner not in self.ledger.living and entry.state is not LedgerState.PLACED:
                del self.ledger.entries[name]
        self.ledger.is_suspended = False
        self.ledger.board()

    def _audit(self) -> None:
        """A report of the executor; what is held there for nothing is cancelled."""
        running = [key for key, held in self.held.items() if held.end is None]
        for key in running:
            entry = self.ledger.entries.get(key[0])
            is_orphan = self.held[key].router not in self.routers
            if entry is None and key[0] not in self.ledger.ended and not is_orphan:
                self.ledger.entries[key[0]] = Entry(LedgerState.PLACED, key[1], "", 0, self.ledger.generation)
            elif entry is None or entry.attempt > key[1] or is_orphan:
                self._end(key, CANCELLED)
        self._lose_all_but(key for key, held in self.held.items() if held.end is None)

    def _lose_all_but(self, keys: object) -> None:
        held = set(keys)  # type: ignore[call-overload]
        for name, entry in list(self.ledger.entries.items()):
            if entry.state is LedgerState.PLACED and (name, entry.attempt) not in held:
                self.ledger.lose(name)

    # Effects --------------------------------------------------------------------------------------------------------

    def _observed(self, life: Lifecycle, work: Callable[[], Effects], event: object) -> Effects:
        before = life.state
        effects = work()
        self.seen.add((before, event, life.state))  # type: ignore[arg-type]
        return effects

    def _tell(self, router_id: str, life: Lifecycle, event: Event) -> None:
        requests = self.routers[router_id].requests
        self._execute(router_id, self._observed(life, lambda: requests.apply(life, event), type(event)))

    def _send(self, router_id: str, kind: str, key: tuple[str, int], reason: int = 0) -> None:
        if self.routers[router_id].is_linked:
            self.to_executor[router_id] = (*self.to_executor.get(router_id, ()), Message(kind, *key, reason))

    def _attach(self, router_id: str, number: int | None, adopted: Adopted, *, is_first: bool) -> None:
        router, placement = self.routers[router_id], adopted.placement
        if not router.is_linked:
            self._attached(router_id, (number, adopted, is_first), AttachResult.LINK_LOST)
        elif placement.generation != self.ledger.generation:
            self._attached(router_id, (number, adopted, is_first), AttachResult.NOT_HELD)
        else:
            key = (placement.request_id, placement.attempt)
            router.attaching[key] = (*router.attaching.get(key, ()), (number, adopted, is_first))
            self._send(router_id, "attach", key)

    def _execute(self, router_id: str, effects: Effects) -> None:
        for effect in effects:
            self._execute_one(router_id, effect)

    def _execute_one(self, router_id: str, effect: Effect) -> None:
        router = self.routers[router_id]
        match effect:
            case SubmitToLedger(life, is_served=False):
                args = (life.is_repeatable, False, life.attempt)
                router.calls += (Sent("submit", life.request_id, router.lives.index(life), args),)
            case ScheduleResubmit(life, is_retry):
                self._queue(router, ("resubmit", router.lives.index(life)), is_retry)
            case ScheduleWithdraw(life, is_retry):
                self._queue(router, ("withdraw", router.lives.index(life)), is_retry)
            case Attach(life, adopted, is_first):
                self._attach(router_id, router.lives.index(life), adopted, is_first=is_first)
            case Send(life, placement):
                self._place(router_id, life, placement)
            case CancelSequence(_, request_id, attempt, reason):
                self._send(router_id, "cancel", (request_id, attempt), reason)
            case HandBack(life, placement, why):
                held = self.held.get((life.request_id, placement.attempt))
                if (
                    why is RequeueReason.LOST
                    and router.is_linked
                    and held
                    and (held.router, held.end) == (router_id, None)
                ):
                    raise Violation(f"attempt {placement.attempt} of {life.request_id} runs and is handed back")
                progress = (placement, why, _output(life).has_progressed)
                router.calls += (Sent("hand back", life.request_id, router.lives.index(life), progress),)
            case Settle(life, attempt):
                ending = Ending(life.request_id, attempt, 0, 0, cancelled=life.was_cancelled)
                router.calls += (Sent("settle", life.request_id, None, (ending,)),)
            case SettleUnused(ending):
                router.calls += (Sent("settle", ending.request_id, None, (ending,)),)
            case PublishEnd(life):
                number = router.lives.index(life)
                router.num_ends[number] = router.num_ends.get(number, 0) + 1
                if router.num_ends[number] > 1:
                    raise Violation(f"{life.request_id} ended twice")
            case Forget(life):
                number = router.lives.index(life)
                if number in router.gone:
                    raise Violation(f"{life.request_id} was forgotten twice")
                router.gone |= {number}
            case ReadOutput(life):
                life.output = Output(has_been_accepted=True)
            case Answer(life):
                pass

    def _queue(self, router: Router, item: tuple[str, int], is_retry: bool) -> None:
        if is_retry:
            router.retries += (item,)
        else:
            router.due += (item,)

    def _place(self, router_id: str, life: Lifecycle, placement: Placement) -> None:
        router = self.routers[router_id]
        if life.is_cancelled:
            raise Violation(f"{life.request_id} is cancelled and sent")
        sent = (router_id, router.lives.index(life), placement.attempt)
        if sent in self.ever_sent:
            raise Violation(f"attempt {placement.attempt} of {life.request_id} is sent twice")
        self.ever_sent |= {sent}
        life.output = dataclasses.replace(_output(life), has_progressed=False)
        if not router.is_linked or placement.generation != self.ledger.generation:
            self._tell(router_id, life, NotLinked(placement.attempt))
            return
        self._send(router_id, "submit", (life.request_id, placement.attempt))

    # Ends ------------------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Nothing is left to do: nothing may be owed."""
        if self.ledger.entries:
            raise Violation(f"the ledger still has {self.ledger.entries}")
        for router_id, router in self.routers.items():
            if router.requests.served:
                raise Violation(f"{router_id} still serves {[(one.request_id, one.state) for one in router.lives]}")
            for number, life in enumerate(router.lives):
                if number not in router.gone:
                    raise Violation(f"{life.request_id} was not forgotten")
                if not life.has_ended and not life.is_abandoned:
                    raise Violation(f"{life.request_id} has no end")
                if life.calls:
                    raise Violation(f"{life.request_id}: {life.calls} has no answer")
        running = [key for key, held in self.held.items() if held.end is None]
        if running:
            raise Violation(f"the executor still runs {running}")

    def check_read(self, request_id: str) -> None:
        """Nothing has failed and no client has left: of all calls of a request, one has got it to its end."""
        lives = [life for router in self.routers.values() for life in router.lives if life.request_id == request_id]
        if not any(life.end is not None and life.end.reason == LENGTH for life in lives):
            raise Violation(f"no call of {request_id} got it: {[life.error for life in lives]}")
        errors = {life.error.reason for life in lives if life.error is not None}
        if not errors <= {Reason.TAKEN_OVER}:
            raise Violation(f"calls of {request_id} were told {errors}")

    def key(self) -> Hashable:
        """Equal for worlds that can do the same; numbers that only grow do not count."""
        times = sorted(
            {at for mail in self.ledger.mail.values() for at, _ in mail}
            | {entry.order for entry in self.ledger.entries.values()}
            | {at for router in self.routers.values() for at in router.since.values()}
            | {call.at for router in self.routers.values() for call in router.calls}
        )
        rank = {at: number for number, at in enumerate(times)}
        ledger = self.ledger
        return (
            tuple(
                sorted(
                    (name, e.state.value, e.attempt, e.owner, rank[e.order], e.generation, e.failures, e.is_adopted)
                    for name, e in ledger.entries.items()
                )
            ),
            tuple(sorted((name, _plain(end)) for name, end in ledger.ended.items())),
            ledger.living,
            tuple((name, tuple((rank[at], event) for at, event in mail)) for name, mail in sorted(ledger.mail.items())),
            ledger.is_suspended,
            ledger.generation,
            tuple((name, _router_key(router, rank)) for name, router in sorted(self.routers.items())),
            tuple(sorted((key, held.router, held.end or 0) for key, held in self.held.items())),
            self.taken,
            tuple(sorted(self.to_executor.items())),
            tuple(sorted(self.to_router.items())),
            self.faults,
            self.num_timers,
        )


def _plain(ended: Ended | None) -> tuple[int, bool, int]:
    return (0, False, 0) if ended is None else (ended.attempt, ended.was_cancelled, ended.generation)


def _router_key(router: Router, rank: dict[int, int]) -> Hashable:
    return (
        tuple(_life_key(life) for life in router.lives),
        tuple(
            sorted((c.kind, c.request_id, c.life or 0, repr(c.args), repr(c.outcome), rank[c.at]) for c in router.calls)
        ),
        tuple(
            sorted(
                (key, tuple((one[0] or -1, one[1].ended) for one in asked)) for key, asked in router.attaching.items()
            )
        ),
        router.due,
        router.retries,
        router.is_linked,
        router.missed_reply,
        tuple(sorted((name, rank[at]) for name, at in router.since.items())),
        router.gone,
    )


def _life_key(life: Lifecycle) -> Hashable:
    return (
        life.request_id,
        life.state,
        life.calls,
        life.placement,
        life.attempt,
        life.admitted is not None,
        life.end,
        life.error is None or life.error.reason,
        life.is_abandoned,
        life.is_cancelled,
        life.is_known_uncancelled,
        min(life.consecutive_preemptions, 2),
        life.output,
    )


def _output(life: Lifecycle) -> Output:
    assert isinstance(life.output, Output)
    return life.output


_STEPS: dict[str, Callable[..., None]] = {
    "to executor": World._send_next,
    "to router": World._receive,
    "mail": World._read_mail,
    "mail of now": lambda world, name: world._read_mail(name, is_tie=True),
    "call": World._run_call,
    "answer": World._take_answer,
    "due": World._take_turn,
    "read end": World._read_end,
    "link": World._link,
    "report": World._report,
    "finish": World._finish,
    "timer": World._timer,
    "choose": World._choose,
}

_FAULTS: dict[str, Callable[..., None]] = {
    "leave": World._leave,
    "cancel": World._cancel,
    "preempt": World._preempt,
    "repeat": World._repeat,
    "resume": World._resume,
    "crash": World._crash_router,
    "executor": World._crash_executor,
    "unlink": World._unlink,
    "lost": World._lose_call,
    "unanswered": World._lose_answer,
    "empty": World._lose_ledger,
    "grace": World._grace,
    "stop": World._stop_router,
    "leave_all": World._leave_all,
}


def new_world(*faults: str, num_routers: int = 2, num_seats: int = 1) -> World:
    """Routers r0, r1, …; one of the `faults` each may happen once."""
    names = [f"r{number}" for number in range(num_routers)]
    world = World(faults=tuple(faults))
    world.ledger.living = frozenset(names)
    world.ledger.num_seats = num_seats
    for name in names:
        world.routers[name] = Router(LiveRequests(0.0))
    return world
