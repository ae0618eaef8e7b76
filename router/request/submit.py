"""What executors are told of a request: its `Submit`, and the `RouterContext` in it, which routers read back.

They are the request's form from its preparation on. Both begin with what the request itself says. The preparation adds
its adapter, its tokens and its constraint. Another router rebuilds the request's stream from them.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from inflight.common.parameters import NEUTRAL_SAMPLING
from inflight.common.protocol import MAX_FRAME_INTERVAL
from inflight.common.time_of_day import unix_ms
from inflight.router.ledger.types import DEFAULT_TENANT
from inflight.router.request.ids import choice_ids, hash_of, ledger_id
from inflight.v1 import executor_pb2, inference_pb2, resume_pb2, types_pb2

NUM_SEEDS = 2**64
_ID_BYTES = 16
_SEED_BYTES = 8
# Values of a request replace those of its model; both fields together are the list of bad words.
_LISTS = (("logit_bias",), ("allowed_token_ids",), ("bad_words", "bad_word_ids"))
_DEFAULTS = types_pb2.SamplingParams(**NEUTRAL_SAMPLING)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model and the router's settings allow. `default_sampling` is the model's generation config.
    `state_grid_tokens` are those of `DescribeResponse`."""

    context_length: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    default_sampling: types_pb2.SamplingParams
    has_chat_template: bool
    block_size: int = 16
    state_grid_tokens: int = 0
    max_prompt_bytes: int = 4 * 1024 * 1024


def router_context(request: inference_pb2.GenerateRequest, arrived: float) -> resume_pb2.RouterContext:
    """Returns what routers must know of a valid request. `arrived` is on the clock of `time.monotonic`.

    Its id is the request's own, the one derived from its idempotency key, or a new one. Only a request with a key has a
    digest, and may be repeated.
    """
    tenant, key, output = request.tenant or DEFAULT_TENANT, request.idempotency_key, request.output
    context = resume_pb2.RouterContext(
        tenant=tenant,
        request_id=keyed_request_id(tenant, key) if key else request.request_id or secrets.token_hex(16),
        digest=digest_of(request, tenant) if key else b"",
        model=request.model,
        adapter_id=request.adapter_id,
        stop=request.stopping.stop,
        include_stop=request.stopping.include_stop,
        wants_text=output.text if output.HasField("text") else True,
        wants_token_ids=output.token_ids,
        echo=output.echo,
        wants_resources=output.resources,
        stream_interval=output.stream_interval or 1,
        detach=request.detach,
        arrived_unix_ms=unix_ms() - round((time.monotonic() - arrived) * 1000),
        operation="chat" if request.HasField("chat") else "text_completion",
    )
    num_sent = request.n or 1
    num_choices = request.best_of or num_sent
    if num_choices > 1:
        context.num_choices, context.num_sent_choices = num_choices, num_sent
        context.hides_logprobs = num_sent < num_choices and not (output.logprobs or output.top_logprobs)
    if request.HasField("resume_ttl"):
        context.resume_ttl.FromNanoseconds(request.resume_ttl.ToNanoseconds())
    return context


def keyed_request_id(tenant: str, key: str) -> str:
    """Returns the id of the request that a tenant submits with this idempotency key."""
    return "key-" + hash_of(b"id", tenant, key, size=_ID_BYTES).hexdigest()


def keyed_seed(tenant: str, key: str) -> int:
    """Returns the seed of such a request without one: a repeat samples the same tokens."""
    return int.from_bytes(hash_of(b"seed", tenant, key, size=_SEED_BYTES).digest(), "big")


def digest_of(request: inference_pb2.GenerateRequest, tenant: str) -> bytes:
    """Returns the hash of the whole request without `prior_output`: equal for repeats only."""
    asked = inference_pb2.GenerateRequest()
    asked.CopyFrom(request)
    asked.ClearField("prior_output")
    asked.tenant = tenant
    return hashlib.blake2b(asked.SerializeToString(deterministic=True), digest_size=_ID_BYTES).digest()


