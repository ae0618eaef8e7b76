"""Decoding of events into plain values, and transcripts that add them up."""

from __future__ import annotations

import pytest

from inflight.catalogue import RequestState, decode_capacity, decode_standing, decode_state
from inflight.errors import InflightError
from inflight.events import (
    Delta,
    FinishReason,
    Logprob,
    Notice,
    PositionLogprobs,
    Queued,
    Started,
    Transcript,
    decode_event,
    finish_reason,
)
from inflight.v1 import inference_pb2, types_pb2
from tests.unit.scripted_router import WORDS, delta, seconds, speak, started


def test_a_transcript_adds_up_a_whole_answer() -> None:
    transcript = Transcript()
    for event in speak(WORDS):
        transcript.add(event)
    result = transcript.result()
    assert result.text == "The capital is Paris."
    assert result.token_ids == (100, 101, 102, 103, 104)
    assert result.finish_reason is FinishReason.STOP_TOKEN
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (7, 5)
    assert result.timing.time_to_first_token_s == 0.5
    assert result.request_id == "r1"
    assert transcript.executor_id == "executor-0"


def test_what_the_router_did_not_measure_is_none_and_not_zero() -> None:
    transcript = Transcript()
    transcript.add(inference_pb2.StreamEvent(done=inference_pb2.Done()))
    assert transcript.timing is not None
    assert transcript.timing.time_to_first_token_s is None
    assert decode_event(inference_pb2.StreamEvent(queued=inference_pb2.Queued(position=3))) == Queued(3, None)


def test_choices_are_kept_apart() -> None:
    transcript = Transcript()
    for choice, text in ((1, "b"), (0, "a"), (1, "c")):
        transcript.add(inference_pb2.StreamEvent(delta=inference_pb2.Delta(choice=choice, text=text, num_tokens=1)))
    assert [choice.text for choice in transcript.choices] == ["a", "bc"]


def test_a_transcript_without_its_last_event_has_no_result() -> None:
    transcript = Transcript()
    transcript.add(delta("x", 0))
    with pytest.raises(InflightError, match="before its last event"):
        transcript.result()


def test_cancelling_leaves_the_reason_of_a_finished_choice_alone() -> None:
    transcript = Transcript()
    for event in speak(WORDS):
        transcript.add(event)
    transcript.mark_cancelled()
    assert transcript.choices[0].finish_reason is FinishReason.STOP_TOKEN


def test_an_event_of_a_later_version_is_skipped() -> None:
    assert decode_event(inference_pb2.StreamEvent(seq=4)) is None


def test_events_are_decoded_with_their_details() -> None:
    assert decode_event(started("e")) == Started("e", 0, 0.25)
    notice = inference_pb2.Notice(kind=inference_pb2.Notice.KIND_MIGRATED, text="moved")
    assert decode_event(inference_pb2.StreamEvent(notice=notice)) == Notice("migrated", "moved")


def test_log_probabilities_come_with_their_tokens_and_are_none_where_they_are_not_known() -> None:
    half = types_pb2.TokenLogprob(token_id=5, logprob=-0.5, text_bytes=b"a\xf0\x9f")
    values = types_pb2.PositionLogprobs(chosen=half, top=[half])
    delta = inference_pb2.Delta(text="a", num_tokens=2, logprobs=[values, types_pb2.PositionLogprobs()])
    transcript = Transcript()
    with_logprobs = transcript.add(inference_pb2.StreamEvent(delta=delta))
    assert isinstance(with_logprobs, Delta)
    told = Logprob(5, -0.5, b"a\xf0\x9f")
    assert told.text == "a\ufffd"
    assert with_logprobs.logprobs == (PositionLogprobs(told, (told,)), None)
    transcript.add(inference_pb2.StreamEvent(done=inference_pb2.Done()))
    assert transcript.result().logprobs == with_logprobs.logprobs


def test_every_finish_reason_of_the_protocol_has_its_plain_form() -> None:
    for value in types_pb2.FinishReason.values()[1:]:
        assert finish_reason(value) is not FinishReason.UNKNOWN
    assert finish_reason(types_pb2.FINISH_REASON_UNSPECIFIED) is FinishReason.UNKNOWN


def test_capacity_is_decoded_with_plain_names() -> None:
    wire = inference_pb2.GetCapacityResponse(
        executors=[
            inference_pb2.ExecutorCapacity(
                executor_id="e", seats_total=4, batching=types_pb2.BATCHING_MODE_STATIC, step_ms=2.5
            )
        ],
        queues=[
            inference_pb2.QueueDepth(model="m", priority=types_pb2.PRIORITY_CLASS_BATCH, num_requests=2),
            inference_pb2.QueueDepth(model="m", priority=types_pb2.PRIORITY_CLASS_STANDARD, num_requests=3),
        ],
    )
    capacity = decode_capacity(wire)
    assert (capacity.executors[0].batching, capacity.executors[0].seats_total) == ("static", 4)
    assert [queue.priority for queue in capacity.queues] == ["batch", "standard"]
    assert capacity.num_queued == 5


def test_values_that_are_not_set_are_none_and_enums_are_names() -> None:
    wire = inference_pb2.GetCapacityResponse()
    wire.executors.add(executor_id="e0", reserve_quantile=0.5, batching=types_pb2.BATCHING_MODE_STATIC, constraint=99)
    wire.variants.add(model="m", ttft_p50_ms=5.0)
    wire.queues.add(model="m", priority=types_pb2.PRIORITY_CLASS_BATCH)
    capacity = decode_capacity(wire)
    (executor,), (variant,), (queue,) = capacity.executors, capacity.variants, capacity.queues
    assert (executor.reserve_quantile, executor.device_busy_s, executor.num_preempted) == (0.5, None, 0)
    assert (executor.batching, executor.scheduler_policy, executor.constraint) == ("static", "unspecified", "99")
    assert (variant.ttft_p50_ms, variant.ttft_p99_ms, queue.priority) == (5.0, None, "batch")
    standing = decode_standing(inference_pb2.GetRequestResponse(wait_reason=inference_pb2.WAIT_REASON_HELD_LINE))
    assert (standing.state, standing.wait_reason) == (RequestState.UNKNOWN, "held_line")


def test_request_states_are_decoded() -> None:
    assert decode_state(inference_pb2.REQUEST_STATE_WAITING) is RequestState.WAITING
    assert decode_state(inference_pb2.REQUEST_STATE_UNSPECIFIED) is RequestState.UNKNOWN


def test_durations_keep_their_fraction() -> None:
    wire = inference_pb2.StreamEvent(queued=inference_pb2.Queued(position=1, estimated_wait=seconds(0.125)))
    assert decode_event(wire) == Queued(1, 0.125)
