"""The admission store without waiting: what `AdmissionStore` is to a router, to a modelled one.

The scripts, the replies and the rules of calling again are the real ones. Replies reach the router only if it is still
there: so it may vanish between any two operations, and between an operation and its reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.bench.redis.wire import command, encode
from inflight.bench.simulation.store_link import StoreLink
from inflight.bench.timeline.timeline import US_PER_MS, Process
from inflight.router.store.codec import (
    Argument,
    Reply,
    hand_back_args,
    parse_cancel,
    parse_event,
    parse_hand_back,
    parse_outcomes,
    parse_overdue_reports,
    parse_reports,
    parse_submit,
    report_args,
    settle_args,
    submit_args,
    verify_args,
)
from inflight.router.store.settings import StoreSettings
from inflight.router.store.types import (
    Adopted,
    Attempt,
    CancelOutcome,
    Demand,
    Dropped,
    Duplicate,
    Ending,
    ExecutorReport,
    HandBackDetails,
    HandBackRefusal,
    LeaseLapsed,
    Placement,
    PoolListener,
    Queued,
    Refused,
    ReportOutcome,
    StoreEvent,
)

MAX_ENTRIES = 256
MAX_ROUNDS = 64
# As `StoreSettings`, without their jitter: routers begin at different times.
RENEW_US, REAP_US = 1_500 * US_PER_MS, 400 * US_PER_MS

OwnEvent = Placement | Dropped
SubmitOutcome = Placement | Queued | Refused | Duplicate | Dropped | Adopted
HandBackOutcome = Placement | Queued | Dropped | HandBackRefusal
OnFailure = Callable[[], None]


@dataclass(slots=True)
class _Operation:
    """One operation on its way. `own_id` is the request whose placement or drop is part of the result."""

    name: str
    num_args: int
    args: bytes
    on_result: Callable[[Reply, OwnEvent | None], None]
    on_failure: OnFailure
    own_id: str | None = None
    own_event: OwnEvent | None = None
    # The mailboxes it has needed beyond those of the peers.
    owners: set[str] = field(default_factory=set)
    num_rounds: int = 0


class Ledger:
    """One router's view of the pool. Each operation answers by exactly one of its callbacks, later."""

    def __init__(
        self,
        link: StoreLink,
        process: Process,
        router_id: str,
        settings: StoreSettings,
        on_event: Callable[[StoreEvent], None],
    ) -> None:
        self._link = link
        self._process = process
        self.router_id = router_id
        self._settings = settings
        self._on_event = on_event
        self._peers: frozenset[str] = frozenset()
        self._listener: PoolListener | None = None
        self._is_registered = False
        # A reply got lost that may have said that the pool had forgotten this router.
        self._may_have_lapsed = False
        self._beginnings: dict[tuple[str, frozenset[str]], tuple[int, bytes]] = {}
        self._mailbox = link.keys.mailbox(router_id)
        self._cursor = "0-0"
        self._is_reading = False
        self._has_mail = False
        link.listen(self._mailbox, lambda: process.run(self._read_mailbox))

    def start(self, phase_us: int) -> None:
        """Renews and reaps from now on; `phase_us` keeps routers apart."""
        self.renew()
        self._link.timeline.after(phase_us % RENEW_US, self._process.run, self._renew_always)
        self._link.timeline.after(phase_us % REAP_US, self._process.run, self._reap_always)

    def close(self) -> None:
        """The router is gone: its mailbox stays unread."""
        self._link.unlisten(self._mailbox)

    # Operations ------------------------------------------------------------------------------------------------

    def submit(self, demand: Demand, on_result: Callable[[SubmitOutcome], None], on_failure: OnFailure) -> None:
        def answer(reply: Reply, own: OwnEvent | None) -> None:
            on_result(own or parse_submit(demand.request_id, reply))

        args = ["", *submit_args(demand, self._settings)]
        self._operate("submit", args, answer, on_failure, own_id=demand.request_id)

    def settle(self, endings: Sequence[Ending], on_result: Callable[[int], None], on_failure: OnFailure) -> None:
        self._operate("settle", settle_args(endings), lambda reply, _: on_result(reply.values[0]), on_failure)

    def cancel(
        self, request_id: str, is_own: bool, on_result: Callable[[CancelOutcome], None], on_failure: OnFailure
    ) -> None:
        args: list[Argument] = ["", request_id, int(is_own)]
        self._operate("cancel", args, lambda reply, _: on_result(parse_cancel(request_id, reply)), on_failure)

    def hand_back(
        self,
        request_id: str,
        attempt: int,
        max_attempts: int,
        details: HandBackDetails,
        on_result: Callable[[HandBackOutcome], None],
        on_failure: OnFailure,
    ) -> None:
        """Calls `AdmissionStore.hand_back`."""

        def answer(reply: Reply, own: OwnEvent | None) -> None:
            on_result(own or parse_hand_back(request_id, reply))

        args = hand_back_args(request_id, attempt, max_attempts, details)
        self._operate("hand_back", args, answer, on_failure, own_id=request_id)

    def absolve(self, request_id: str, attempt: int) -> None:
        """Calls `AdmissionStore.absolve`. If it fails, the request stays under suspicion."""
        self._operate("absolve", [request_id, attempt], lambda reply, _: None, _ignore)

    def report_all(
        self,
        reports: Sequence[ExecutorReport],
        on_result: Callable[[Sequence[ReportOutcome]], None],
        on_failure: OnFailure,
    ) -> None:
        """Calls `AdmissionStore.report_all`."""
        args = [arg for report in reports for arg in report_args(report, self._settings)]
        self._operate("report", args, lambda reply, _: on_result(parse_reports(reply)), on_failure)

    def listen(self, listener: PoolListener) -> None:
        """As `AdmissionStore.listen`."""
        self._listener = listener

    def find_forgotten(
        self,
        waiting: Sequence[Attempt],
        on_result: Callable[[frozenset[str]], None],
        on_failure: OnFailure | None = None,
    ) -> None:
        """Calls `AdmissionStore.find_forgotten`."""
        args = verify_args(waiting)
        self._operate("verify", args, lambda reply, _: on_result(frozenset(reply.values[0])), on_failure or _ignore)

    def renew(self) -> None:
        self._operate("renew", [], self._renewed, _ignore)

    def reap(self) -> None:
        self._operate("reap", [], self._reaped, _ignore)

    # How a script is called ------------------------------------------------------------------------------------

    def _renew_always(self) -> None:
        self._link.timeline.after(RENEW_US, self._process.run, self._renew_always)
        self.renew()

    def _reap_always(self) -> None:
        self._link.timeline.after(REAP_US, self._process.run, self._reap_always)
        self.reap()

    def _renewed(self, reply: Reply, own: OwnEvent | None) -> None:
        self._peers = frozenset(reply.values[0]) - {self.router_id}
        if self._listener is not None:
            self._listener.on_routers(self._peers)

    def _reaped(self, reply: Reply, own: OwnEvent | None) -> None:
        if self._listener is not None:
            for executor_id, silent_s in parse_overdue_reports(reply):
                self._listener.on_report_overdue(executor_id, silent_s)

    def _operate(
        self,
        name: str,
        args: Sequence[Argument],
        on_result: Callable[[Reply, OwnEvent | None], None],
        on_failure: OnFailure,
        own_id: str | None = None,
    ) -> None:
        operation = _Operation(name, len(args), encode(args), on_result, on_failure, own_id)
        self._send(operation)

    def _send(self, operation: _Operation) -> None:
        num_args, beginning = self._beginning(operation.name, operation.owners)
        payload = b"*%d\r\n%b%b" % (num_args + operation.num_args, beginning, operation.args)
        self._link.send(
            operation.name,
            payload,
            lambda raw: self._process.run(self._answered, operation, raw),
            lambda: self._process.run(self._failed, operation.on_failure),
        )

    def _failed(self, then: OnFailure) -> None:
        self._may_have_lapsed = True
        then()

    def _answered(self, operation: _Operation, raw: Any) -> None:
        """Handles the script's own reply: repeats it if the script says so, then boards until no request is left to."""
        reply = self._received(operation, operation.name, raw)
        if operation.name in ("submit", "cancel", "hand_back"):
            (reply,) = parse_outcomes(reply)
        if reply.status == "AGAIN":
            operation.num_rounds += 1
            assert operation.num_rounds < MAX_ROUNDS, f"{operation.name} found no end"
            self._send(operation)
        else:
            self._board(operation, reply, reply)

    def _board(self, operation: _Operation, result: Reply, reply: Reply) -> None:
        if reply.is_complete or operation.num_rounds == MAX_ROUNDS:
            operation.on_result(result, operation.own_event)
            return
        operation.num_rounds += 1
        num_args, beginning = self._beginning("board", operation.owners)

        def boarded(raw: Any) -> None:
            self._board(operation, result, self._received(operation, "board", raw))

        self._link.send(
            "board",
            b"*%d\r\n%b" % (num_args, beginning),
            lambda raw: self._process.run(boarded, raw),
            lambda: self._process.run(self._failed, lambda: operation.on_result(result, operation.own_event)),
        )

    def _received(self, operation: _Operation, name: str, raw: Any) -> Reply:
        reply = self._link.parsed(name, raw)
        operation.owners.update(reply.missing)
        if self._may_have_lapsed or (reply.registered and self._is_registered):
            self._may_have_lapsed, self._is_registered = False, True
            self._on_event(LeaseLapsed())
        self._is_registered = self._is_registered or reply.registered
        for event in reply.events:
            if isinstance(event, OwnEvent) and event.request_id == operation.own_id:
                operation.own_event = event
            else:
                self._on_event(event)
        return reply

    def _beginning(self, name: str, owners: set[str]) -> tuple[int, bytes]:
        routers = self._peers | owners if owners else self._peers
        known = self._beginnings.get((name, routers))
        if known is None:
            known = self._link.beginning(name, tuple(sorted(routers)), self.router_id)
            self._beginnings[name, routers] = known
        return known

    # Mailbox ---------------------------------------------------------------------------------------------------

    def _read_mailbox(self) -> None:
        self._has_mail = True
        if self._is_reading:
            return
        self._is_reading, self._has_mail = True, False
        read = command("XREAD", "COUNT", MAX_ENTRIES, "STREAMS", self._mailbox, self._cursor)
        self._link.send(
            "",
            read,
            lambda raw: self._process.run(self._got_mail, raw),
            lambda: self._process.run(self._got_mail, None),
        )

    def _got_mail(self, streams: list[Any] | None) -> None:
        self._is_reading = False
        entries = streams[1] if streams else []
        if entries:
            self._cursor = entries[-1][0]
        if self._has_mail or len(entries) == MAX_ENTRIES:
            self._read_mailbox()
        for _, fields in entries:
            self._on_event(parse_event(dict(zip(fields[::2], fields[1::2], strict=True))))


def _ignore() -> None:
    """What fails is lost, and made again soon anyway."""
