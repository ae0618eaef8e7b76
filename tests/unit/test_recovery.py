"""Recovery of broken streams: the next call, in a scripted world without network or clock."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import grpc
import pytest

from inflight.common.errors import Reason
from inflight.errors import FieldError, InflightError
from inflight.events import Delta, Event, Resumed
from inflight.recovery import ANSWERED_S, SUBMIT_TIMEOUT_S, VANISHED_S, Again, Recovery, RecoveryPolicy
from inflight.v1 import inference_pb2, types_pb2
from tests.unit.scripted_router import accepted, delta, ending, seconds, started

Status = grpc.StatusCode
GONE = InflightError(Status.UNAVAILABLE, "connection reset")
LOST = InflightError(Status.DATA_LOSS, "no executor holds the output", Reason.OUTPUT_LOST.value)


class World:
    """A stream under test and the time."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None = None,
        new_key: Callable[[], str] = lambda: "key",
        **policy: Any,
    ) -> None:
        self.now_s = 100.0
        self.recovery = Recovery.of_request(
            request,
            RecoveryPolicy(**policy),
            timeout_s=timeout_s,
            now_s=self.now_s,
            random=Random(1),
            new_key=new_key,
        )
        self.events: list[Event] = []
        self.call = self.recovery.call(self.now_s)

    def hear(self, *wires: inference_pb2.StreamEvent) -> None:
        for wire in wires:
            self.events += self.recovery.take(wire, self.now_s)

    def break_off(self, error: InflightError | None = GONE) -> float:
        """Breaks, waits and makes the next call; returns the wait."""
        again = self.recovery.broken(error, self.now_s)
        assert again is not None
        self.now_s += again.delay_s
        self.call = self.recovery.call(self.now_s)
        return again.delay_s

    def resume_request(self) -> inference_pb2.ResumeRequest:
        assert self.call.method == "Resume"
        assert isinstance(self.call.request, inference_pb2.ResumeRequest)
        return self.call.request

    def generate_request(self) -> inference_pb2.GenerateRequest:
        assert self.call.method == "Generate"
        assert isinstance(self.call.request, inference_pb2.GenerateRequest)
        return self.call.request


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="hi", **fields)


def begun(world: World, num_tokens: int = 2) -> World:
    """A stream that has brought so many tokens of one two-byte character each."""
    world.hear(*begun_events(num_tokens))
    return world


def begun_events(num_tokens: int = 2) -> list[inference_pb2.StreamEvent]:
    return [accepted(), started(), *(delta("é", offset) for offset in range(num_tokens))]


def cancelled() -> inference_pb2.StreamEvent:
    return inference_pb2.StreamEvent(finished=inference_pb2.Finished(reason=types_pb2.FINISH_REASON_CANCELLED))


# --- what is asked


def test_a_request_gets_a_key_and_asks_for_ids_that_the_user_does_not_see() -> None:
    world = begun(World(request()))
    sent = world.generate_request()
    assert (sent.idempotency_key, sent.output.token_ids) == ("key", True)
    assert all(event.token_ids == () for event in world.events if isinstance(event, Delta))
    assert world.recovery.transcript.choices[0].token_ids == []
    asked_for = begun(World(request(output=inference_pb2.OutputOptions(token_ids=True))))
    assert asked_for.recovery.transcript.choices[0].token_ids == [100, 101]


@pytest.mark.parametrize("fields", [{"request_id": "mine"}, {"idempotency_key": "mine"}])
def test_an_id_or_key_of_the_users_is_left_as_it_is(fields: dict[str, str]) -> None:
    sent = World(request(**fields)).generate_request()
    assert (sent.request_id, sent.idempotency_key) == (fields.get("request_id", ""), fields.get("idempotency_key", ""))


def test_without_resuming_the_request_is_sent_as_it_is_and_an_error_is_final() -> None:
    world = World(request(), resume=False)
    assert world.generate_request() == request()
    begun(world)
    with pytest.raises(InflightError, match="connection reset"):
        world.recovery.broken(GONE, world.now_s)


