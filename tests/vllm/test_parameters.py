"""The translation of parameters to vLLM's: each is mapped or refused by its name."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import llguidance
import pytest

from inflight.common.grammar import canonical_grammar, canonical_grammars, grammar_hash
from inflight.common.parameters import NEUTRAL_SAMPLING, PARAMETERS
from inflight.executor.scheduler.sequence import Constraint, Processors, Sampling, Sequence
from inflight.executor.vllm.parameters import (
    REPLAYED_OUTPUT,
    cache_salt,
    replays,
    sampling_parameters,
    structured_output,
    unsupported,
)
from tests.support.scheduler.scheduling import STOP_ID, make_sequence
from tests.support.text.grammars import TOKENIZER

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def sequence_of(
    sampling: Sampling | None = None,
    processors: Processors | None = None,
    grammar: str = "",
    prior_output: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> Sequence:
    sequence = make_sequence("r", [1, 2, 3], max_tokens=20, min_tokens=min_tokens, prior_output=prior_output)
    if sampling is not None:
        sequence.sampling = sampling
    if processors is not None:
        sequence.processors = processors
    if grammar:
        sequence.constraint = Constraint(grammar, grammar_hash(grammar), frozenset({STOP_ID}))
    sequence.length_limit = 23
    return sequence


def parameters_of(sequence: Sequence) -> dict[str, Any]:
    """What vLLM gets if all tokens are its prompt."""
    return sampling_parameters(sequence, len(sequence.token_ids))


def test_every_sampling_number_is_mapped_or_refused() -> None:
    """A new one in the table of parameters must be decided about here."""
    refused = {"no_repeat_ngram_size"}
    assert NEUTRAL_SAMPLING.keys() - refused <= parameters_of(sequence_of()).keys()
    assert refused <= PARAMETERS.keys()
    known = {one.name for kind in (Sampling, Processors) for one in fields(kind)}
    assert known == {*NEUTRAL_SAMPLING, "seed", "bias", "allowed_ids", "bad_words"}


def test_values_are_passed_on() -> None:
    processors = Processors(
        bias=((7, -3.0),),
        allowed_ids=frozenset({9, 8}),
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.4,
        bad_words=((5,), (6, 7)),
    )
    sequence = sequence_of(Sampling(0.7, 40, 0.9, 2**63 + 5, 0.05), processors)
    sequence.num_top_logprobs, sequence.num_prompt_logprobs = 0, 3
    assert unsupported(sequence) == ""
    assert parameters_of(sequence) == {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "seed": 5,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "logit_bias": {7: -3.0},
        "allowed_token_ids": [8, 9],
        "_bad_words_token_ids": [[5], [6, 7]],
        "max_tokens": 20,
        "min_tokens": 0,
        "ignore_eos": True,
        "stop_token_ids": [STOP_ID],
        "logprobs": 0,
        "prompt_logprobs": 3,
        "detokenize": False,
    }


def test_continued_request_asks_for_what_is_left() -> None:
    sequence = sequence_of(prior_output=(4, 5, 6, 7), min_tokens=6)
    parameters = parameters_of(sequence)
    assert (parameters["max_tokens"], parameters["min_tokens"]) == (16, 2)
    sequence.length_limit = 8
    parameters = parameters_of(sequence)
    assert (parameters["max_tokens"], parameters["min_tokens"]) == (1, 1)


@pytest.mark.parametrize(
    ("sequence", "name"),
    [
        (sequence_of(Sampling(0.005, 0, 1.0, 0)), "sampling.temperature"),
        (sequence_of(Sampling(2.5, 0, 1.0, 0)), "sampling.temperature"),
        (sequence_of(processors=Processors(no_repeat_ngram_size=3)), "sampling.no_repeat_ngram_size"),
        (sequence_of(grammar=canonical_grammar("json_schema", SCHEMA), min_tokens=2), "stopping.min_tokens"),
        (
            sequence_of(
                grammar=canonical_grammar("json_schema", SCHEMA), processors=Processors(allowed_ids=frozenset({1}))
            ),
            "sampling.allowed_token_ids",
        ),
    ],
)
def test_refusal_names_the_parameter(sequence: Sequence, name: str) -> None:
    assert unsupported(sequence).startswith(f"{name}: ")


def test_what_depends_on_the_output_so_far_is_generated_again() -> None:
    greedy, sampled = Sampling(0.0, 0, 1.0, 0), Sampling(0.7, 0, 1.0, 0)
    schema = canonical_grammar("json_schema", SCHEMA)
    counting = [Processors(presence_penalty=1.0), Processors(frequency_penalty=1.0), Processors(bad_words=((5,),))]
    depending = [sequence_of(greedy, one, prior_output=(4, 5)) for one in counting]
    depending += [sequence_of(greedy, grammar=schema, prior_output=(4, 5))]
    exact = sequence_of(sampled, prior_output=(4, 5))
    exact.exact_resume = True
    for sequence in (*depending, exact):
        assert replays(sequence, can_replay=True)
        assert not replays(sequence, can_replay=False)
    others = [sequence_of(sampled, prior_output=(4, 5)), sequence_of(greedy, counting[0]), sequence_of(sampled)]
    repeating = sequence_of(greedy, Processors(repetition_penalty=1.3), prior_output=(4, 5))
    assert not any(replays(sequence, can_replay=True) for sequence in (*others, repeating))


def test_output_that_is_generated_again_counts_as_output() -> None:
    parameters = sampling_parameters(sequence_of(prior_output=(4, 5, 6), min_tokens=5), num_given=3)
    assert parameters["extra_args"] == {REPLAYED_OUTPUT: [4, 5, 6]}
    assert (parameters["max_tokens"], parameters["min_tokens"]) == (20, 5)


def test_vllm_that_cannot_generate_output_again_refuses_what_needs_it() -> None:
    constrained = sequence_of(grammar=canonical_grammar("json_schema", SCHEMA), prior_output=(4,))
    assert unsupported(constrained) == ""
    assert unsupported(constrained, can_replay=False).startswith("constraint: ")
    for sequence, is_refused in (
        (sequence_of(Sampling(0.7, 0, 1.0, 0)), True),
        (sequence_of(Sampling(0.0, 0, 1.0, 0), Processors(presence_penalty=1.0)), True),
        (sequence_of(Sampling(0.0, 0, 1.0, 0)), False),
    ):
        assert unsupported(sequence, can_replay=False) == ""
        sequence.exact_resume = True
        assert unsupported(sequence) == ""
        assert unsupported(sequence, can_replay=False).startswith("exact_resume: ") == is_refused


def test_grammars_that_others_refer_to_are_written_into_them() -> None:
    tool = 'start: args_0 | other\nargs_0: "<" @input_0 ">"\nother: %json {"enum":["@input_0"]}'
    texts = canonical_grammars({"lark_grammar": tool}, {"name": "input_0", "lark_grammar": 'start: "{" /[ab]+/'})
    schema = canonical_grammars(
        {"lark_grammar": 'start: "=" @constrained'}, {"name": "constrained", "json_schema": SCHEMA}
    )
    for grammar, accepted, refused in (
        (texts, b"<{abba>", b"<{abc>"),
        (texts, b'"@input_0"', b'"{ab"'),
        (schema, b'={"b":1,"a":"x"}', b'={"a":"x"}]'),
    ):
        form = structured_output(Constraint(grammar, grammar_hash(grammar), frozenset()))
        assert form is not None
        matcher = llguidance.LLMatcher(TOKENIZER, llguidance.grammar_from("grammar", form["grammar"]))
        assert matcher.try_consume_tokens(list(accepted)) == len(accepted)
        assert matcher.is_accepting()
        matcher.reset()
        assert matcher.try_consume_tokens(list(refused)) < len(refused)


def test_schema_keeps_the_order_of_its_properties() -> None:
    sequence = sequence_of(grammar=canonical_grammar("json_schema", SCHEMA))
    assert unsupported(sequence) == ""
    form = parameters_of(sequence)["structured_outputs"]
    assert list(json.loads(form["grammar"].partition("%json ")[2])["properties"]) == ["b", "a"]


def test_white_space_in_json_is_limited_by_old_versions_of_llguidance_too() -> None:
    """By those the pattern for white space is repeated. What is left of it stands behind commas and colons."""
    schema = {**SCHEMA, "x-guidance": {"whitespace_pattern": r"[ \n\r\t]{1,8}"}}
    text = json.dumps(schema, separators=(",", ":"))
    for constraint in (constraint_of(schema, "json_schema"), constraint_of(f"start: a\na: %json {text}")):
        form = structured_output(constraint)
        assert form is not None
        assert "whitespace_pattern" not in form["grammar"]
        for beginning, most in ((b"{", 0), (b'{"b":', 8), (b'{"b":1,', 8)):
            matcher = llguidance.LLMatcher(TOKENIZER, llguidance.grammar_from("grammar", form["grammar"]))
            assert matcher.try_consume_tokens(list(beginning + b"\n" * 99)) == len(beginning) + most


def test_lark_grammar_cannot_be_taken_for_another_language() -> None:
    assert structured_output(constraint_of("start: /a+/")) == {"grammar": "%llguidance {}\nstart: /a+/"}
    text = '%llguidance {"x": 1}\nstart: "a"'
    assert structured_output(constraint_of(text)) == {"grammar": text}


def constraint_of(grammar_or_schema: Any, member: str = "lark_grammar") -> Constraint:
    grammar = canonical_grammar(member, grammar_or_schema)
    return Constraint(grammar, grammar_hash(grammar), frozenset())


def test_salts_separate_tenants_and_a_bypass_from_everything() -> None:
    def salted(salt: bytes | None, attempt: int = 1) -> Sequence:
        return replace(make_sequence("r", [1], salt=salt), attempt=attempt)

    assert cache_salt(salted(b"")) is None
    assert cache_salt(salted(b"a")) != cache_salt(salted(b"b"))
    bypassing = {cache_salt(salted(None)), cache_salt(salted(None, 2))}
    assert len(bypassing) == 2
    assert parameters_of(sequence_of()).get("skip_reading_prefix_cache") is None
    sequence = sequence_of()
    sequence.cache_salt = None
    assert parameters_of(sequence)["skip_reading_prefix_cache"] is True
