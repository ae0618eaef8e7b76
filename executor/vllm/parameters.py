"""Translation of a sequence's parameters to those of vLLM. `docs/engines.md` has the same as a table.

Every parameter is passed on with the same meaning, or refused by its name. What vLLM counts over a request's whole
output, it counts over what it generates itself: of a request that continues here, the output so far is prompt to it.
Pure: nothing here imports vLLM.
"""

from __future__ import annotations

import json
from typing import Any

from inflight.executor.scheduler.sequence import Constraint, Sequence

# vLLM raises what is below the first to it, and refuses what is above the second.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
# vLLM seeds a generator of torch, which takes a signed number of 64 bits. It takes -1 for no seed.
NUM_SEEDS = 2**63

# Where the output of a request that continues after a failure can differ from what it would have been.
INEXACT_RESUME = (
    "sampled tokens (vLLM's random numbers start again)",
    "presence_penalty, frequency_penalty and bad_words (vLLM counts the output so far as prompt)",
)


def unsupported(sequence: Sequence) -> str:
    """Returns what vLLM cannot do for a sequence, beginning with the parameter's name; empty if it can do all."""
    sampling, processors, constraint = sequence.sampling, sequence.processors, sequence.constraint
    if 0 < sampling.temperature < MIN_TEMPERATURE or sampling.temperature > MAX_TEMPERATURE:
        return f"sampling.temperature: vLLM takes 0 and {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    if processors.no_repeat_ngram_size:
        return "sampling.no_repeat_ngram_size: vLLM has none"
    if constraint is None:
        return ""
    if structured_output(constraint) is None:
        return "constraint: vLLM takes one JSON schema or one Lark grammar, and not several that refer to each other"
    if sequence.num_output_tokens:
        return "constraint: vLLM cannot continue a constrained output that began elsewhere"
    # A grammar that allows only the end, or only other tokens, would leave vLLM nothing to sample.
    if sequence.stopping.min_tokens:
        return "stopping.min_tokens: not with a constraint on vLLM"
    if processors.allowed_ids:
        return "sampling.allowed_token_ids: not with a constraint on vLLM"
    return ""


def sampling_parameters(sequence: Sequence) -> dict[str, Any]:
    """Returns the keywords of vLLM's `SamplingParams` for a sequence that is not `unsupported`, besides those of its
    form of output. `length_limit` must be set: the executor ends the sequence there."""
    sampling, processors, stopping = sequence.sampling, sequence.processors, sequence.stopping
    max_tokens = sequence.length_limit - len(sequence.token_ids)
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
        "min_tokens": min(max_tokens, max(0, stopping.min_tokens - sequence.num_output_tokens)),
        # The stop tokens include the model's own unless they are to be ignored.
        "ignore_eos": True,
        "stop_token_ids": sorted(stopping.stop_token_ids),
        "logprobs": sequence.num_top_logprobs,
        "prompt_logprobs": sequence.num_prompt_logprobs,
        "detokenize": False,
    }
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
    cannot take it."""
    match json.loads(constraint.grammar):
        case {"grammars": [{"json_schema": schema}]}:
            return {"json": json.dumps(schema, ensure_ascii=False)}
        case {"grammars": [{"lark_grammar": str(lark)}]}:
            # Without the header vLLM may take a grammar for one in GBNF.
            return {"grammar": lark if "%llguidance" in lark else f"%llguidance {{}}\n{lark}"}
    return None
