"""Breaks at any time: the stream adds up to the answer, each token and each byte once.

The router is a model that keeps to the comments of the protocol: it sends tokens by offset and text by bytes, text
lagging behind its tokens, in events as large as it likes, and begins a continuation where it was asked to or a little
before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import grpc
from hypothesis import given
from hypothesis import strategies as st

from inflight.common.errors import Reason
from inflight.errors import InflightError
from inflight.events import Delta, Done, Event, Resumed
from inflight.recovery import Call, Recovery, RecoveryPolicy
from inflight.v1 import inference_pb2, types_pb2
from tests.unit.scripted_router import accepted, ending, started

# One, two, three and four bytes; a router never sends a part of a character.
PIECES = ("a", "é", "€", "🚋", "", "The ")

BREAKS = (
    InflightError(grpc.StatusCode.UNAVAILABLE, "connection reset"),
    InflightError(grpc.StatusCode.INTERNAL, "RST_STREAM"),
    InflightError(grpc.StatusCode.ABORTED, "draining", Reason.DRAINING.value),
    InflightError(grpc.StatusCode.UNAVAILABLE, "away", Reason.STORE_UNAVAILABLE.value, retry_after_s=0.5),
    None,
)


@dataclass(frozen=True)
class Break:
    """How one call goes: what it brings before it breaks, and how. `is_lost`: the output is lost by then."""

    num_events: int
    error: InflightError | None
    is_lost: bool
    num_repeated: int
    event_tokens: int
    text_lag: int
    ends_cancelled: bool


BREAK = st.builds(
    Break,
    num_events=st.integers(0, 8),
    error=st.sampled_from(BREAKS),
    is_lost=st.booleans(),
    num_repeated=st.integers(0, 3),
    event_tokens=st.integers(1, 4),
    text_lag=st.integers(0, 3),
    ends_cancelled=st.booleans(),
)


class ModelRouter:
    """Answers calls about one request."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self.keys: set[str] = set()

    def answer(self, call: Call, how: Break) -> Iterator[inference_pb2.StreamEvent]:
        request = call.request
        if isinstance(request, inference_pb2.ResumeRequest):
            assert (request.request_id, request.resume_token) == ("r1", "secret")
            offset, has_bytes = request.offsets[0], request.text_bytes[0]
        else:
            self.keys.add(request.idempotency_key)
            ids = list(request.prior_output.output_ids)
            assert ids == [100 + i for i in range(len(ids))]
            offset, has_bytes = len(ids), request.prior_output.text_bytes
        assert has_bytes <= len("".join(self.pieces[:offset]).encode())
        return self._stream(max(0, offset - how.num_repeated), has_bytes, how)

    def _stream(self, offset: int, num_bytes: int, how: Break) -> Iterator[inference_pb2.StreamEvent]:
        total = len(self.pieces)
        yield accepted()
        yield started()
        while offset < total:
            end = min(total, offset + how.event_tokens)
            # The text of the last tokens may be the beginning of a stop text: it comes later.
            text = "".join(self.pieces[: end if end == total else max(0, end - how.text_lag)]).encode()
            new, num_bytes = text[num_bytes:].decode(), max(num_bytes, len(text))
            ids = [100 + i for i in range(offset, end)]
            yield inference_pb2.StreamEvent(
                delta=inference_pb2.Delta(offset=offset, num_tokens=end - offset, token_ids=ids, text=new)
            )
            offset = end
        rest = "".join(self.pieces).encode()[num_bytes:].decode()
        if rest:
            yield inference_pb2.StreamEvent(delta=inference_pb2.Delta(offset=total, text=rest))
        yield from ending(total)


def cancelled_end() -> Iterator[inference_pb2.StreamEvent]:
    yield inference_pb2.StreamEvent(finished=inference_pb2.Finished(reason=types_pb2.FINISH_REASON_CANCELLED))
    yield inference_pb2.StreamEvent(done=inference_pb2.Done())


def play(recovery: Recovery, router: ModelRouter, schedule: list[Break]) -> list[Event]:
    """Runs a stream to its end through every break of the schedule; then nothing breaks any more."""
    events: list[Event] = []
    now_s = 0.0
    steps = iter(schedule)
    while True:
        call = recovery.call(now_s)
        how = next(steps, None)
        calm = how or Break(1_000, None, False, 0, 1, 0, False)
        if calm.is_lost and call.method == "Resume":
            error: InflightError | None = InflightError(grpc.StatusCode.DATA_LOSS, "", Reason.OUTPUT_LOST.value)
        else:
            error = calm.error
            wires = router.answer(call, calm)
            has_ended = False
            for _, wire in zip(range(calm.num_events), wires, strict=False):
                events += recovery.take(wire, now_s)
                has_ended = wire.HasField("done")
            if calm.ends_cancelled and call.method == "Resume" and not has_ended:
                for wire in cancelled_end():
                    events += recovery.take(wire, now_s)
                error = None
        again = recovery.broken(error, now_s)
        if again is None:
            return events
        now_s += again.delay_s


@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12),
    # As many as are over before a client gives up a request without an answer.
    schedule=st.lists(BREAK, max_size=8),
    wants_ids=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_schedule_of_breaks_adds_up_to_the_exact_answer(
    pieces: list[str], schedule: list[Break], wants_ids: bool, seed: int
) -> None:
    request = inference_pb2.GenerateRequest(text="hi", output=inference_pb2.OutputOptions(token_ids=wants_ids))
    recovery = Recovery.of_request(
        request, RecoveryPolicy(), timeout_s=None, now_s=0.0, random=Random(seed), new_key=lambda: "key"
    )
    router = ModelRouter(pieces)
    events = play(recovery, router, schedule)

    deltas = [event for event in events if isinstance(event, Delta)]
    offset = 0
    for delta in deltas:
        assert delta.offset == offset
        offset += delta.num_tokens
    assert offset == len(pieces)
    assert "".join(delta.text for delta in deltas) == "".join(pieces)
    ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    assert ids == (tuple(100 + i for i in range(len(pieces))) if wants_ids else ())
    result = recovery.transcript.result()
    assert (result.text, result.token_ids) == ("".join(pieces), ids)
    assert [type(event) for event in events].count(Done) == 1
    assert [event.number for event in events if isinstance(event, Resumed)] == list(range(1, recovery.num_resumes + 1))
    assert router.keys <= {"key"}
