"""Errors that clients get from admission and resuming."""

from __future__ import annotations

from inflight.common.errors import FieldViolation, Reason, RequestError, invalid
from inflight.router.ledger.types import Refused

# Retry hint. Long enough for an executor to start reporting, short enough for a person.
RETRY_AFTER_MS = 1000

# The limit of a refusal for which a request's adapter is the reason.
ADAPTER = "adapter"
# For refusals without a retry time from the ledger.
LIMIT_OF = {
    Reason.QUEUE_FULL: "max_queue_requests",
    Reason.RATE_LIMITED: "tenant requests_per_s",
    Reason.DEADLINE_UNMEETABLE: "deadline",
}


def duplicate(request_id: str) -> RequestError:
    """Returns the error for an id that is in use."""
    text = f"request_id: a request {request_id} waits, runs or has just ended"
    return RequestError(Reason.DUPLICATE_REQUEST_ID, text)


def mismatch() -> RequestError:
    """Returns the error for an idempotency key of a different request."""
    text = "idempotency_key: was used for a request that differs in more than prior_output"
    return RequestError(Reason.IDEMPOTENCY_MISMATCH, text)


def taken_over() -> RequestError:
    """Returns the error for a reader that another one has replaced."""
    return RequestError(Reason.TAKEN_OVER, "another call reads this request now")


def output_lost(text: str) -> RequestError:
    """Returns the error for lost output; a client that has it can send it as prior output."""
    return RequestError(
        Reason.OUTPUT_LOST,
        f"{text}; a Generate with prior_output goes on from what you have",
        context={"resumable": "false"},
    )


def out_of_reach() -> RequestError:
    """Returns the error for an unreachable executor; another router may reach it, or this one later."""
    text = "the request has ended, and the executor that holds its output cannot be reached now"
    return RequestError(Reason.EXECUTOR_LOST, text, retry_after_ms=RETRY_AFTER_MS)


def being_cancelled() -> RequestError:
    """Returns the error for a request whose cancel, after its client disconnected, is still in progress."""
    text = "the request is being cancelled because its client disconnected; retry when that is done"
    return RequestError(Reason.EXECUTOR_LOST, text, retry_after_ms=RETRY_AFTER_MS)


def draining(text: str, *, is_resumable: bool = False) -> RequestError:
    """Returns the error of a draining router; another router serves the request."""
    context = {"resumable": "true"} if is_resumable else {}
    return RequestError(Reason.DRAINING, text, retry_after_ms=RETRY_AFTER_MS, context=context)


def beyond_output(offset: int, num_tokens: int, choice: int = 0) -> RequestError:
    """Returns the error for an offset beyond the output of a choice."""
    return invalid(FieldViolation(f"offsets[{choice}]", f"is {offset}; the output has {num_tokens} tokens"))


def unknown_request() -> RequestError:
    """Returns the error for an unknown id."""
    return RequestError(Reason.UNKNOWN_REQUEST, "request_id: there is no such request, or this is not its resume_token")


def not_in_the_ledger() -> RequestError:
    """Returns the error for a request that the ledger does not know, to a caller that may see it."""
    text = (
        "request_id: the request is not known; one that has ended is forgotten after a while, and one that waits is "
        "lost when its router stops: send it again with the same idempotency_key"
    )
    return RequestError(Reason.UNKNOWN_REQUEST, text)


def still_waits() -> RequestError:
    """Returns the error for a waiting request whose prompt is on another router."""
    text = "the request waits in the queue, at the router that it was sent to; if that has stopped, send it again"
    return output_lost(f"{text} with the same idempotency_key")


def no_executor(text: str) -> RequestError:
    """Returns the error for a model without an executor."""
    return RequestError(Reason.NO_EXECUTOR, text, retry_after_ms=RETRY_AFTER_MS)


def unknown_tenant(tenant: str) -> RequestError:
    """Returns the error for a tenant that is not configured."""
    text = f"tenant: {tenant[:100]!r} is not served here; the routers' admission file names those that are"
    return RequestError(Reason.UNKNOWN_TENANT, text, (FieldViolation("tenant", "is not served here"),))


def shut_out(tenant: str) -> RequestError:
    """Returns the error for a tenant with no capacity. It has no retry hint."""
    text = f"tenant {tenant[:100]!r} is shut out: its max_running is 0 in the routers' admission file"
    return RequestError(Reason.RATE_LIMITED, text, quota="tenant max_running")


def refusal(refused: Refused) -> RequestError:
    """Returns the error for a refusal of the ledger."""
    limit = refused.limit or LIMIT_OF.get(refused.reason)
    retry_after_ms = RETRY_AFTER_MS if refused.retry_after_ms is None else refused.retry_after_ms
    match refused.reason:
        case Reason.QUEUE_FULL:
            text = f"the queue is full: {limit} is reached"
        case Reason.RATE_LIMITED:
            text = f"too much at once: {limit} is reached"
        case Reason.DEADLINE_UNMEETABLE:
            text = "the wait is longer than the deadline allows; try again later, or with a later deadline"
        case Reason.NEVER_FITS:
            text = "prompt and max_tokens need more KV blocks than any executor has; ask for fewer tokens"
            if refused.limit == ADAPTER:
                text = "no executor is left that serves the request's adapter and is large enough for the request"
            return RequestError(refused.reason, text)
        case Reason.TAKEN_OVER:
            return taken_over()
        case Reason.NO_EXECUTOR:
            if refused.limit == ADAPTER:
                return no_executor("no executor that takes work serves the request's adapter now")
            return no_executor("no executor takes work")
        case _:
            raise AssertionError(f"the ledger does not refuse for {refused.reason}")
    return RequestError(refused.reason, text, retry_after_ms=retry_after_ms, quota=limit)
