"""Arbitrary frames of an executor: its router refuses each as a whole or applies it, without any other effect."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.common.errors import RequestError
from inflight.router.dispatch.ledger_writer import ledger_report
from inflight.router.executors.frame_checks import check_description, check_frame
from inflight.router.executors.link import ExecutorLink, LinkEvents
from inflight.router.ledger.types import Adopted, Demand, Ending
from inflight.router.lifecycle.events import LinkEvent, Withdrawn
from inflight.router.request.executor_context import FrameError, context_of
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2, resume_pb2, types_pb2
from tests.fuzz.messages import messages_of
from tests.support.examples import examples
from tests.support.ledger.scripted_store import ScriptedRouter, accepts, new_stream, place, placement, settled, steps

P = "inflight.v1."
SLOT = st.integers(0, 3)
HINTS = {
    f"{P}ServeResponse.generation": st.just(1),
    f"{P}SequenceAccepted.request_id": st.just("r"),
    f"{P}SequenceAccepted.attempt": st.just(1),
    f"{P}SequenceAccepted.slots": st.just([0]),
    f"{P}SequenceAttached.request_id": st.just("r"),
    f"{P}SequenceAttached.attempt": st.just(1),
    f"{P}SequenceAttached.slots": st.lists(SLOT, min_size=1, max_size=1),
    f"{P}SequenceRejected.request_id": st.just("r"),
    f"{P}SequenceRejected.attempt": st.just(1),
    f"{P}SequenceStarted.slot": SLOT,
    f"{P}SequenceFinished.slot": SLOT,
    f"{P}SequenceFinished.reason": st.integers(0, 8),
    f"{P}StepFrame.slots": st.lists(st.just(0), max_size=3),
    f"{P}StepFrame.offsets": st.tuples(st.sampled_from([0, 0, 2]), st.integers(0, 3)).map(
        lambda place: list(range(place[0], sum(place)))
    ),
    f"{P}StepFrame.token_ids": st.lists(st.integers(0, 4), max_size=3),
    f"{P}StepFrame.paused": st.just([0]),
    f"{P}Report.total_blocks": st.just(32),
    f"{P}Report.budget_blocks": st.integers(0, 33),
    f"{P}Report.budget_sequences": st.integers(0, 5),
}

DESCRIPTION = executor_pb2.DescribeResponse(
    executor_id="e0",
    generation=1,
    protocol_version=2,
    model="m",
    block_size=4,
    total_blocks=32,
    max_num_sequences=4,
    context_length=64,
    vocabulary_size=5,
)


async def offered() -> tuple[ScriptedRouter, ExecutorLink, RequestStream]:
    """A router that has offered request `r` to an executor."""
    submit = executor_pb2.Submit(request_id="r", prompt_ids=[1] * 10)
    submit.stopping.max_tokens = 20
    router, stream = ScriptedRouter("m"), RequestStream(Demand("r", 2, 9), submit, 0.0)
    link = router.link("e0", "m")
    link.description.CopyFrom(DESCRIPTION)
    return router, link, stream


def take_in(link: ExecutorLink, response: executor_pb2.ServeResponse) -> None:
    """What the link does with each response. An error that no check foresees is a bug."""
    try:
        link.take_in(response)
    except FrameError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise


@settings(max_examples=examples(150))
@given(frames=st.lists(messages_of(executor_pb2.ServeResponse, HINTS), max_size=4), is_seated=st.booleans())
async def test_any_frame_is_refused_or_taken_in(frames: list[executor_pb2.ServeResponse], is_seated: bool) -> None:
    router, link, stream = await offered()
    bystander_link, bystander = router.link("e1", "m"), new_stream()
    async with router.running():
        router.stores["m"].answers.append(placement())
        await router.pools.find("m").dispatcher.submit(stream)
        bystander_link._seated[0] = (bystander, 1)
        place(bystander, placement(executor_id="e1"))
        try:
            if is_seated:
                take_in(link, executor_pb2.ServeResponse(generation=1, accepted=accepts(1).accepted))
            for frame in frames:
                known = list(stream.output_ids)
                take_in(link, frame)
                assert stream.output_ids[: len(known)] == known
        except FrameError:
            link._break()
            assert not link._seated
            assert not link._offered
        await settled()
        # What was believed can be counted with
        for ending in router.stores["m"].endings:
            assert isinstance(ending, Ending)
            assert 0 <= (ending.computed_tokens or 0) <= 10
            assert 0 <= (ending.output_tokens or 0) <= 20
        assert all(0 <= token_id < 5 for token_id in stream.output_ids)
        assert len(stream.output_ids) <= 20
        # And the other executor's stream goes on
        bystander_link.receive(steps(3, 4))
        assert bystander.output_ids == [3, 4]


@settings(max_examples=examples(150))
@given(messages_of(executor_pb2.Report, HINTS))
def test_ledger_is_told_only_numbers_that_it_can_count_with(report: executor_pb2.Report) -> None:
    link = ExecutorLink("e0:1", "router", ScriptedRouter("m").pools)
    link.description.CopyFrom(DESCRIPTION)
    try:
        check_frame(executor_pb2.ServeResponse(generation=1, report=report), DESCRIPTION, {}, ())
    except FrameError:
        return
    told = ledger_report(link, report)
    assert 0 <= told.budget_blocks <= told.total_blocks == 32
    assert 0 <= told.budget_sequences <= 4
    assert 0 <= told.reserve_quantile <= 1
    assert all(0 <= speed < math.inf for speed in (told.step_ms, told.prefill_tokens_per_s))
    assert all(0 < len(held.request_id) <= 512 and held.blocks <= 32 for held in told.held)


def seated(**step: Any) -> executor_pb2.ServeResponse:
    return executor_pb2.ServeResponse(generation=1, step=executor_pb2.StepFrame(frame=2, **step))


def report(**fields: Any) -> executor_pb2.ServeResponse:
    whole = executor_pb2.Report(seq=2, total_blocks=32, budget_blocks=32, budget_sequences=4)
    whole.MergeFrom(executor_pb2.Report(**fields))
    return executor_pb2.ServeResponse(generation=1, report=whole)


def held(request_id: str = "x", blocks: int = 1, number: int = 1, attempt: int = 1) -> executor_pb2.ServeResponse:
    one = executor_pb2.HeldSequence(request_id=request_id, attempt=attempt, reserved_blocks=blocks)
    return report(held=[one] * number)


def ends(*reasons: int, slot: int = 0) -> executor_pb2.ServeResponse:
    response = seated()
    for reason in reasons:
        response.step.finished.add(slot=slot).reason = reason  # type: ignore[assignment]
    return response


def scores(slot: int = 0, position: int = 1, token_id: int = 1, count: int = 1) -> executor_pb2.ServeResponse:
    values = [types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=token_id, rank=1))] * count
    one = executor_pb2.SequencePromptLogprobs(slot=slot, position=position, values=values)
    return seated(prompt_logprobs=[one])


HOSTILE_FRAMES: dict[str, tuple[Callable[[], executor_pb2.ServeResponse], str]] = {
    "token of an unknown slot": (lambda: seated(slots=[9], offsets=[0], token_ids=[1]), "slot 9 holds no sequence"),
    "start of an unknown slot": (
        lambda: seated(started=[executor_pb2.SequenceStarted(slot=7)]),
        "slot 7 holds no sequence",
    ),
    "pause of an unknown slot": (lambda: seated(paused=[3]), "slot 3 holds no sequence"),
    "end of an unknown slot": (lambda: ends(types_pb2.FINISH_REASON_LENGTH, slot=5), "slot 5 holds no sequence"),
    "columns of different lengths": (lambda: seated(slots=[0, 0], offsets=[0], token_ids=[1]), "2 slots, 1 offsets"),
    "more tokens than were asked for": (
        lambda: seated(slots=[0] * 21, offsets=range(21), token_ids=[1] * 21),
        "token 20 of r is beyond the 20",
    ),
    "token outside the vocabulary": (lambda: seated(slots=[0], offsets=[0], token_ids=[5]), "not below 5"),
    "scores of a prompt in an unknown slot": (lambda: scores(slot=6), "slot 6 holds no sequence"),
    "scores of a prompt that were not asked for": (scores, "1 log probabilities from prompt token 1"),
    "scores of another prompt": (lambda: scores(token_id=2), "1 log probabilities from prompt token 1"),
    "scores of a prompt outside the vocabulary": (lambda: scores(token_id=5), "token 5 has the log probability"),
    "scores of the first token": (lambda: scores(position=0), "1 log probabilities from prompt token 0"),
    "more scores of prompts than a frame holds": (
        lambda: scores(count=2**15 + 1),
        "32769 log probabilities of prompts, and there can be 32768",
    ),
    "end told twice": (lambda: ends(types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_LENGTH), "leaves twice"),
    "end for no known reason": (lambda: ends(77), "for the reason 77"),
    "slot given again": (
        lambda: executor_pb2.ServeResponse(
            generation=1, accepted=[executor_pb2.SequenceAccepted(request_id="r", attempt=1, slots=[0])]
        ),
        "not offered",
    ),
    "attachment that was not asked for": (
        lambda: executor_pb2.ServeResponse(
            generation=1, attached=[executor_pb2.SequenceAttached(request_id="r", attempt=1, slots=[1])]
        ),
        "not offered",
    ),
    "another generation": (lambda: executor_pb2.ServeResponse(generation=2), "its generation is 2"),
    "more budget than blocks": (lambda: report(budget_blocks=33), "budget_blocks is 33 of 32"),
    "another size": (lambda: report(total_blocks=2**32 - 1), "in its description 32"),
    "2,000 checkpoints": (lambda: report(checkpoint_names=range(2000)), "it names 2000 checkpoints"),
    "more seats than it has": (lambda: report(budget_sequences=2**32 - 1), "budget_sequences"),
    "speed that is no number": (lambda: report(step_ms=math.nan), "step_ms is nan"),
    "infinite speed": (lambda: report(prefill_tokens_per_s=math.inf), "prefill_tokens_per_s is inf"),
    "negative time": (lambda: report(device_busy_s=-1.0), "device_busy_s is -1"),
    "quantile above one": (lambda: report(reserve_quantile=1.5), "reserve_quantile is 1.5"),
    "quantile that is no number": (lambda: report(reserve_quantile=math.nan), "reserve_quantile is nan"),
    "report number beyond a double": (lambda: report(seq=2**64 - 1), "seq is"),
    "held sequence with a NUL in its name": (lambda: held("a\0b"), "held request_id"),
    "held sequence with no name": (lambda: held(""), "held request_id"),
    "held sequence larger than the pool": (lambda: held(blocks=33), "33 blocks of 32"),
    "huge list of held sequences": (lambda: held(number=20_000), "holds 20000"),
    # The ledger adds one, and an attempt of 2^32 is none that a message can carry.
    "held sequence with the last attempt that there is": (lambda: held(attempt=2**32 - 1), "held x is 4294967295"),
    "held sequence before its first attempt": (lambda: held(attempt=0), "attempt of the held x is 0"),
}


@pytest.mark.parametrize("name", HOSTILE_FRAMES)
async def test_frame_that_cannot_be_true_is_refused_with_the_reason(name: str) -> None:
    make_frame, why = HOSTILE_FRAMES[name]
    router, link, stream = await offered()
    async with router.running():
        router.stores["m"].answers.append(placement())
        await router.pools.find("m").dispatcher.submit(stream)
        take_in(link, executor_pb2.ServeResponse(generation=1, accepted=accepts(1).accepted))
        with pytest.raises(FrameError, match=why):
            take_in(link, make_frame())


async def run_with_gap(router: ScriptedRouter, link: ExecutorLink, stream: RequestStream) -> None:
    """Request `r` runs, and its executor leaves out token 2 and those behind it up to 7."""
    router.stores["m"].answers.append(placement())
    await router.pools.find("m").dispatcher.submit(stream)
    take_in(link, executor_pb2.ServeResponse(generation=1, accepted=accepts(1).accepted))
    take_in(link, seated(slots=[0, 0, 0], offsets=[0, 1, 8], token_ids=[1, 2, 3]))


def attached(slot: int) -> executor_pb2.ServeResponse:
    response = executor_pb2.ServeResponse(generation=1)
    response.attached.add(request_id="r", attempt=1, slots=[slot], started=True)
    return response


@pytest.mark.parametrize("answer", ["a gap again", "not held"])
async def test_gap_that_is_not_mended_gives_the_placement_up_and_asks_no_more(answer: str) -> None:
    router, link, stream = await offered()
    async with router.running():
        await run_with_gap(router, link, stream)
        if answer == "not held":
            rejected = executor_pb2.SequenceRejected(request_id="r", attempt=1)
            take_in(link, executor_pb2.ServeResponse(generation=1, rejected=[rejected]))
        else:
            take_in(link, attached(1))
            take_in(link, seated(slots=[1], offsets=[8], token_ids=[3]))
        # Then it is cancelled there and handed back with what it has, and nothing further is taken from there
        for _ in range(3):
            take_in(link, seated(slots=[0], offsets=[8], token_ids=[3]))
        await settled()
        assert [(cancel.request_id, cancel.attempt) for cancel in link._outbox.cancels] == [("r", 1)]
        ((request_id, attempt, how),) = router.stores["m"].hand_backs
        assert (request_id, attempt, how["output_tokens"]) == ("r", 1, 2)
        assert len(link._outbox.attaches) == 1
        assert stream.output_ids == [1, 2]


def test_executor_that_knows_no_attach_has_its_gap_given_up_at_once() -> None:
    router = ScriptedRouter("m")
    link, stream = router.link("e0", "m"), new_stream()
    link.description.protocol_version = 1
    told: list[LinkEvent] = []
    link.come_up(cast(LinkEvents, SimpleNamespace(on_request=lambda link, stream, event: told.append(event))))
    place(stream, placement())
    link._seated[0] = (stream, 1)
    link.receive(steps(1, offset=4))
    assert told == [Withdrawn(1)]
    assert not link._outbox.attaches


@pytest.mark.parametrize(
    ("router_context", "request_id"),
    [
        (b"\xff", "r"),
        (b"", "r"),
        (resume_pb2.RouterContext(tenant="other", request_id="r").SerializeToString(), "r"),
        (resume_pb2.RouterContext(tenant="default", request_id="r").SerializeToString(), "s"),
    ],
)
def test_attachment_with_another_requests_context_is_refused(router_context: bytes, request_id: str) -> None:
    one = executor_pb2.SequenceAttached(request_id="r")
    one.submit.request_id, one.submit.router_context = request_id, router_context
    with pytest.raises(FrameError, match="router_context of r"):
        context_of(one)
    fitting = resume_pb2.RouterContext(tenant="default", request_id="r")
    one.submit.request_id, one.submit.router_context = "r", fitting.SerializeToString()
    assert context_of(one) == fitting


def returned(**context: Any) -> executor_pb2.SequenceAttached:
    """What an honest executor answers to an Attach for request `r`, with these fields of its context changed."""
    one = executor_pb2.SequenceAttached(request_id="r", attempt=1, slots=[0], started=True)
    stored = resume_pb2.RouterContext(tenant="default", request_id="r", wants_token_ids=True, wants_text=True)
    stored.MergeFrom(resume_pb2.RouterContext(**context))
    one.submit.MergeFrom(
        executor_pb2.Submit(
            request_id="r",
            attempt=1,
            prompt_ids=[1] * 10,
            sampling=types_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
            stopping=types_pb2.StoppingParams(max_tokens=20),
            priority=types_pb2.PRIORITY_CLASS_STANDARD,
            router_context=stored.SerializeToString(),
        )
    )
    return one


def resubmitted(**fields: Any) -> executor_pb2.SequenceAttached:
    """The same with fields of its Submit changed."""
    one = returned()
    for name, value in fields.items():
        one.submit.ClearField(name)
        one.submit.MergeFrom(executor_pb2.Submit(**{name: value}))
    return one


TOOLS = {"name": "x", "layout": "object", "begin": "<", "end": ">"}


def stored_format(**members: Any) -> str:
    """The JSON of an answer's format with these members."""
    return json.dumps({"tools": None, "reasoning": None, "in_reasoning": False, "texts": {}} | members)


