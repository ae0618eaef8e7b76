"""From a request that is sound to one that can be admitted: what the ledger, the executor and the relay are told."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from dataclasses import dataclass

from inflight.v1 import executor_pb2, inference_pb2, types_pb2

from router.admission_rules import AdmissionRules
from router.pools import Pool
from router.prefixes import prefix_hashes
from router.refusals import shut_out, unknown_tenant
from router.relay import Deadlines, RelayOptions
from router.request_spec import ChatPrompt, FittedRequest, GenerateSpec, ModelLimits, Prompt, TextPrompt, TokenPrompt
from router.settings import RouterSettings
from router.store.types import DEFAULT_TENANT, Demand, TenantLimits
from router.streams import RequestStream
from router.text.output import OutputText
from router.text.tokenizer import ENCODE_IN_THREAD_CHARACTERS, TextModel

# A gRPC deadline further away than this is none.
MAX_GRPC_DEADLINE_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request ready for the dispatcher and the relay."""

    spec: GenerateSpec
    stream: RequestStream
    text: OutputText
    options: RelayOptions
    deadlines: Deadlines


def choose_seed() -> int:
    """A seed for a request that brings none, so that its numbers can be repeated on another executor."""
    return secrets.randbits(64)


def model_limits(pool: Pool, settings: RouterSettings) -> ModelLimits:
    """What a model allows. Raises `RequestError` while it has no executor."""
    description = pool.describe()
    return ModelLimits(
        context_length=description.context_length,
        vocabulary_size=description.vocabulary_size,
        eos_token_ids=frozenset(description.eos_token_ids),
        default_sampling=description.default_sampling,
        has_chat_template=pool.text.has_chat_template,
        max_prompt_bytes=settings.max_prompt_bytes,
    )


async def encode(text: TextModel, prompt: Prompt) -> list[int]:
    """The prompt's token ids. Long prompts are tokenized in a thread, so that they hold up nobody's tokens."""
    match prompt:
        case TokenPrompt():
            return list(prompt.ids)
        case TextPrompt():
            if len(prompt.text) <= ENCODE_IN_THREAD_CHARACTERS:
                return text.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
            return await asyncio.to_thread(text.encode, prompt.text, add_special_tokens=prompt.add_special_tokens)
        case ChatPrompt():
            if prompt.chat.ByteSize() <= ENCODE_IN_THREAD_CHARACTERS:
                return text.encode_chat(prompt.chat)
            return await asyncio.to_thread(text.encode_chat, prompt.chat)


def deadlines_of(spec: GenerateSpec, arrived: float, grpc_remaining_s: float | None) -> Deadlines:
    """Absolute deadlines; the gRPC deadline counts as one for the whole request."""
    totals = [spec.total_deadline_s, grpc_remaining_s]
    total = min((s for s in totals if s is not None and s < MAX_GRPC_DEADLINE_S), default=None)
    first_token = spec.first_token_deadline_s
    return Deadlines(
        first_token=None if first_token is None else arrived + first_token,
        total=None if total is None else arrived + total,
    )


def tenant_limits(spec: GenerateSpec, rules: AdmissionRules) -> TenantLimits:
    """What the request's tenant may take. Raises `RequestError` for one that is not served."""
    tenant = tenant_of(spec)
    limits = rules.limits_of(tenant)
    if limits is None:
        raise unknown_tenant(tenant)
    if limits.max_running == 0:
        raise shut_out(tenant)
    return limits


def tenant_of(spec: GenerateSpec) -> str:
    """Whose request it is. Until callers are identified, everybody who names no tenant is the same one."""
    return spec.tenant or DEFAULT_TENANT


def admit(
    fitted: FittedRequest, limits: TenantLimits, deadlines: Deadlines, arrived: float, pool: Pool
) -> AdmittedRequest:
    """Builds everything that lives as long as the request."""
    spec = fitted.spec
    request_id = spec.request_id or secrets.token_hex(16)
    submit = _submit(request_id, fitted)
    deadline = deadlines.next(has_first_token=False)
    demand = _demand(fitted, limits, submit, pool.describe().block_size)
    if deadline is not None:
        demand = dataclasses.replace(demand, deadline_ms=_rounded_ms(deadline - arrived))
    text = OutputText(
        pool.text.detokenizer(),
        stops=spec.stopping.stops,
        include_stop=spec.stopping.include_stop,
        min_tokens=spec.stopping.min_tokens,
    )
    stream = RequestStream(demand, submit, arrived, deadlines.total)
    return AdmittedRequest(spec, stream, text, _options(request_id, fitted), deadlines)


def _demand(fitted: FittedRequest, limits: TenantLimits, submit: executor_pb2.Submit, block_size: int) -> Demand:
    spec, num_prompt_tokens = fitted.spec, len(fitted.prompt_ids)
    return Demand(
        request_id=submit.request_id,
        priority_class=spec.priority,
        blocks=-(-(num_prompt_tokens + fitted.max_tokens) // block_size),
        tenant=tenant_of(spec),
        limits=limits,
        prompt_tokens=num_prompt_tokens,
        max_tokens=fitted.max_tokens,
        block_size=block_size,
        num_bytes=submit.ByteSize(),
        prefix_hashes=() if spec.cache_bypass else prefix_hashes(fitted.prompt_ids, block_size, submit.cache_salt),
    )


def _rounded_ms(seconds: float) -> int:
    """Milliseconds, coarse and never too few.

    Equal timeouts of clients reach us some milliseconds apart; in the ledger's order by deadline they must be equal, so
    that arrival decides. The relay keeps the exact deadline and takes the request out of the line when it passes.
    """
    nearest = float(f"{max(0.0, seconds) * 1000:.2g}")  # at most 5 % too few
    return int(nearest * 1.05) + 1


def _submit(request_id: str, fitted: FittedRequest) -> executor_pb2.Submit:
    spec = fitted.spec
    salt = f"{tenant_of(spec)}\0{spec.cache_salt}"
    return executor_pb2.Submit(
        request_id=request_id,
        prompt_ids=fitted.prompt_ids,
        sampling=spec.sampling.to_proto(),
        stopping=fitted.stopping_proto(),
        cache_salt=salt.encode(),
        cache_bypass=spec.cache_bypass,
        priority=types_pb2.PriorityClass.Name(spec.priority),
        num_choices=1,
    )


def _options(request_id: str, fitted: FittedRequest) -> RelayOptions:
    spec = fitted.spec
    accepted = inference_pb2.Accepted(
        request_id=request_id,
        resume_token=secrets.token_urlsafe(24),
        prompt_tokens=len(fitted.prompt_ids),
        sampling=spec.sampling.to_proto(),
        max_tokens=fitted.max_tokens,
    )
    return RelayOptions(accepted, spec.output.text, spec.output.token_ids, len(fitted.prompt_ids))
