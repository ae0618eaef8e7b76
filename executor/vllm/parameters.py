"""Translation of a sequence's parameters to those of vLLM. `docs/engines.md` has the same as a table.

Every parameter is passed on with the same meaning, or refused by its name. Pure: nothing here imports vLLM.

vLLM counts penalties over what it generates itself, begins a grammar at the first token of that, and draws its random
numbers in order. So there are two ways to continue output that began elsewhere. Where none of this matters, the output
so far is part of the prompt. Else vLLM generates it again (`replays`), one token in each step, with every other token
excluded: penalties, grammar and random numbers then stand where they would be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from inflight.executor.scheduler.sequence import Constraint, Sequence

# vLLM raises what is below the first to it, and refuses what is above the second.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
# vLLM seeds a generator of torch, which takes a signed number of 64 bits. It takes -1 for no seed.
NUM_SEEDS = 2**63

# llguidance 1.7, which vLLM 0.32 brings, lets the white space of a schema repeat without end: a model may write nothing
# else. Behind the marks between values it keeps a limit. Quotes are escaped where the schema is within another grammar.
WHITESPACE = re.compile(r'(\\?")x-guidance\1:\{\1whitespace_pattern\1:\1(.*?)\1\}')
MARKS = (("item_separator", ","), ("key_separator", ":"))
# The key of the output so far among the arguments of a request that are not vLLM's own.
REPLAYED_OUTPUT = "inflight_replayed_output"
# Where the output of a request without `exact_resume` that continues after a failure can differ from what it would have
# been; and the same where vLLM cannot generate it again.
INEXACT_RESUME = ("sampled tokens (vLLM's random numbers start again)",)
INEXACT_WITHOUT_REPLAY = (
    *INEXACT_RESUME,
    "presence_penalty, frequency_penalty and bad_words (vLLM counts the output so far as prompt)",
    "constraints (they end with an error)",
)


def depends_on_place(sequence: Sequence) -> bool:
    """Returns whether the next token depends on which tokens vLLM has generated itself."""
    processors = sequence.processors
    return (
        sequence.constraint is not None
        or bool(processors.frequency_penalty or processors.presence_penalty or processors.bad_words)
        or (sequence.exact_resume and sequence.sampling.temperature > 0)
    )


def replays(sequence: Sequence, *, can_replay: bool) -> bool:
    """Returns whether vLLM generates the output so far again."""
    return can_replay and sequence.num_output_tokens > 0 and depends_on_place(sequence)


def unsupported(sequence: Sequence, *, can_replay: bool = True) -> str:
    """Returns what vLLM cannot do for a sequence, beginning with the parameter's name; empty if it can do all."""
    if sequence.exact_resume and not can_replay and depends_on_place(sequence):
        return "exact_resume: this vLLM cannot generate output again, which penalties, constraints and sampling need"
    sampling, processors, constraint = sequence.sampling, sequence.processors, sequence.constraint
    if 0 < sampling.temperature < MIN_TEMPERATURE or sampling.temperature > MAX_TEMPERATURE:
        return f"sampling.temperature: vLLM takes 0 and {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    if processors.no_repeat_ngram_size:
        return "sampling.no_repeat_ngram_size: vLLM has none"
    if constraint is None:
        return ""
    if structured_output(constraint) is None:
        return "constraint: vLLM takes one JSON schema or one Lark grammar"
    if sequence.num_output_tokens and not can_replay:
        return "constraint: this vLLM cannot continue a constrained output that began elsewhere"
    # A grammar that allows only the end, or only other tokens, would leave vLLM nothing to sample.
    if sequence.stopping.min_tokens:
        return "stopping.min_tokens: not with a constraint on vLLM"
    if processors.allowed_ids:
        return "sampling.allowed_token_ids: not with a constraint on vLLM"
    return ""