def new_submit(
    request: inference_pb2.GenerateRequest, context: resume_pb2.RouterContext, limits: ModelLimits
) -> executor_pb2.Submit:
    """Returns what an executor is told of a valid request before its prompt is tokenized, with every default filled
    in. Stop strings are the router's own."""
    stopping, output = request.stopping, request.output
    # Every executor gets the same seed, so it can repeat the numbers.
    choose_seed = functools.partial(secrets.randbits, 64)
    if request.idempotency_key:
        choose_seed = functools.partial(keyed_seed, context.tenant, request.idempotency_key)
    wants_logprobs = bool(output.logprobs or output.top_logprobs)
    wants_scores = bool(output.prompt_logprobs or output.top_prompt_logprobs)
    sampling = resolve_sampling(request.sampling, limits.default_sampling, choose_seed)
    return executor_pb2.Submit(
        request_id=ledger_id(context.tenant, context.request_id),
        sampling=sampling,
        stopping=types_pb2.StoppingParams(
            max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
            min_tokens=stopping.min_tokens,
            stop_token_ids=stopping.stop_token_ids,
            ignore_eos=stopping.ignore_eos,
        ),
        cache_salt=f"{context.tenant}\0{request.cache.salt}".encode(),
        cache_bypass=request.cache.bypass,
        priority=request.priority or types_pb2.PRIORITY_CLASS_STANDARD,
        inter_token_target_ms=request.inter_token_target_ms if request.HasField("inter_token_target_ms") else None,
        max_drafts=request.max_drafts if request.HasField("max_drafts") else None,
        exact_resume=request.exact_resume,
        num_choices=1,
        tenant=context.tenant,
        adapter_name=context.adapter_id,
        num_top_logprobs=output.top_logprobs if wants_logprobs or context.hides_logprobs else None,
        num_prompt_logprobs=output.top_prompt_logprobs if wants_scores else None,
        # Tokens that wait would be computed behind a stop that the router finds.
        stream_interval=1 if context.stop else min(context.stream_interval, MAX_FRAME_INTERVAL),
    )


def keep_stop_tokens(submit: executor_pb2.Submit, context: resume_pb2.RouterContext) -> None:
    """Leaves the request's stop tokens to the router: executors do not know where the reasoning ends, to which stops do
    not apply."""
    if submit.stopping.stop_token_ids:
        context.stop_token_ids.extend(submit.stopping.stop_token_ids)
        submit.stopping.ClearField("stop_token_ids")
        submit.stream_interval = 1


def choices_of(submit: executor_pb2.Submit, num_choices: int) -> list[executor_pb2.Submit]:
    """Returns what executors are told of each choice. Choice k is a request of its own with the seed + k. The prompt is
    scored once."""
    submits = [submit]
    for choice, name in enumerate(choice_ids(submit.request_id, num_choices)[1:], start=1):
        other = executor_pb2.Submit()
        other.CopyFrom(submit)
        other.request_id = name
        other.sampling.seed = (submit.sampling.seed + choice) % NUM_SEEDS
        other.ClearField("num_prompt_logprobs")
        submits.append(other)
    return submits


def resolve_sampling(
    asked: types_pb2.SamplingParams, defaults: types_pb2.SamplingParams, choose_seed: Callable[[], int]
) -> types_pb2.SamplingParams:
    """Returns the request's values, else the model's generation config, else the protocol's defaults. Every value is
    set, as `Accepted` and `Submit` carry it. Calls `choose_seed` if the request brings no seed."""
    resolved = types_pb2.SamplingParams()
    resolved.CopyFrom(_DEFAULTS)
    resolved.MergeFrom(defaults)
    for fields in _LISTS:
        if any(getattr(asked, name) for name in fields):
            for name in fields:
                resolved.ClearField(name)
    resolved.MergeFrom(asked)
    resolved.seed = asked.seed if asked.HasField("seed") else choose_seed()
    resolved.typical_p = 1.0
    return resolved
