"""The context that a router leaves at an executor with a request, as another router reads it back."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from inflight.common.protocol import MAX_CHOICES
from inflight.router.request.ids import choice_ids, ledger_id
from inflight.v1 import executor_pb2, resume_pb2


class FrameError(Exception):
    """An executor sent what cannot be true. The text says what."""


def context_of(attached: executor_pb2.SequenceAttached) -> resume_pb2.RouterContext:
    """Returns what the router that admitted a request left with it.

    Raises `FrameError` where it belongs to another request: its client would get access to this one.
    """
    try:
        context = resume_pb2.RouterContext.FromString(attached.submit.router_context)
    except DecodeError:
        raise FrameError(f"the router_context of {attached.request_id} is none") from None
    own_ids = choice_ids(ledger_id(context.tenant, context.request_id), min(context.num_choices, MAX_CHOICES))
    if attached.request_id != attached.submit.request_id or attached.request_id not in own_ids:
        raise FrameError(f"the router_context of {attached.request_id} is another request's")
    return context
