"""Constrained output of a small model: valid whatever the batch, and the same tokens in every circumstance."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
from transformers import LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Overcommit
from inflight.executor.scheduler.scheduler import NOTHING_ALLOWED, Scheduler, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, Processors, Sampling, Sequence, Stopping
from inflight.router.constraint.answer_grammar import AnswerRules
from inflight.router.constraint.source import ConstraintSource, canonical
from inflight.router.tools.formats import THINK, AnswerFormat
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.scheduler.scheduling import make_limits
from tests.support.text.small_vocabulary import (
    BOS_ID,
    EOS_ID,
    OTHER_EOS_ID,
    TEXTS,
    VOCABULARY_SIZE,
    constraint,
    regex_grammar,
    schema_grammar,
    text_of,
)

BLOCK_SIZE = 16
NUM_BLOCKS = 800
CONTEXT_LENGTH = 192
MAX_TOKENS = 170
ENDS = frozenset({EOS_ID, OTHER_EOS_ID})
LIMITS = make_limits(max_num_sequences=32, num_standby_sequences=64, max_num_tokens=64, context_length=CONTEXT_LENGTH)
ALONE = replace(LIMITS, max_num_sequences=1, max_num_tokens=16, num_standby_sequences=95)


def an_object(**properties: Any) -> dict[str, Any]:
    """All of them required, and no others."""
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: tuple[dict[str, Any], ...] = (
    an_object(a={"type": "integer"}),
    an_object(a={"type": "integer", "minimum": -5, "maximum": 120}, b={"type": "boolean"}),
    an_object(name={"type": "string", "maxLength": 8}, age={"type": "integer", "exclusiveMinimum": 0}),
    an_object(a=an_object(b=an_object(c={"type": "null"}))),
    {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["y"]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    {"type": "object", "properties": {"t": {"const": "ab"}}, "required": ["t"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5},
    {"type": "array", "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "boolean"}], "items": False},
    {"type": "array", "items": {"enum": ["ab", "ba", None, 12]}, "minItems": 1, "maxItems": 6},
    {"type": "array", "items": an_object(k={"type": "integer"}), "maxItems": 3},
    {"type": "string", "minLength": 2, "maxLength": 12},
    {"type": "string", "pattern": "^[ab]{2,4}-[0-9]+$", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": ["integer", "null"]},
    {"enum": ["true", True, 1, "one", [1, 2]]},
    {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "string", "maxLength": 4}]},
    {"$defs": {"tree": an_object(v={"type": "integer"}) | {"required": ["v"]}}, "$ref": "#/$defs/tree"},
    {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 99}]},
)


LONG_ARRAY = schema_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 30})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedModel]:
    config = LlamaConfig(**sizes(vocab_size=VOCABULARY_SIZE, eos_token_id=[EOS_ID, OTHER_EOS_ID]))
    folder = save_model(config, tmp_path_factory.mktemp("model") / "tiny")
    with torch_threads(1):
        loaded = load_model(resolve_model(str(folder)), dtype_name="float32", device_name="cpu")
        loaded.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        yield loaded


def make(
    request_id: str,
    grammar: str | None,
    seed: int,
    *,
    prior_output: list[int] | None = None,
    max_tokens: int = MAX_TOKENS,
    min_tokens: int = 0,
    ignores_eos: bool = False,
    is_overcommitted: bool = False,
    **more: Any,
) -> Sequence:
    prompt = [4 + (seed * 7 + i) % 90 for i in range(3 + seed % 9)]
    num_known = len(prompt) + len(prior_output or ())
    num_blocks = num_known // BLOCK_SIZE + 1 if is_overcommitted else -(-(len(prompt) + max_tokens) // BLOCK_SIZE)
    return Sequence(
        request_id,
        1,
        [*prompt, *(prior_output or [])],
        len(prompt),
        Sampling(1.5 if seed % 5 else 0.0, 0, 1.0, seed),
        Stopping(max_tokens, min_tokens, ENDS),
        num_blocks,
        b"",
        constraint=None if grammar is None else constraint(grammar, ignores_eos=ignores_eos),
        **more,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    output: list[int]
    reason: FinishReason
    is_unfinished: bool
    error: str

    @classmethod
    def of(cls, event: FinishEvent) -> Answer:
        sequence = event.sequence
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        return cls(output, event.reason, event.constraint_unfinished, event.error)

    @property
    def text(self) -> str:
        return text_of(self.output)


def run(
    model: PagedModel,
    sequences: list[Sequence],
    limits: SchedulerLimits = LIMITS,
    *,
    overlap: bool = True,
    num_blocks: int = NUM_BLOCKS,
) -> dict[str, Answer]:
    """The answers to requests that arrive at once."""
    outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
    runner = ModelRunner(model, limits, BLOCK_SIZE)
    scheduler = Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE))
    engine = Engine(scheduler, runner, outputs.put, lambda error: None, overlap=overlap)
    for sequence in sequences:
        engine.submit(sequence)
    engine.start()
    answers: dict[str, Answer] = {}
    while len(answers) < len(sequences):
        output = outputs.get(timeout=120)
        assert not output.rejected
        answers.update((event.sequence.request_id, Answer.of(event)) for event in output.finished)
    engine.stop()
    runner.close()
    scheduler.check_when_idle()
    run_preemptions.append(scheduler.num_preemptions)
    return answers


# Preemptions of the runs, newest last.
run_preemptions: list[int] = []


def mixed(num: int = 32, *, is_overcommitted: bool = False) -> list[Sequence]:
    """Two of three are constrained."""
    return [
        make(
            f"r{i}",
            schema_grammar(SCHEMAS[i % len(SCHEMAS)]) if i % 3 else None,
            i,
            max_tokens=20 + i if i % 4 == 0 else MAX_TOKENS,
            is_overcommitted=is_overcommitted,
        )
        for i in range(num)
    ]


def in_range(text: str) -> float:
    """A number of JSON may be beyond the range of a double; the validators take none that is not finite."""
    return max(-1e300, min(1e300, float(text)))


def check_document(schema: dict[str, Any], answer: Answer) -> None:
    """What ended by itself is valid by two validators; what did not says so."""
    assert answer.error == ""
    if answer.reason is FinishReason.LENGTH:
        if not answer.is_unfinished:
            json.loads(answer.text)
        return
    assert answer.reason is FinishReason.STOP_TOKEN
    assert answer.output[-1] in ENDS
    document = json.loads(answer.text, parse_float=in_range)
    jsonschema.Draft202012Validator(schema).validate(document)
    jsonschema_rs.validator_for(schema).validate(document)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.slow)], ids=["few", "many"])
def test_every_answer_that_stops_is_valid(model: PagedModel, seeds: range) -> None:
    num_stopped = 0
    for seed in seeds:
        sequences = [make(f"s{i}", schema_grammar(schema), 5 * seed + 1 + i) for i, schema in enumerate(SCHEMAS)]
        answers = run(model, sequences)
        for i, schema in enumerate(SCHEMAS):
            check_document(schema, answers[f"s{i}"])
            num_stopped += answers[f"s{i}"].reason is FinishReason.STOP_TOKEN
    assert num_stopped > len(seeds) * len(SCHEMAS) // 2


def test_rows_are_the_same_alone_in_a_batch_and_without_overlap(model: PagedModel) -> None:
    expected = run(model, mixed(), ALONE)
    for i in range(32):
        if i % 3:
            check_document(SCHEMAS[i % len(SCHEMAS)], expected[f"r{i}"])
    assert any(answer.is_unfinished for answer in expected.values())
    for is_chunked, overlap in ((True, True), (False, False)):
        limits = replace(LIMITS, enable_chunked_context=is_chunked)
        assert run(model, mixed(), limits, overlap=overlap) == expected


def test_preemption_changes_nothing(model: PagedModel) -> None:
    # Given long answers, and a pool that holds one of them to its end.
    forms = [LONG_ARRAY, regex_grammar("([ab]{3,5} ){20,30}"), None, LONG_ARRAY]

    def crowd(*, is_overcommitted: bool) -> list[Sequence]:
        return [make(f"r{i}", forms[i % 4], i, is_overcommitted=is_overcommitted) for i in range(12)]

    expected = run(model, crowd(is_overcommitted=False), ALONE)
    limits = replace(
        LIMITS,
        policy=SchedulerPolicy.MAX_UTILIZATION,
        max_num_sequences=8,
        overcommit=Overcommit(watermark=0, margin=0, max_steps_away=100_000),
    )
    for overlap in (True, False):
        answers = run(model, crowd(is_overcommitted=True), limits, overlap=overlap, num_blocks=14)
        assert answers == expected
        assert run_preemptions[-1] >= 8


def test_answer_goes_on_in_the_middle_of_an_object(model: PagedModel) -> None:
    grammar = schema_grammar(SCHEMAS[2])
    for seed in (6, 10):
        whole = run(model, [make("whole", grammar, seed)])["whole"]
        assert whole.reason is FinishReason.STOP_TOKEN
        cuts = [make(f"{n}", grammar, seed, prior_output=whole.output[:n]) for n in range(1, len(whole.output))]
        for answer in run(model, cuts).values():
            assert answer == whole


def test_end_of_reasoning_is_forced_at_its_budget_in_every_circumstance(model: PagedModel) -> None:
    def crowd(num: int, *, is_overcommitted: bool = False) -> list[Sequence]:
        sequences = []
        for i in range(num):
            budget = 5 * i
            rules = AnswerRules(
                AnswerFormat(None, THINK, in_reasoning=True), token_ids={THINK.end: BOS_ID}, most_reasoning=budget
            )
            grammar = canonical(ConstraintSource("regex", ("([ab]{3,5} ){5,9}",), reasoning=rules.to_json()))
            sequences.append(make(f"{budget}", grammar, i, is_overcommitted=is_overcommitted))
        return sequences

    expected = run(model, crowd(8), ALONE)
    for name, answer in expected.items():
        place = answer.output.index(BOS_ID)
        assert place <= int(name)
        assert answer.reason is FinishReason.STOP_TOKEN
        assert set(text_of(answer.output[place + 1 :])) <= set("ab \n")
    assert any(answer.output.index(BOS_ID) == int(name) for name, answer in expected.items() if name != "0")
    assert run(model, crowd(8)) == expected
    limits = replace(
        LIMITS,
        policy=SchedulerPolicy.MAX_UTILIZATION,
        max_num_sequences=8,
        overcommit=Overcommit(watermark=0, margin=0, max_steps_away=100_000),
    )
    assert run(model, crowd(8, is_overcommitted=True), limits, num_blocks=14) == expected
    assert run_preemptions[-1] >= 3
    whole = crowd(8)[4]
    assert whole.constraint is not None
    known = expected[whole.request_id]
    cuts = [
        make(f"{n}", whole.constraint.grammar, 4, prior_output=known.output[:n]) for n in range(1, len(known.output))
    ]
    for answer in run(model, cuts).values():
        assert answer == known


def test_prior_output_that_the_grammar_does_not_allow_is_an_error(model: PagedModel) -> None:
    bad = make("bad", regex_grammar("[ab]+"), 3, prior_output=[TEXTS.index("z")])
    answers = run(model, [bad, make("good", regex_grammar("[ab]{3}"), 4)])
    assert answers["bad"].reason is FinishReason.ERROR
    assert answers["bad"].error == "the output so far does not satisfy the grammar of the constraint"
    assert answers["good"].reason is FinishReason.STOP_TOKEN


def test_complete_grammar_ends_the_output_whatever_else_is_asked(model: PagedModel) -> None:
    grammar, sampling = regex_grammar("(ab){2}"), Processors(bias=((EOS_ID, -100.0), (OTHER_EOS_ID, -100.0)))
    answers = run(
        model,
        [
            make("min_tokens", grammar, 1, min_tokens=40),
            make("ignores_eos", grammar, 2, ignores_eos=True),
            make("bias", grammar, 3, processors=sampling),
            make("allowed", grammar, 4, processors=Processors(allowed_ids=frozenset(map(TEXTS.index, "abc")))),
        ],
    )
    for name, answer in answers.items():
        assert (name, answer.text, answer.reason, answer.is_unfinished) == (
            name,
            "abab",
            FinishReason.STOP_TOKEN,
            False,
        )


def test_no_token_allowed_ends_with_an_error(model: PagedModel) -> None:
    grammar = regex_grammar("a+b")
    banned = make("banned", grammar, 1, processors=Processors(bad_words=((TEXTS.index("a"),),)))
    banned.processors = Processors(bad_words=tuple((i,) for i in range(4, VOCABULARY_SIZE)))
    outside = make("outside", grammar, 2, processors=Processors(allowed_ids=frozenset({TEXTS.index("z")})))
    answers = run(model, [banned, outside, make("other", None, 3)])
    for name in ("banned", "outside"):
        assert answers[name] == Answer([], FinishReason.ERROR, False, NOTHING_ALLOWED)
    assert not answers["other"].error


def test_length_says_whether_the_grammar_was_satisfied(model: PagedModel) -> None:
    answers = run(
        model,
        [
            make("cut", regex_grammar("[ab]{9}c"), 1, max_tokens=4),
            make("open", regex_grammar("[ab]+"), 2, max_tokens=4, ignores_eos=True),
            make("free", None, 3, max_tokens=4),
        ],
    )
    unfinished = {
        name: answer.is_unfinished for name, answer in answers.items() if answer.reason is FinishReason.LENGTH
    }
    assert unfinished["cut"]
    assert not unfinished["open"]
    assert not unfinished.get("free", False)


def test_stop_token_of_the_request_leaves_the_grammar_unfinished(model: PagedModel) -> None:
    stop = TEXTS.index("c")
    for grammar, is_unfinished in ((regex_grammar("[abc]{9}"), True), (regex_grammar("[ab]{0,3}c"), False)):
        sequence = make("r", grammar, 2)
        sequence.stopping = replace(sequence.stopping, stop_token_ids=ENDS | {stop})
        answer = run(model, [sequence])["r"]
        if answer.output[-1] == stop:
            assert answer.reason is FinishReason.STOP_TOKEN
            # The stop token is not part of the output, and without it these texts are not complete.
            assert answer.is_unfinished or not is_unfinished
