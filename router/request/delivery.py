"""Options of a delivery: what a client reads of a request, and from where. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.v1 import inference_pb2, types_pb2
from router.text.output import OutputText


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Absolute deadlines in seconds of `time.monotonic`; None: none."""

    first_token: float | None
    total: float | None

    def next(self, has_first_token: bool) -> float | None:
        """Returns the deadline that applies now."""
        candidates = [d for d in (None if has_first_token else self.first_token, self.total) if d is not None]
        return min(candidates, default=None)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a request's client reads, and how long the request continues without a client.

    `accepted` is the first event of every stream of the request. `name_token` adds the text of a token to its id.
    `unattended_s` None: until its end; 0: not at all. `kept_s` is how long the output is kept after the end; None: for
    the default time. `digest` is that of a request that may be repeated.
    """

    accepted: inference_pb2.Accepted
    new_text: Callable[[], OutputText]
    name_token: Callable[[types_pb2.TokenLogprob], None]
    wants_text: bool
    wants_token_ids: bool
    deadlines: Deadlines
    wants_logprobs: bool = False
    unattended_s: float | None = 0.0
    kept_s: float | None = None
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """How far a client has read: tokens, and bytes of their text; None: all text of these tokens.

    `is_started`: it also got the event that the request has a seat.
    """

    offset: int = 0
    text_bytes: int | None = None
    is_started: bool = False


BEGINNING = ReadPosition()
