"""The refusals that clients get from admission, in words."""

from __future__ import annotations

from common.errors import Reason, RequestError

# When a client may try again. Long enough for an executor to start reporting, short enough for a person.
RETRY_AFTER_MS = 1000


def duplicate(request_id: str) -> RequestError:
    """The id is taken."""
    text = f"request_id: a request {request_id} waits, runs or has just ended"
    return RequestError(Reason.DUPLICATE_REQUEST_ID, text)


def no_executor(text: str) -> RequestError:
    """Nobody can do the work now."""
    return RequestError(Reason.NO_EXECUTOR, text, retry_after_ms=RETRY_AFTER_MS)


def refusal(reason: Reason) -> RequestError:
    """What the ledger refuses."""
    match reason:
        case Reason.QUEUE_FULL:
            text = "the queue is full"
            return RequestError(reason, text, retry_after_ms=RETRY_AFTER_MS, quota="queued requests of the model")
        case Reason.NEVER_FITS:
            text = "prompt and max_tokens need more KV blocks than any executor has; ask for fewer tokens"
            return RequestError(reason, text)
        case Reason.NO_EXECUTOR:
            return no_executor("no executor takes work")
        case _:
            raise AssertionError(f"the ledger does not refuse for {reason}")
