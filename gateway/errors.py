"""Error responses in OpenAI's form, with their HTTP status.

This module has the table from the router's statuses to HTTP's, and from its fields to OpenAI's parameters. Pure.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import grpc

from inflight.common.errors import Reason
from inflight.errors import InflightError, unresolved_target
from inflight.events import FinishReason

INVALID_REQUEST = "invalid_request_error"


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """An error response. `param` names a parameter, `code` is for programs.

    `may_retry` False asks clients not to retry a status that they would retry otherwise, as openai-python does for 409,
    429 and 5xx. `allow` has the methods of the path, for 405.
    """

    status: int
    text: str
    kind: str = INVALID_REQUEST
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    may_retry: bool = True
    allow: str = ""

    def __str__(self) -> str:
        return self.text

    def body(self) -> dict[str, Any]:
        """Returns the JSON body."""
        return {"error": {"message": self.text, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_after_s * 1000)))
        if not self.may_retry:
            headers["x-should-retry"] = "false"
        if self.allow:
            headers["allow"] = self.allow
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def refused(param: str, text: str, code: str | None = None) -> ApiError:
    """Makes the error for an invalid parameter."""
    return ApiError(400, f"{param}: {text}", param=param, code=code)


def unsupported(param: str, text: str = "is not supported") -> ApiError:
    """Makes the error for a parameter or value that is not implemented."""
    return refused(param, text, "unsupported_parameter")


@dataclass(frozen=True, slots=True)
class _Form:
    """HTTP form of an error of the router."""

    status: int
    kind: str
    code: str | None = None
    may_retry: bool = True


_OF_REASON = {
    Reason.INVALID_FIELD: _Form(400, INVALID_REQUEST),
    Reason.NOT_IMPLEMENTED: _Form(400, INVALID_REQUEST, "unsupported_parameter"),
    Reason.UNKNOWN_MODEL: _Form(404, INVALID_REQUEST, "model_not_found"),
    Reason.UNKNOWN_ADAPTER: _Form(404, INVALID_REQUEST, "model_not_found"),
    Reason.UNKNOWN_REQUEST: _Form(404, INVALID_REQUEST, "request_not_found"),
    Reason.DUPLICATE_REQUEST_ID: _Form(409, INVALID_REQUEST, "duplicate_request", may_retry=False),
    Reason.IDEMPOTENCY_MISMATCH: _Form(422, INVALID_REQUEST, "idempotency_key_reused"),
    Reason.NEVER_FITS: _Form(400, INVALID_REQUEST, "request_too_large"),
    Reason.NO_EXECUTOR: _Form(503, "server_error", "no_executor"),
    Reason.STORE_UNAVAILABLE: _Form(503, "server_error", "unavailable"),
    Reason.DRAINING: _Form(503, "server_error", "draining"),
    Reason.EXECUTOR_LOST: _Form(503, "server_error", "unavailable"),
    Reason.QUEUE_FULL: _Form(429, "rate_limit_error", "queue_full"),
    Reason.RATE_LIMITED: _Form(429, "rate_limit_error", "rate_limit_exceeded"),
    Reason.DEADLINE_UNMEETABLE: _Form(429, "rate_limit_error", "deadline_unmeetable"),
    Reason.DEADLINE_PASSED: _Form(504, "server_error", "timeout", may_retry=False),
    Reason.CANCELLED: _Form(409, INVALID_REQUEST, "cancelled", may_retry=False),
    Reason.UNKNOWN_TENANT: _Form(403, "permission_error", "unknown_tenant"),
    Reason.NOT_ALLOWED: _Form(403, "permission_error", "not_allowed"),
    Reason.UNAUTHENTICATED: _Form(401, "authentication_error", "invalid_api_key"),
    Reason.OUTPUT_LOST: _Form(410, INVALID_REQUEST, "output_lost"),
    Reason.TAKEN_OVER: _Form(409, INVALID_REQUEST, "taken_over", may_retry=False),
    Reason.STALLED: _Form(503, "server_error", "stalled"),
    Reason.ATTEMPTS_EXHAUSTED: _Form(500, "server_error", "attempts_exhausted", may_retry=False),
    Reason.STALE_GENERATION: _Form(500, "server_error"),
    Reason.INTERNAL: _Form(500, "server_error"),
}

_FORMS = {reason.value: form for reason, form in _OF_REASON.items()}

# Codes of gRPC itself, without a reason of the router.
_OF_CODE = {
    grpc.StatusCode.UNAVAILABLE: _Form(503, "server_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: _Form(504, "server_error", "timeout"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: _Form(413, INVALID_REQUEST, "request_too_large"),
    grpc.StatusCode.INVALID_ARGUMENT: _Form(400, INVALID_REQUEST),
    grpc.StatusCode.UNIMPLEMENTED: _Form(400, INVALID_REQUEST, "unsupported_parameter"),
}
_UNKNOWN = _Form(500, "server_error")

# Fields of the router with another name at OpenAI. Otherwise the last part of the path is the parameter.
_PARAMS = {
    "output.top_logprobs": "top_logprobs",
    "output.top_prompt_logprobs": "prompt_logprobs",
    "chat.reasoning_effort": "reasoning_effort",
    "chat.thinking_token_budget": "thinking_token_budget",
    "functions": "tools",
    "adapter_id": "model",
    "session_id": "prompt_cache_key",
    "idempotency_key": "Idempotency-Key",
    "deadlines.total": "timeout",
}
# Paths of the router that have another form here, as the name of an error's field and within its text. What the client
# wrote is quoted, and stays as it is.
_PATHS = re.compile(
    r"""(?P<quoted>(?<!\w)'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"|\bchat\.functions(?P<number>\[\d+\])?(?P<part>\.\w+)?"
    r"|\btool_choice\.\w+(?:\[\d+\])?(?P<none> to MODE_NONE)?"
    r"|\bchat(?P<call>\.messages\[\d+\]\.tool_calls\[\d+\])\.(?P<call_part>name|arguments)\b"
    r"|\bchat\.(?P<kwargs>template_kwargs)\b"
    r"|\b(?P<no_chat>send text or token_ids)"
)
# A message after the first one.
_MESSAGE = re.compile(r"\b(chat\.messages)\[([1-9]\d{0,8})\]")
_PROMPT_FIELDS = ("text", "text_bytes", "token_ids", "chat", "prompt")
_RESUME_FIELDS = ("offsets", "request_id", "resume_token")


