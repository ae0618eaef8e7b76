"""Events for observers of a request: each once, however many readers it has had."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.lifecycle.events import DEADLINE_END, End, Leave, Submit, Unlinked
from inflight.router.stream.relay import Relay
from inflight.router.stream.request_stream import RequestStream
from inflight.router.telemetry.events import RequestFacts, RequestObservers, RequestRecord, class_name, outcome_of
from inflight.v1 import inference_pb2, types_pb2
from tests.support.ledger.scripted_store import new_delivery, new_stream, place, placement


class Told:
    """A recorder that remembers what it was told, times left out."""

    def __init__(self) -> None:
        self.facts: list[tuple[Any, ...]] = []

    def admitted(self) -> None:
        self.facts.append(("admitted",))

    def placed(self, placed: Any) -> None:
        self.facts.append(("placed", placed.executor_id, placed.attempt, placed.wait_s is not None))

    def boarded(self, cached_tokens: int) -> None:
        self.facts.append(("boarded", cached_tokens))

    def boarded_again(self) -> None:
        self.facts.append(("boarded_again",))

    def preempted(self) -> None:
        self.facts.append(("preempted",))

    def first_sent(self, after_s: float) -> None:
        self.facts.append(("first_sent",))

    def sent(self, num_tokens: int, interval_s: float | None) -> None:
        self.facts.append(("sent", num_tokens, interval_s is not None))

    def moved(self, why: str) -> None:
        self.facts.append(("moved", why))

    def extended(self) -> None:
        self.facts.append(("extended",))

    def resumed(self) -> None:
        self.facts.append(("resumed",))

    def incomplete(self) -> None:
        self.facts.append(("incomplete",))

    def ended(self, end: Any) -> None:
        self.facts.append(("ended", end.outcome, end.is_error, end.output_tokens))

    def left(self) -> None:
        self.facts.append(("left",))


def recorded(**facts: Any) -> tuple[RequestRecord, Told]:
    told = Told()
    return RequestRecord(RequestFacts(**facts), (told,)), told


def recorded_stream() -> tuple[RequestStream, Told]:
    stream = new_stream(delivery=new_delivery())
    stream.record, told = recorded()
    stream.record.admitted()
    told.facts.clear()
    return stream, told


async def ignore(event: inference_pb2.StreamEvent) -> None:
    """A client that reads everything."""


async def test_stream_tells_of_places_boarding_tokens_and_its_end() -> None:
    stream, told = recorded_stream()
    place(stream, placement())
    stream.accept()
    stream.board(3)
    stream.tokens(0, [1])
    relay = Relay(stream, ignore)
    await relay._send_tokens(await stream.next())
    stream.tokens(1, [1])
    stream.tokens(2, [1])
    stream.publish_output()
    await relay._send_tokens(await stream.next())
    stream.life.handle(Unlinked(1))
    place(stream, placement(2))
    stream.board(0)
    stream.finish(End(types_pb2.FINISH_REASON_LENGTH, None))
    stream.finish(DEADLINE_END)  # too late
    stream.forget()
    assert told.facts == [
        ("placed", "e0", 1, True),
        ("boarded", 3),
        ("first_sent",),
        ("sent", 1, False),
        ("sent", 2, True),
        ("placed", "e0", 2, False),
        ("boarded_again",),
        ("ended", "length", False, 3),
    ]


def test_tokens_that_a_second_reader_is_sent_again_count_once() -> None:
    record, told = recorded()
    record.sent(0, 0, 4, is_first_known=True)
    record.sent(1, 0, 3, is_first_known=True)
    record.sent(1, 3, 3, is_first_known=True)
    assert told.facts == [("first_sent",), ("sent", 4, False), ("sent", 2, True)]


def test_stream_of_another_router_has_no_first_token_here() -> None:
    record, told = recorded()
    record.adopted(has_started=True)
    record.placed("e", 2)
    record.boarded(1)
    record.sent(0, 5, 2, is_first_known=False)
    assert told.facts == [("admitted",), ("placed", "e", 2, False), ("sent", 2, False)]


def test_first_token_behind_output_that_the_client_brought_is_the_first() -> None:
    record, told = recorded(prior_tokens=7)
    record.sent(0, 0, 7, is_first_known=True)
    record.sent(0, 7, 1, is_first_known=True)
    assert told.facts == [("first_sent",), ("sent", 1, True)]


def test_request_that_was_never_admitted_has_no_end() -> None:
    record, told = recorded()
    record.ended("INTERNAL", 0, None, is_error=True)
    assert told.facts == []


def test_request_given_up_in_line_ends_cancelled() -> None:
    stream, told = recorded_stream()
    stream.forget()
    assert told.facts == [("ended", "cancelled", False, 0)]


def test_request_that_goes_on_elsewhere_leaves() -> None:
    stream, told = recorded_stream()
    stream.life.handle(Submit())
    stream.life.handle(Leave(RequestError(Reason.TAKEN_OVER, "gone")))
    stream.publish_end()
    stream.forget()
    assert told.facts == [("left",)]


def test_every_listener_hears_everything() -> None:
    told = [Told(), Told()]

    class One:
        def __init__(self, recorder: Told) -> None:
            self.recorder = recorder

        def follow(self, facts: RequestFacts) -> Told:
            return self.recorder

        def refused(self, model: str, priority_class: str, reason: Reason) -> None:
            self.recorder.facts.append((model, priority_class, reason))

    observers = RequestObservers([One(one) for one in told])
    observers.refused("m", "batch", Reason.QUEUE_FULL)
    observers.follow(RequestFacts()).moved("preempted")
    assert told[0].facts == told[1].facts == [("m", "batch", Reason.QUEUE_FULL), ("moved", "preempted")]


@pytest.mark.parametrize(("priority", "name"), [(0, "standard"), (1, "interactive"), (3, "batch"), (77, "standard")])
def test_class_has_a_name_whatever_a_client_sends(priority: int, name: str) -> None:
    assert class_name(priority) == name


def test_end_is_called_as_its_finish_reason() -> None:
    assert outcome_of(types_pb2.FINISH_REASON_STOP_TOKEN) == "stop_token"
