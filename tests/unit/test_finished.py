"""Records of ended sequences: how long they are kept, and the limits of their number and memory."""

from __future__ import annotations

from inflight.executor.scheduler.sequence import FinishReason
from inflight.executor.serving.finished import (
    OUTPUT_TOKEN_BYTES,
    RECORD_BYTES,
    Ended,
    EndedSequences,
    Placed,
    output_array,
)
from inflight.v1 import executor_pb2


def make_ended(request_id: str, ended_s: float = 0.0, *, attempt: int = 1, num_tokens: int = 0) -> Ended:
    submit = executor_pb2.Submit(request_id=request_id, attempt=attempt)
    output_ids = output_array([7] * num_tokens)
    return Ended(Placed(submit, None), output_ids, True, 0, FinishReason.LENGTH, None, "", ended_s)


def test_ended_is_kept_for_its_time() -> None:
    ended = EndedSequences(60)
    ended.keep(make_ended("a", 0))
    ended.keep(make_ended("b", 10))
    assert ended.next_due_s() == 60
    ended.expire(59)
    assert len(ended) == 2
    ended.expire(60)
    assert ended.find("a") is None
    assert ended.find("b") is not None
    assert ended.next_due_s() == 70
    ended.expire(70)
    assert (len(ended), ended.num_bytes, ended.next_due_s()) == (0, 0, None)


def test_oldest_goes_when_there_are_too_many() -> None:
    ended = EndedSequences(60, max_ended=2)
    for request_id in "abc":
        ended.keep(make_ended(request_id))
    assert [ended.find(request_id) is not None for request_id in "abc"] == [False, True, True]


def test_oldest_go_when_they_take_too_much() -> None:
    ended = EndedSequences(60, max_bytes=3 * RECORD_BYTES)
    for request_id in "abc":
        ended.keep(make_ended(request_id))
    ended.keep(make_ended("large", num_tokens=RECORD_BYTES // OUTPUT_TOKEN_BYTES))
    assert [ended.find(request_id) is not None for request_id in "abc"] == [False, False, True]
    ended.keep(make_ended("too large", num_tokens=RECORD_BYTES))
    assert (len(ended), ended.num_bytes) == (0, 0)


def test_newer_attempt_takes_the_place_of_the_older() -> None:
    ended = EndedSequences(60)
    ended.keep(make_ended("a", 0, attempt=1))
    ended.keep(make_ended("b", 1))
    ended.keep(make_ended("a", 2, attempt=2))
    found = ended.find("a")
    assert found is not None
    assert found.placed.submit.attempt == 2
    assert (len(ended), ended.num_bytes) == (2, 2 * RECORD_BYTES)
    assert ended.next_due_s() == 61


def test_nothing_is_kept_for_no_time() -> None:
    ended = EndedSequences(0)
    ended.keep(make_ended("a"))
    assert ended.find("a") is None


def test_deadline_counts_from_the_moment_of_attaching() -> None:
    placed = Placed(executor_pb2.Submit(request_id="a", attempt=1, deadline_ms=5000), deadline_s=105.0)
    assert placed.attached(101.5, started=True, cached_tokens=0).submit.deadline_ms == 3500
    assert placed.attached(200.0, started=True, cached_tokens=0).submit.deadline_ms == 0
    assert placed.submit.deadline_ms == 5000


def test_deadline_without_end_is_one_that_fits_the_wire() -> None:
    longest_ms = 2**64 - 1
    placed = Placed(executor_pb2.Submit(request_id="a", attempt=1, deadline_ms=longest_ms), longest_ms / 1000)
    assert placed.attached(0.0, started=True, cached_tokens=0).submit.deadline_ms == longest_ms