def from_router(
    error: InflightError, prompt_param: str, renamed: dict[str, str] | None = None, num_joined: int = 0
) -> ApiError:
    """Converts an error of the router. `prompt_param` is the prompt's parameter, `renamed` maps other fields.
    `num_joined` messages after the first one are part of it."""

    def unjoined(text: str) -> str:
        return _MESSAGE.sub(lambda found: f"{found[1]}[{int(found[2]) + num_joined}]", text) if num_joined else text

    form = _FORMS.get(error.reason) or _OF_CODE.get(error.code, _UNKNOWN)
    text, param, code = error.description, None, form.code
    if error.fields:
        named = [
            (_param(unjoined(one.field), prompt_param, renamed or {}), _own_words(unjoined(one.description)))
            for one in error.fields
        ]
        param = named[0][0]
        text = "; ".join(f"{name}: {description}" for name, description in named)
        if form.status == 400 and "the model's context" in text:
            code = "context_length_exceeded"
    elif form.status >= 500 and not error.reason:
        text = "the router could not be reached" if form.status == 503 else "the router failed"
        if unresolved_target(error) is not None:
            # Clients need not know the name. The gateway's log has it.
            text += ": its host name cannot be resolved"
    retry_after_s = error.retry_after_s
    # The caller is blocked, not too fast: waiting does not help.
    may_retry = form.may_retry and not (form.code == "rate_limit_exceeded" and retry_after_s is None)
    return ApiError(form.status, text, form.kind, param, code, retry_after_s, may_retry)


def from_end(reason: FinishReason) -> ApiError:
    """Makes the error for a choice that ended for a reason that OpenAI's API does not have."""
    if reason is FinishReason.CANCELLED:
        return ApiError(409, "the request was cancelled", code="cancelled", may_retry=False)
    if reason is FinishReason.DEADLINE:
        return ApiError(504, "the request's deadline has passed", "server_error", code="timeout", may_retry=False)
    return ApiError(500, f"the request ended early: {reason.value}", "server_error", code=reason.value)


def _own_words(text: str) -> str:
    """Returns a field, or a text about one, with the paths of this API."""

    def own(found: re.Match[str]) -> str:
        if found["quoted"]:
            return found[0]
        if found["no_chat"]:
            return "use /v1/completions"
        if found["kwargs"]:
            return "chat_template_kwargs"
        if found["call"]:
            return f"{found['call'][1:]}.function.{found['call_part']}"
        if found[0].startswith("tool_choice"):
            return 'tool_choice to "none"' if found["none"] else "tool_choice"
        return f"tools{found['number'] or ''}{'.function' + found['part'] if found['part'] else ''}"

    return _PATHS.sub(own, text)


def _param(field: str, prompt_param: str, renamed: dict[str, str]) -> str:
    if field in _PARAMS:
        return _PARAMS[field]
    if (own := _own_words(field)) != field:
        return own
    first = field.partition(".")[0].partition("[")[0]
    if first in _PROMPT_FIELDS:
        return prompt_param + field[len(first) :].removeprefix(".messages").removeprefix(".ids")
    if first in _RESUME_FIELDS:
        return "Last-Event-ID"
    name = field.partition(".")[2] if first in ("sampling", "stopping", "output") else field
    return renamed.get(name, name)