def test_a_broken_stream_resumes_behind_what_came() -> None:
    world = begun(World(request()))
    world.break_off()
    expected = inference_pb2.ResumeRequest(request_id="r1", resume_token="secret", offsets=[2], text_bytes=[4])
    assert world.resume_request() == expected
    world.hear(accepted(), started("executor-1"), delta("!", 2), *ending(3))
    assert [type(event).__name__ for event in world.events[-4:]] == ["Resumed", "Delta", "Finished", "Done"]
    assert world.recovery.broken(None, world.now_s) is None
    transcript = world.recovery.transcript
    assert (transcript.choices[0].text, transcript.executor_id, world.recovery.num_resumes) == ("éé!", "executor-1", 1)


def test_a_request_that_waits_resumes_by_the_token_of_its_first_queued_event() -> None:
    world = World(request(request_id="mine"))
    queued = inference_pb2.Queued(position=3, request_id="mine", resume_token="secret")
    world.hear(inference_pb2.StreamEvent(queued=queued))
    assert world.recovery.transcript.request_id == "mine"
    world.break_off()
    assert world.resume_request().offsets == [0]


def test_before_anything_came_the_same_request_is_sent_again() -> None:
    world = World(request())
    first = world.generate_request()
    world.break_off()
    assert world.generate_request() == first
    world.hear(accepted(), started(), delta("x", 0))
    assert not [event for event in world.events if isinstance(event, Resumed)]


@pytest.mark.parametrize("code", [Status.NOT_FOUND, Status.DATA_LOSS, Status.UNIMPLEMENTED])
def test_lost_output_is_continued_from_what_the_client_holds(code: grpc.StatusCode) -> None:
    sampling = types_pb2.SamplingParams(temperature=0.5)
    world = begun(World(request(sampling=sampling)))
    world.break_off()
    world.break_off(InflightError(code, "gone"))
    sent = world.generate_request()
    assert sent.prior_output == inference_pb2.PriorOutput(output_ids=[100, 101], text_bytes=4)
    assert (sent.idempotency_key, sent.sampling) == ("key", sampling)
    world.break_off()
    assert world.generate_request() == sent, "until it is accepted, there is nothing to resume"
    world.hear(accepted("r2"), delta("!", 2))
    world.break_off()
    assert (world.resume_request().request_id, list(world.resume_request().offsets)) == ("r2", [3])


def test_without_a_key_lost_output_is_continued_by_a_new_request_with_the_same_seed() -> None:
    deadlines = inference_pb2.Deadlines(total=seconds(30.0))
    world = World(request(request_id="mine", deadlines=deadlines))
    event = accepted("mine")
    event.accepted.sampling.seed = 7
    world.hear(event, delta("x", 0))
    world.now_s += 10.0
    world.break_off()
    world.break_off(LOST)
    sent = world.generate_request()
    assert (sent.request_id, sent.sampling.seed, list(sent.prior_output.output_ids)) == ("", 7, [100])
    assert 19.0 < sent.deadlines.total.ToNanoseconds() / 1e9 < 20.0


def test_a_request_that_ended_and_is_lost_is_continued_under_another_key_with_the_same_seed() -> None:
    keys = iter(["first", "second"])
    world = World(request(), new_key=lambda: next(keys))
    event = accepted()
    event.accepted.sampling.seed = 7
    world.hear(event, delta("x", 0))
    world.break_off()
    world.break_off(LOST)
    assert (world.generate_request().idempotency_key, world.generate_request().sampling.seed) == ("first", 0)
    world.break_off(LOST)
    sent = world.generate_request()
    assert (sent.idempotency_key, sent.sampling.seed, list(sent.prior_output.output_ids)) == ("second", 7, [100])


