"""What it takes to tell a client of a request, from whichever place of its output on. Plain values."""

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
        """The one that holds now."""
        candidates = [d for d in (None if has_first_token else self.first_token, self.total) if d is not None]
        return min(candidates, default=None)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a request's client wants to read, and for how long the request goes on without one.

    `accepted` is the event that begins every stream of it. `name_token` writes to a token what its id stands for.
    `unattended_s` None: to its end; 0: not at all. `kept_s` is how long its output is wanted after its end; None: for
    as long as it is kept anyway. `digest` is that of a request that may be repeated.
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
    """How far a client has read: tokens, and bytes of their text; None: all text that is sent with these tokens.

    `is_started`: it was told, too, that the request boarded.
    """

    offset: int = 0
    text_bytes: int | None = None
    is_started: bool = False


BEGINNING = ReadPosition()
