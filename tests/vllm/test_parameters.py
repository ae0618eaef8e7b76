"""The translation of parameters to vLLM's: each is mapped or refused by its name."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from inflight.common.grammar import canonical_grammar, canonical_grammars, grammar_hash
from inflight.common.parameters import NEUTRAL_SAMPLING, PARAMETERS
from inflight.executor.scheduler.sequence import Constraint, Processors, Sampling, Sequence
from inflight.executor.vllm.parameters import cache_salt, sampling_parameters, structured_output, unsupported
from tests.support.scheduler.scheduling import STOP_ID, make_sequence

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


def test_every_sampling_number_is_mapped_or_refused() -> None:
    """A new one in the table of parameters must be decided about here."""
    refused = {"no_repeat_ngram_size"}
    assert NEUTRAL_SAMPLING.keys() - refused <= sampling_parameters(sequence_of()).keys()
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
    assert sampling_parameters(sequence) == {
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
    parameters = sampling_parameters(sequence)
    assert (parameters["max_tokens"], parameters["min_tokens"]) == (16, 2)
    sequence.length_limit = 8
    parameters = sampling_parameters(sequence)
    assert (parameters["max_tokens"], parameters["min_tokens"]) == (1, 1)


@pytest.mark.parametrize(
    ("sequence", "name"),
    [
        (sequence_of(Sampling(0.005, 0, 1.0, 0)), "sampling.temperature"),
        (sequence_of(Sampling(2.5, 0, 1.0, 0)), "sampling.temperature"),
        (sequence_of(processors=Processors(no_repeat_ngram_size=3)), "sampling.no_repeat_ngram_size"),
        (sequence_of(grammar=canonical_grammars({"lark_grammar": "start: @a"}, {"name": "a"})), "constraint"),
        (sequence_of(grammar=canonical_grammar("json_schema", SCHEMA), prior_output=(4,)), "constraint"),
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


def test_schema_keeps_the_order_of_its_properties() -> None:
    sequence = sequence_of(grammar=canonical_grammar("json_schema", SCHEMA))
    assert unsupported(sequence) == ""
    form = sampling_parameters(sequence)["structured_outputs"]
    assert list(json.loads(form["json"])["properties"]) == ["b", "a"]


def test_lark_grammar_cannot_be_taken_for_another_language() -> None:
    assert structured_output(constraint_of("start: /a+/")) == {"grammar": "%llguidance {}\nstart: /a+/"}
    text = '%llguidance {"x": 1}\nstart: "a"'
    assert structured_output(constraint_of(text)) == {"grammar": text}


def constraint_of(lark: str) -> Constraint:
    grammar = canonical_grammar("lark_grammar", lark)
    return Constraint(grammar, grammar_hash(grammar), frozenset())


def test_salts_separate_tenants_and_a_bypass_from_everything() -> None:
    def salted(salt: bytes | None, attempt: int = 1) -> Sequence:
        return replace(make_sequence("r", [1], salt=salt), attempt=attempt)

    assert cache_salt(salted(b"")) is None
    assert cache_salt(salted(b"a")) != cache_salt(salted(b"b"))
    bypassing = {cache_salt(salted(None)), cache_salt(salted(None, 2))}
    assert len(bypassing) == 2
    assert sampling_parameters(sequence_of()).get("skip_reading_prefix_cache") is None
    sequence = sequence_of()
    sequence.cache_salt = None
    assert sampling_parameters(sequence)["skip_reading_prefix_cache"] is True