def test_a_key_of_the_users_stands_for_one_request_only() -> None:
    world = begun(World(request(idempotency_key="mine")))
    world.break_off()
    world.break_off(LOST)
    with pytest.raises(InflightError, match="DATA_LOSS"):
        world.recovery.broken(LOST, world.now_s)


def test_a_server_that_holds_less_than_the_client_is_as_good_as_none() -> None:
    world = begun(World(request()))
    world.break_off()
    behind = FieldError("offsets[0]", "is 2; the output has 1 tokens")
    world.break_off(InflightError(Status.INVALID_ARGUMENT, "", Reason.INVALID_FIELD.value, (behind,)))
    assert list(world.generate_request().prior_output.output_ids) == [100, 101]


def test_output_that_the_user_brought_is_part_of_what_came() -> None:
    world = World(request(prior_output=inference_pb2.PriorOutput(output_ids=[5, 6])))
    world.hear(accepted(), delta("x", 2))
    world.break_off()
    assert (list(world.resume_request().offsets), list(world.resume_request().text_bytes)) == ([2 + 1], [])
    world.break_off(LOST)
    assert world.generate_request().prior_output == inference_pb2.PriorOutput(output_ids=[5, 6, 102])


def test_a_cancel_for_want_of_the_broken_connection_is_no_end() -> None:
    world = begun(World(request()))
    world.break_off()
    world.hear(accepted(), delta("x", 2), cancelled(), *list(ending(3))[1:])
    world.break_off(None)
    assert list(world.generate_request().prior_output.output_ids) == [100, 101, 102]
    assert world.recovery.transcript.choices[0].finish_reason is None


def test_a_repeat_may_meet_the_cancel_of_the_broken_connection_too() -> None:
    world = World(request())
    world.break_off()
    assert world.generate_request().idempotency_key == "key"
    world.now_s += VANISHED_S  # until the router has found it
    world.hear(*begun_events(), cancelled(), *list(ending(2))[1:])
    world.break_off(None)
    assert list(world.generate_request().prior_output.output_ids) == [100, 101]
    assert world.recovery.transcript.choices[0].finish_reason is None


def test_a_cancel_by_another_caller_is_an_end() -> None:
    world = begun(World(request()))
    world.hear(cancelled(), *list(ending(2))[1:])
    assert world.recovery.broken(None, world.now_s) is None
    world = begun(World(request()))
    world.break_off()
    world.hear(accepted())
    world.now_s += VANISHED_S
    world.hear(cancelled(), *list(ending(2))[1:])
    assert world.recovery.broken(None, world.now_s) is None


def test_a_router_of_an_earlier_version_is_asked_without_a_key() -> None:
    refusal = InflightError(
        Status.UNIMPLEMENTED, "not yet", Reason.NOT_IMPLEMENTED.value, (FieldError("idempotency_key", "not yet"),)
    )
    world = World(request())
    assert world.break_off(refusal) == 0.0
    assert world.generate_request().idempotency_key == ""
    begun(world)
    world.break_off()
    world.break_off(InflightError(Status.UNIMPLEMENTED, "no Resume"))
    with pytest.raises(InflightError, match="connection reset"):
        world.recovery.broken(InflightError(Status.UNIMPLEMENTED, "no prior output"), world.now_s)


# --- what comes again, and what is missing


def test_tokens_that_come_again_are_cut() -> None:
    world = begun(World(request(output=inference_pb2.OutputOptions(token_ids=True))))
    wide = inference_pb2.Delta(offset=1, num_tokens=3, token_ids=[101, 102, 103], text="xy")
    world.break_off()
    world.hear(delta("", 0), inference_pb2.StreamEvent(delta=wide))
    assert world.events[-1] == Delta("xy", (102, 103), offset=2, num_tokens=2)
    assert world.recovery.transcript.choices[0].num_tokens == 4


def test_text_of_tokens_that_came_before_it_is_kept_and_placed_behind_them() -> None:
    world = begun(World(request()))
    world.break_off()
    world.hear(delta("late", 0))
    assert world.events[-1] == Delta("late", (), offset=2, num_tokens=0)