HOSTILE_ATTACHMENTS: dict[str, tuple[Callable[[], executor_pb2.SequenceAttached], str]] = {
    **{
        f"answer format {text[:60]}": (functools.partial(returned, answer_format=text), "router_context.answer_format")
        for text in (
            "{",
            " ",
            "null",
            "[]",
            "{}",
            "[" * 100_000,
            stored_format(tools={}),
            stored_format(tools={**TOOLS, "middle": None}),
            stored_format(tools=TOOLS, in_reasoning=1),
            stored_format(tools=TOOLS, texts={"f": [1]}),
            stored_format(reasoning={"begin": ""}),
            stored_format(reasoning={"frames": [1]}),
        )
    },
    "empty stop string": (functools.partial(returned, stop=[""]), r"router_context.stop\[0\] of r has 0 characters"),
    "stop string of a megabyte": (functools.partial(returned, stop=["a" * 2**20]), "has 1048576 characters"),
    "65 stop strings": (functools.partial(returned, stop=["a"] * 65), "has 65 texts"),
    "operation that is none": (functools.partial(returned, operation="x"), "router_context.operation of r is 'x'"),
    "2^32 choices": (functools.partial(returned, num_choices=2**32 - 1), "router_context.num_choices"),
    "more choices sent than generated": (functools.partial(returned, num_sent_choices=2), "of which 2 are sent"),
    "lifetime below zero": (functools.partial(returned, resume_ttl={"seconds": -1}), "router_context.resume_ttl"),
    "lifetime of an age": (functools.partial(returned, resume_ttl={"seconds": 2**62}), "router_context.resume_ttl"),
    "digest of a megabyte": (functools.partial(returned, digest=b"x" * 2**20), "router_context.digest"),
    "deadline near 2^64": (functools.partial(resubmitted, deadline_ms=2**64 - 1), "submit.deadline_ms of r is 184467"),
    "no prompt": (functools.partial(resubmitted, prompt_ids=[]), "submit.prompt_ids of r is empty"),
    "prompt outside the vocabulary": (functools.partial(resubmitted, prompt_ids=[1, 5]), r"submit.prompt_ids\[1\]"),
    "more tokens than the context": (
        functools.partial(resubmitted, stopping={"max_tokens": 2**32 - 1}),
        "submit.stopping.max_tokens of r is 4294967295",
    ),
    "no tokens": (functools.partial(resubmitted, stopping={}), "submit.stopping.max_tokens of r is 0"),
    "temperature below zero": (functools.partial(resubmitted, sampling={"temperature": -1}), "sampling.temperature"),
    "priority that is none": (functools.partial(resubmitted, priority=9), "submit.priority of r is 9"),
    "no priority": (functools.partial(resubmitted, priority=0), "submit.priority of r is 0"),
    "adapter that is no hash": (
        functools.partial(resubmitted, adapter_hash="x y"),
        "submit.adapter_hash of r is 'x y'",
    ),
    "constraint with another's hash": (functools.partial(resubmitted, constraint={"grammar": "{}"}), "its hash"),
    "2^32 log probabilities": (functools.partial(resubmitted, num_top_logprobs=2**32 - 1), "submit.num_top_logprobs"),
}


