"""The table of a request's options: name, field, type, range, neutral value, flag and description, each once.

The router, the executors, the client, the command line, the gateway and KServe read it. It imports only limits of the
protocol, so that a client without extras can load it.

A new number that decides which tokens are kept is a row here, and its name elsewhere: the field of `SamplingParams` in
types.proto, the type of the keyword in inflight/requests.py and of the parameter in gateway/bodies.py, the field of
`Sampling` in executor/scheduler/sequence.py and of `SamplingNumbers` in executor/native/sampler.h. It is applied in
executor/step/sampling.py, in sampler.h, and in executor/kernels/restriction.py, which executor/gpu/sampling.py calls.
Executors that do not know it ignore it, so it needs a protocol version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from inflight.common.protocol import (
    LOGITS_VERSION,
    MAX_DRAFTS,
    MAX_INTER_TOKEN_TARGET_MS,
    MAX_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_PROTOCOL_VERSION,
)

MAX_DEADLINE_S = 7 * 24 * 3600
MAX_STREAM_INTERVAL = 1024


class Kind(Enum):
    """The type of a value. A duration is in seconds outside of messages."""

    FLOAT = auto()
    INT32 = auto()
    UINT32 = auto()
    UINT64 = auto()
    BOOL = auto()
    DURATION = auto()
    TEXT = auto()
    TEXTS = auto()
    IDS = auto()
    OTHER = auto()


LARGEST_INTEGERS: Mapping[Kind, int] = {Kind.INT32: 2**31 - 1, Kind.UINT32: 2**32 - 1, Kind.UINT64: 2**64 - 1}


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag of an option in commands that send requests."""

    name: str
    metavar: str
    help: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One option. `name` is the keyword of the Python client, and `field` the path in a `GenerateRequest`.

    A number is from `least` to `most`, and above `least` if `is_above`; `note` explains one of the values. `neutral` is
    the value without effect, which a sampling parameter has if neither the request nor its model sets it. A model's
    `generation_config.json` sets those that are `in_generation_config`. `since` is the first protocol version whose
    executors read it.
    """

    name: str
    field: str
    kind: Kind = Kind.OTHER
    flag: Flag | None = None
    least: float | None = None
    most: float = math.inf
    is_above: bool = False
    note: str = ""
    neutral: float | None = None
    in_generation_config: bool = False
    since: int = MIN_PROTOCOL_VERSION

    def allows(self, value: float) -> bool:
        """Returns whether a number is in the range. Infinity and NaN never are."""
        if self.least is None:
            return True
        is_enough = value > self.least if self.is_above else value >= self.least
        return is_enough and value <= self.most and value < math.inf

    @property
    def rule(self) -> str:
        """The range in words."""
        least = f"{'above' if self.is_above else 'at least'} {self.least:g}"
        if self.most < math.inf:
            least += f" and at most {self.most:g}"
        elif self.kind is Kind.FLOAT:
            least = f"a number {'' if self.is_above else 'of '}{least}"
        return f"{least} ({self.note})" if self.note else least


_TABLE = (
    Parameter(
        "model",
        "model",
        Kind.TEXT,
        Flag("--model", "NAME", "name of the model, see `inflight models`; default: the only one"),
    ),
    Parameter(
        "adapter_id",
        "adapter_id",
        Kind.TEXT,
        Flag("--adapter", "NAME", "LoRA adapter of the model, see `inflight models`; default: none"),
    ),
    Parameter("request_id", "request_id", Kind.TEXT),
    Parameter(
        "temperature",
        "sampling.temperature",
        Kind.FLOAT,
        Flag("--temperature", "T", "sampling temperature; 0 is greedy"),
        least=0,
        neutral=1.0,
        in_generation_config=True,
    ),
    Parameter(
        "top_p",
        "sampling.top_p",
        Kind.FLOAT,
        Flag("--top-p", "P", "sample from the most likely tokens whose probabilities sum to P"),
        least=0,
        is_above=True,
        most=1,
        neutral=1.0,
        in_generation_config=True,
    ),
    Parameter(
        "top_k",
        "sampling.top_k",
        Kind.INT32,
        Flag("--top-k", "K", "sample from the K most likely tokens; 0: from all"),
        least=0,
        note="0 keeps all tokens",
        neutral=0,
        in_generation_config=True,
    ),
    Parameter(
        "min_p",
        "sampling.min_p",
        Kind.FLOAT,
        Flag("--min-p", "P", "sample from tokens that are at least P times as likely as the most likely one"),
        least=0,
        most=1,
        neutral=0.0,
        in_generation_config=True,
    ),
    Parameter(
        "presence_penalty",
        "sampling.presence_penalty",
        Kind.FLOAT,
        Flag("--presence-penalty", "X", "lower the logit of tokens of the output by X, -2 to 2"),
        least=-MAX_PENALTY,
        most=MAX_PENALTY,
        neutral=0.0,
    ),
    Parameter(
        "frequency_penalty",
        "sampling.frequency_penalty",
        Kind.FLOAT,
        Flag("--frequency-penalty", "X", "lower the logit of a token by X for each time it is in the output, -2 to 2"),
        least=-MAX_PENALTY,
        most=MAX_PENALTY,
        neutral=0.0,
    ),
    Parameter(
        "repetition_penalty",
        "sampling.repetition_penalty",
        Kind.FLOAT,
        Flag("--repetition-penalty", "X", "make tokens of prompt and output less likely by the factor X; 1: off"),
        least=0,
        is_above=True,
        neutral=1.0,
        in_generation_config=True,
    ),
    Parameter(
        "no_repeat_ngram_size",
        "sampling.no_repeat_ngram_size",
        Kind.UINT32,
        Flag(
            "--no-repeat-ngram-size", "N", "produce no N tokens in order that prompt or output contain already; 0: off"
        ),
        least=0,
        neutral=0,
        in_generation_config=True,
        since=LOGITS_VERSION,
    ),
    Parameter(
        "logit_bias",
        "sampling.logit_bias",
        flag=Flag("--logit-bias", "ID=BIAS", "add BIAS, -100 to 100, to the logit of a token id; may be repeated"),
    ),
    Parameter(
        "allowed_token_ids",
        "sampling.allowed_token_ids",
        Kind.IDS,
        Flag("--allowed-token-ids", "ID[,ID…]", "produce no other token ids"),
    ),
    Parameter(
        "bad_words",
        "sampling.bad_words",
        Kind.TEXTS,
        Flag("--bad-word", "TEXT", "never produce the tokens of this text; may be repeated"),
    ),
    Parameter("bad_word_ids", "sampling.bad_word_ids", since=LOGITS_VERSION),
    Parameter(
        "seed",
        "sampling.seed",
        Kind.UINT64,
        Flag("--seed", "N", "random seed; the same seed gives the same output"),
        least=0,
    ),
    Parameter(
        "max_tokens",
        "stopping.max_tokens",
        Kind.UINT32,
        Flag("--max-tokens", "N", "maximum number of output tokens"),
        least=1,
    ),
    Parameter(
        "min_tokens",
        "stopping.min_tokens",
        Kind.UINT32,
        Flag("--min-tokens", "N", "number of output tokens before a stop condition applies"),
        least=0,
    ),
    Parameter("stop", "stopping.stop", Kind.TEXTS, Flag("--stop", "TEXT", "stop before this text; may be repeated")),
    Parameter("stop_token_ids", "stopping.stop_token_ids", Kind.IDS),
    Parameter("include_stop", "stopping.include_stop", Kind.BOOL),
    Parameter("ignore_eos", "stopping.ignore_eos", Kind.BOOL),
    Parameter("json_schema", "constraint.json_schema"),
    Parameter("json_object", "constraint.json_object", Kind.BOOL),
    Parameter("regex", "constraint.regex", Kind.TEXT),
    Parameter("grammar", "constraint.grammar", Kind.TEXT),
    Parameter("choice", "constraint.choice.choices"),
    Parameter("max_whitespace", "constraint.max_whitespace", Kind.UINT32),
    Parameter("tools", "chat.functions"),
    Parameter("tool_choice", "tool_choice"),
    Parameter("parallel_tool_calls", "tool_choice.parallel", Kind.BOOL),
    Parameter("reasoning_effort", "chat.reasoning_effort", Kind.TEXT),
    Parameter("thinking_token_budget", "chat.thinking_token_budget", Kind.INT32),
    Parameter("want_parts", "output.parts", Kind.BOOL),
    Parameter("n", "n", Kind.UINT32),
    Parameter("best_of", "best_of", Kind.UINT32),
    Parameter("want_text", "output.text", Kind.BOOL),
    Parameter("want_token_ids", "output.token_ids", Kind.BOOL),
    Parameter("want_logprobs", "output.logprobs", Kind.BOOL),
    Parameter("top_logprobs", "output.top_logprobs", Kind.UINT32, least=0, most=MAX_TOP_LOGPROBS),
    Parameter("want_prompt_logprobs", "output.prompt_logprobs", Kind.BOOL),
    Parameter("top_prompt_logprobs", "output.top_prompt_logprobs", Kind.UINT32, least=0, most=MAX_TOP_LOGPROBS),
    Parameter("want_queue_events", "want_queue_events", Kind.BOOL),
    Parameter("stream_interval", "output.stream_interval", Kind.UINT32, least=1, most=MAX_STREAM_INTERVAL),
    Parameter("echo", "output.echo", Kind.BOOL),
    Parameter("want_resources", "output.resources", Kind.BOOL),
    Parameter("tenant", "tenant", Kind.TEXT, Flag("--tenant", "NAME", "tenant of the request; default: default")),
    Parameter("priority", "priority", flag=Flag("--priority", "", "priority class; default: standard")),
    Parameter(
        "inter_token_target_ms",
        "inter_token_target_ms",
        Kind.UINT32,
        Flag(
            "--inter-token-target",
            "MS",
            "target for the time between tokens, 1 to 60000 ms; default: that of the priority class",
        ),
        least=1,
        most=MAX_INTER_TOKEN_TARGET_MS,
    ),
    Parameter(
        "max_drafts",
        "max_drafts",
        Kind.UINT32,
        Flag(
            "--max-drafts",
            "N",
            "most tokens drafted per step, 0 to 64; 0: none; the output is the same; default: the executor's",
        ),
        least=0,
        most=MAX_DRAFTS,
    ),
    Parameter("exact_resume", "exact_resume", Kind.BOOL),
    Parameter(
        "deadline_s",
        "deadlines.total",
        Kind.DURATION,
        Flag("--deadline", "SECONDS", "time limit of the request, including queueing"),
        least=0,
        is_above=True,
        most=MAX_DEADLINE_S,
    ),
    Parameter(
        "first_token_deadline_s",
        "deadlines.first_token",
        Kind.DURATION,
        Flag("--first-token-deadline", "SECONDS", "time limit for the first token"),
        least=0,
        is_above=True,
        most=MAX_DEADLINE_S,
    ),
    Parameter(
        "session_id",
        "session_id",
        Kind.TEXT,
        Flag("--session", "NAME", "session; its requests go to the same model variant"),
    ),
    Parameter("cache_salt", "cache.salt", Kind.TEXT),
    Parameter("cache_bypass", "cache.bypass", Kind.BOOL),
    Parameter("idempotency_key", "idempotency_key", Kind.TEXT),
    Parameter("detach", "detach", Kind.BOOL),
    Parameter("resume_ttl_s", "resume_ttl", Kind.DURATION, least=0, most=MAX_DEADLINE_S),
    Parameter("truncate_prompt_tokens", "truncate_prompt_tokens", Kind.UINT32),
    Parameter("prior_output_ids", "prior_output.output_ids", Kind.IDS),
    Parameter("prior_text_bytes", "prior_output.text_bytes", Kind.UINT64),
    Parameter("metadata", "metadata"),
)

PARAMETERS: Mapping[str, Parameter] = {one.name: one for one in _TABLE}
# The numbers of `SamplingParams`, except the seed.
SAMPLING_NUMBERS = tuple(one for one in _TABLE if one.neutral is not None)
# Their values without effect, as keywords of `SamplingParams`.
NEUTRAL_SAMPLING: Mapping[str, Any] = {one.name: one.neutral for one in SAMPLING_NUMBERS}
# Sampling parameters that executors of older versions ignore.
LATER_PARAMETERS = tuple(one for one in _TABLE if one.since > MIN_PROTOCOL_VERSION)