def test_a_gap_is_an_error() -> None:
    world = begun(World(request()))
    with pytest.raises(InflightError, match=r"tokens \[2, 4\) of choice 0 never came"):
        world.hear(delta("x", 4))


def test_another_output_in_place_of_what_came_is_an_error() -> None:
    world = begun(World(request()))
    world.break_off()
    with pytest.raises(InflightError, match="another one from token 1 on"):
        world.hear(
            inference_pb2.StreamEvent(delta=inference_pb2.Delta(offset=1, num_tokens=2, token_ids=[9, 10], text="x"))
        )


def test_an_end_that_comes_again_is_told_once() -> None:
    world = begun(World(request()))
    world.hear(next(ending(2)))
    world.break_off()
    world.hear(accepted(), *ending(2))
    assert [type(event).__name__ for event in world.events[-3:]] == ["Finished", "Resumed", "Done"]


def test_an_error_after_the_last_event_is_none() -> None:
    world = begun(World(request()))
    world.hear(*ending(2))
    assert world.recovery.broken(GONE, world.now_s) is None


# --- how long


@pytest.mark.parametrize(
    "error",
    [
        InflightError(Status.INTERNAL, "RST_STREAM"),
        InflightError(Status.UNKNOWN, "Stream removed"),
        InflightError(Status.CANCELLED, "the server went away"),
        InflightError(Status.ABORTED, "the router drains", Reason.DRAINING.value),
        InflightError(Status.UNAVAILABLE, "no executor", Reason.NO_EXECUTOR.value),
        InflightError(Status.RESOURCE_EXHAUSTED, "queue full", Reason.QUEUE_FULL.value, retry_after_s=1.0),
        None,
    ],
)
def test_what_breaks_a_stream_is_recovered_from(error: InflightError | None) -> None:
    assert begun(World(request())).break_off(error) <= 1.0


@pytest.mark.parametrize(
    "error",
    [
        InflightError(Status.INVALID_ARGUMENT, "no"),
        InflightError(Status.INTERNAL, "it killed two executors", Reason.ATTEMPTS_EXHAUSTED.value),
        InflightError(Status.ABORTED, "another reads", Reason.TAKEN_OVER.value),
        InflightError(Status.RESOURCE_EXHAUSTED, "too large"),
        InflightError(Status.DEADLINE_EXCEEDED, "late"),
        InflightError(Status.UNAUTHENTICATED, "who?", Reason.UNAUTHENTICATED.value),
        InflightError(Status.NOT_FOUND, "no such model", Reason.UNKNOWN_MODEL.value),
    ],
)
def test_an_answer_is_an_answer(error: InflightError) -> None:
    world = begun(World(request()))
    with pytest.raises(InflightError) as caught:
        world.recovery.broken(error, world.now_s)
    assert caught.value is error


@pytest.mark.parametrize(
    ("reason", "is_final"),
    [
        ("address lookup failed for nowhere:1: Domain name not found", True),
        ("Address lookup failed for nowhere:1 os_error: Name or service not known syscall: getaddrinfo", True),
        ("Failed to parse port in name: nowhere:one", True),
        ("address lookup failed for nowhere:1: Could not contact DNS servers", False),
    ],
)
def test_a_new_request_to_a_name_that_does_not_exist_is_not_repeated(reason: str, is_final: bool) -> None:
    error = InflightError(Status.UNAVAILABLE, f"errors resolving nowhere:1: [field:hostname lookup error:{reason}]")
    if is_final:
        with pytest.raises(InflightError, match="the host name of 'nowhere:1' cannot be resolved"):
            World(request()).break_off(error)
    else:
        World(request()).break_off(error)
    # A stream that had begun has reached a router: its name may appear again.
    begun(World(request())).break_off(error)


