"""Bounds on the ended requests that a router keeps: time, number and bytes."""

from __future__ import annotations

from inflight.router.dispatch.dispatcher import EndedStreams
from inflight.router.ledger.types import Demand
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2
from tests.support.ledger.scripted_store import new_delivery


def stream(request_id: str, num_tokens: int = 0, kept_s: float | None = None) -> RequestStream:
    return RequestStream(
        Demand(request_id, 2, 1), executor_pb2.Submit(), 0.0, None, [1] * num_tokens, new_delivery(kept_s=kept_s)
    )


def test_stream_is_found_until_its_time_is_over() -> None:
    ended, one = EndedStreams(keep_s=10), stream("a")
    ended.keep(one, now=100)
    assert ended.find("a", now=109.9) is one
    assert ended.find("a", now=110) is None
    assert ended.find("b", now=100) is None
    assert len(ended) == 0


def test_client_may_ask_for_less_time_but_not_for_more() -> None:
    ended = EndedStreams(keep_s=10)
    ended.keep(stream("a", kept_s=5), now=0)
    ended.keep(stream("b", kept_s=50), now=0)
    assert ended.find("a", now=6) is None
    assert ended.find("b", now=9) is not None
    assert ended.find("b", now=11) is None


def test_oldest_makes_room() -> None:
    ended = EndedStreams(keep_s=10, max_streams=2)
    for number, name in enumerate("abc"):
        ended.keep(stream(name), now=number)
    assert [ended.find(name, now=3) is not None for name in "abc"] == [False, True, True]


def test_bytes_are_bounded_and_given_back() -> None:
    ended = EndedStreams(keep_s=10, max_bytes=3 * stream("a", 1000).num_bytes)
    for name in "abcd":
        ended.keep(stream(name, 1000), now=0)
    assert [ended.find(name, now=1) is not None for name in "abcd"] == [False, True, True, True]
    ended.keep(stream("d", 1000), now=1)  # the same id again takes no more
    assert ended.find("b", now=1) is not None


def test_what_is_over_goes_with_the_next() -> None:
    ended = EndedStreams(keep_s=10)
    ended.keep(stream("a"), now=0)
    ended.keep(stream("b"), now=20)
    assert len(ended) == 1