def sampling_parameters(sequence: Sequence, num_given: int) -> dict[str, Any]:
    """Returns the keywords of vLLM's `SamplingParams` for a sequence that is not `unsupported`, besides those of its
    form of output. vLLM gets the first `num_given` tokens as the prompt, and generates those behind them again.
    `length_limit` must be set: the executor ends the sequence there."""
    sampling, processors, stopping = sequence.sampling, sequence.processors, sequence.stopping
    max_tokens = sequence.length_limit - num_given
    num_earlier = num_given - sequence.num_prompt_tokens
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed % NUM_SEEDS,
        "repetition_penalty": processors.repetition_penalty,
        "frequency_penalty": processors.frequency_penalty,
        "presence_penalty": processors.presence_penalty,
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, max(0, stopping.min_tokens - num_earlier)),
        # The stop tokens include the model's own unless they are to be ignored.
        "ignore_eos": True,
        "stop_token_ids": sorted(stopping.stop_token_ids),
        "logprobs": sequence.num_top_logprobs,
        "prompt_logprobs": sequence.num_prompt_logprobs,
        "detokenize": False,
    }
    if replayed := sequence.token_ids[num_given:]:
        parameters["extra_args"] = {REPLAYED_OUTPUT: replayed}
    if processors.bias:
        parameters["logit_bias"] = dict(processors.bias)
    if processors.allowed_ids:
        parameters["allowed_token_ids"] = sorted(processors.allowed_ids)
    if processors.bad_words:
        # vLLM's `bad_words` are texts. The router has made tokens of them.
        parameters["_bad_words_token_ids"] = [list(word) for word in processors.bad_words]
    if sequence.cache_salt is None:
        parameters["skip_reading_prefix_cache"] = True
    if sequence.constraint is not None:
        parameters["structured_outputs"] = structured_output(sequence.constraint)
    return parameters


def cache_salt(sequence: Sequence) -> str | None:
    """Returns the salt of a sequence's prefix. One that bypasses the cache has a salt of its own, so that nothing
    finds what it adds."""
    if sequence.cache_salt is None:
        return f"bypass {sequence.request_id} {sequence.attempt}"
    return sequence.cache_salt.hex() or None


def structured_output(constraint: Constraint) -> dict[str, str] | None:
    """Returns the keywords of vLLM's `StructuredOutputsParams` for a grammar in llguidance's format; None if vLLM
    cannot take it. vLLM takes one grammar, so those that the first refers to are written into it, and a schema is a
    rule of one."""
    match json.loads(WHITESPACE.sub(_limited_whitespace, constraint.grammar)):
        case {"grammars": [{"json_schema": _} as schema]}:
            return {"grammar": f"%llguidance {{}}\nstart: {_nested(schema)}"}
        case {"grammars": [{"lark_grammar": str(lark)}, *others]}:
            parts = {other["name"]: _nested(other) for other in others}
            # A line with a schema refers to nothing, and may have any text.
            lines = (line if "%json" in line else _with_parts(line, parts) for line in lark.splitlines())
            lark = "\n".join(lines)
            # Without the header vLLM may take a grammar for one in GBNF.
            return {"grammar": lark if "%llguidance" in lark else f"%llguidance {{}}\n{lark}"}
    return None


def _limited_whitespace(found: re.Match[str]) -> str:
    """Returns options of a schema that bound its white space in vLLM's llguidance, too."""
    # In a string within a string, a backslash is escaped once more.
    quote, pattern = found[1], found[2]
    pairs = (("whitespace_flexible", "false"), *((name, f"{quote}{mark}(?:{pattern})?{quote}") for name, mark in MARKS))
    return f"{quote}x-guidance{quote}:{{" + ",".join(f"{quote}{name}{quote}:{value}" for name, value in pairs) + "}"


def _with_parts(line: str, parts: Mapping[str, str]) -> str:
    """Replaces references by what they refer to."""
    return re.sub(r"@(\w+)", lambda found: parts.get(found[1], found[0]), line)


def _nested(grammar: Mapping[str, Any]) -> str:
    """Returns a grammar as a part of a rule in llguidance's Lark."""
    if "json_schema" in grammar:
        return "%json " + json.dumps(grammar["json_schema"], ensure_ascii=False)
    return f"%lark {{\n{grammar['lark_grammar']}\n}}"