def test_a_new_request_that_is_refused_for_load_is_not_repeated() -> None:
    full = InflightError(Status.RESOURCE_EXHAUSTED, "queue full", Reason.QUEUE_FULL.value, retry_after_s=1.0)
    with pytest.raises(InflightError, match="queue full"):
        World(request()).break_off(full)


def test_waits_grow_at_random_and_heed_the_server() -> None:
    world = begun(World(request()))
    waits = [world.break_off() for _ in range(12)]
    assert waits[0] <= 0.1
    assert 1.0 < max(waits) <= 2.0
    told = InflightError(Status.UNAVAILABLE, "away", Reason.STORE_UNAVAILABLE.value, retry_after_s=5.0)
    assert world.break_off(told) == 5.0


def test_a_router_that_drains_is_left_at_once_and_heeded_when_asked_again() -> None:
    draining = InflightError(Status.UNAVAILABLE, "drains", Reason.DRAINING.value, retry_after_s=3.0)
    world = begun(World(request()))
    assert world.break_off(draining) <= 0.1
    assert world.break_off(draining) == 3.0


def give_up_after(world: World, error: InflightError = GONE) -> float:
    """Breaks until the client gives up; returns how long that took."""
    began_s = world.now_s
    with pytest.raises(InflightError) as caught:
        break_for_ever(world, error)
    assert caught.value is error
    return world.now_s - began_s


def break_for_ever(world: World, error: InflightError, *heard: inference_pb2.StreamEvent) -> None:
    """Breaks again and again, hearing the same each time; for a thousand seconds."""
    while world.now_s < 1100.0:
        world.break_off(error)
        world.hear(*heard)


def test_it_gives_up_after_so_long_without_anything_new() -> None:
    assert 55.0 < give_up_after(begun(World(request()))) <= 60.0
    assert 3.0 < give_up_after(begun(World(request(), resume_timeout_s=5.0))) <= 5.0
    assert give_up_after(World(request())) <= SUBMIT_TIMEOUT_S


def test_a_request_that_a_router_held_is_not_given_up_so_soon() -> None:
    world = World(request())
    world.now_s += ANSWERED_S + 1.0
    assert give_up_after(world) > SUBMIT_TIMEOUT_S


def test_something_new_begins_the_count_again() -> None:
    world = begun(World(request()), 1)
    for offset in range(1, 80):
        for _ in range(5):
            world.break_off()
        world.hear(accepted(), delta("x", offset))
    assert world.now_s > 200.0
    assert world.recovery.num_resumes == 79


def test_only_what_is_new_counts_as_progress() -> None:
    world = begun(World(request()))
    with pytest.raises(InflightError, match="connection reset"):
        break_for_ever(world, GONE, accepted(), started())


@pytest.mark.parametrize("deadlines", [None, inference_pb2.Deadlines(total=seconds(3.0))])
def test_it_gives_up_where_the_deadline_passes(deadlines: inference_pb2.Deadlines | None) -> None:
    world = begun(World(request(deadlines=deadlines), timeout_s=None if deadlines else 3.0))
    with pytest.raises(InflightError) as caught:
        break_for_ever(world, GONE)
    assert caught.value.code is Status.DEADLINE_EXCEEDED
    assert world.now_s < 103.0


def test_a_call_has_what_is_left_of_the_time() -> None:
    world = begun(World(request(), timeout_s=30.0))
    assert world.call.timeout_s == 30.0
    world.now_s += 10.0
    wait_s = world.break_off()
    assert world.call.timeout_s == pytest.approx(20.0 - wait_s)


# --- a request of another program's


def running(offset: int, text_bytes: list[int]) -> Recovery:
    asked = inference_pb2.ResumeRequest(request_id="r", resume_token="t", offsets=[offset], text_bytes=text_bytes)
    return Recovery.of_running(asked, RecoveryPolicy(), timeout_s=None, now_s=0.0, random=Random(1))