@pytest.mark.parametrize("name", HOSTILE_ATTACHMENTS)
async def test_returned_request_that_no_router_can_have_sent_is_refused_with_its_field(name: str) -> None:
    make_attached, why = HOSTILE_ATTACHMENTS[name]
    router = ScriptedRouter("m")
    router.link("e0", "m")
    restore = functools.partial(router.service._preparation.restore, router.pools.find("m"))
    assert restore(returned()).request_id == "r"
    with pytest.raises(FrameError, match=why):
        restore(make_attached())


async def test_answer_that_cannot_be_true_ends_the_callers_wait_with_the_link() -> None:
    router = ScriptedRouter("m")
    link, pool = router.link("e0", "m"), router.pools.find("m")
    async with router.running():
        router.stores["m"].answers.append(Adopted(placement(), ended=False))
        restore = functools.partial(router.service._preparation.restore, pool)
        resumed = asyncio.create_task(pool.dispatcher.resume("r", restore))
        await settled()
        with pytest.raises(FrameError, match="answer_format"):
            take_in(link, executor_pb2.ServeResponse(generation=1, attached=[returned(answer_format="{")]))
        link._break()
        with pytest.raises(RequestError, match="cannot be reached"):
            await resumed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("executor_id", ""),
        ("executor_id", "a\0b"),
        ("executor_id", "e" * 600),
        ("generation", 0),
        ("generation", 2**64 - 1),
        ("block_size", 0),
        ("total_blocks", 0),
        ("max_num_sequences", 0),
        ("context_length", 0),
        ("context_length", 1),
        ("vocabulary_size", 0),
        ("device", "x" * 10_000),
        ("state_grid_tokens", 1),
        ("state_grid_tokens", 2**30),
    ],
)
def test_description_by_which_nothing_can_be_placed_is_refused(field: str, value: str | int) -> None:
    description = executor_pb2.DescribeResponse()
    description.CopyFrom(DESCRIPTION)
    check_description(description)
    setattr(description, field, value)
    with pytest.raises(FrameError, match=field):
        check_description(description)


@pytest.mark.parametrize(
    "defaults",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"repetition_penalty": float("nan")},
        {"bad_word_ids": [{"ids": [2**31]}]},
        {"logit_bias": {2**31: 1.0}},
    ],
)
def test_description_whose_defaults_no_request_could_have_is_refused(defaults: dict[str, Any]) -> None:
    description = executor_pb2.DescribeResponse()
    description.CopyFrom(DESCRIPTION)
    description.default_sampling.MergeFrom(types_pb2.SamplingParams(**defaults))
    with pytest.raises(FrameError, match=f"default_sampling.{next(iter(defaults))}"):
        check_description(description)


async def test_start_that_claims_more_cached_tokens_than_the_prompt_has_is_no_credit() -> None:
    router, link, stream = await offered()
    async with router.running():
        router.stores["m"].answers.append(placement())
        await router.pools.find("m").dispatcher.submit(stream)
        link.receive(accepts(1))
        link.receive(steps(1, cached=2**32 - 1, end=types_pb2.FINISH_REASON_STOP_TOKEN))
        await settled()
        (ending,) = router.stores["m"].endings
        assert isinstance(ending, Ending)
        assert ending.computed_tokens == 0