@pytest.mark.parametrize(("offset", "text_bytes", "behind"), [(5, [], []), (5, [9], [11]), (0, [], [2])])
def test_a_running_request_is_resumed_from_where_the_caller_is(
    offset: int, text_bytes: list[int], behind: list[int]
) -> None:
    recovery = running(offset, text_bytes)
    first = recovery.call(0.0).request
    assert isinstance(first, inference_pb2.ResumeRequest)
    assert (first.request_id, first.resume_token, list(first.offsets)) == ("r", "t", [offset])
    assert recovery.take(delta("é", offset), 0.0)
    assert isinstance(recovery.broken(GONE, 0.0), Again)
    second = recovery.call(0.0).request
    assert isinstance(second, inference_pb2.ResumeRequest)
    assert (list(second.offsets), list(second.text_bytes)) == ([offset + 1], behind)


def test_a_running_request_whose_output_is_lost_cannot_go_on() -> None:
    recovery = running(0, [])
    recovery.call(0.0)
    with pytest.raises(InflightError, match="DATA_LOSS"):
        recovery.broken(LOST, 0.0)


# --- taken over


TAKEN = InflightError(Status.ABORTED, "another reads", Reason.TAKEN_OVER.value)


def test_a_stream_that_a_late_try_of_its_own_may_have_taken_is_taken_back_once() -> None:
    world = World(request())
    world.now_s += 2.5  # the first try fails at one router, gRPC's second is answered by another
    begun(world)
    world.now_s += 1.0
    world.break_off(TAKEN)
    assert world.resume_request().offsets == [2]
    begun(world)
    with pytest.raises(InflightError, match="another reads"):
        world.recovery.broken(TAKEN, world.now_s)


def test_a_stream_taken_long_after_its_call_belongs_to_another_client() -> None:
    world = World(request())
    world.now_s += 2.5
    begun(world)
    world.now_s += 30.0
    with pytest.raises(InflightError, match="another reads"):
        world.recovery.broken(TAKEN, world.now_s)


# --- several choices


def of_choice(choice: int, wire: inference_pb2.StreamEvent) -> inference_pb2.StreamEvent:
    """The event for another choice."""
    (wire.delta if wire.HasField("delta") else wire.finished).choice = choice
    return wire


def test_choices_resume_each_behind_what_came() -> None:
    world = begun(World(request(n=3)))
    world.hear(of_choice(1, delta("é", 0)))
    world.break_off()
    resumed = world.resume_request()
    assert (list(resumed.offsets), list(resumed.text_bytes)) == ([2, 1, 0], [4, 2, 0])
    world.hear(accepted(), of_choice(2, delta("x", 0)), of_choice(1, delta("y", 1)))
    assert [choice.text for choice in world.recovery.transcript.choices] == ["éé", "éy", "x"]


def test_lost_choices_are_generated_from_the_beginning_and_what_came_is_cut() -> None:
    world = begun(World(request(n=2)))
    world.hear(of_choice(1, delta("a", 0)))
    world.break_off()
    world.break_off(LOST)
    sent = world.generate_request()
    assert not sent.HasField("prior_output")
    assert (sent.n, sent.idempotency_key) == (2, "key")
    wide = inference_pb2.Delta(offset=0, num_tokens=3, token_ids=[100, 101, 102], text="ééz")
    world.hear(accepted(), inference_pb2.StreamEvent(delta=wide), of_choice(1, delta("", 0)))
    world.break_off()
    world.break_off(LOST)
    world.hear(*begun_events(), delta("z", 2), of_choice(1, delta("", 0)), of_choice(1, delta("ab", 1)))
    assert [choice.text for choice in world.recovery.transcript.choices] == ["ééz", "ab"]
    assert [choice.num_tokens for choice in world.recovery.transcript.choices] == [3, 2]


def test_best_choices_are_generated_from_the_beginning() -> None:
    world = begun(World(request(best_of=3)))
    world.break_off()
    world.break_off(LOST)
    assert not world.generate_request().HasField("prior_output")
