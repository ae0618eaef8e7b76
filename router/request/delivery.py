"""What a client reads of a request, and from where. Plain values, which the stream reads for every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight.router.text.output import OutputText
from inflight.router.tools.parser import AnswerParser
from inflight.v1 import inference_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a request's client reads, and how long the request continues without a client. `None` means not asked for.

    `accepted` is the first event of every stream of the request. `name_token` adds the text of a token to its id.
    `echoes`: the text begins with that of `prompt_ids`. `stream_interval` is the number of tokens per event. Deadlines
    are in seconds of `time.monotonic`. `num_choices` are generated, and the client gets the best `num_sent_choices`.
    `unattended_s` None: until its end; 0: not at all. `kept_s` is how long the output is kept after the end; None: for
    the default time. `digest` is that of a request that may be repeated.
    `new_parser` None: the output is not divided into parts. `call_id` returns the id of a call by its index.
    """

    accepted: inference_pb2.Accepted
    new_text: Callable[[], OutputText]
    name_token: Callable[[types_pb2.TokenLogprob], None]
    wants_text: bool
    wants_token_ids: bool
    first_token_deadline: float | None = None
    deadline: float | None = None
    wants_logprobs: bool = False
    prompt_ids: Sequence[int] = ()
    wants_prompt_logprobs: bool = False
    echoes: bool = False
    wants_resources: bool = False
    is_constrained: bool = False
    unattended_s: float | None = 0.0
    kept_s: float | None = None
    digest: bytes = b""
    num_choices: int = 1
    num_sent_choices: int = 1
    stream_interval: int = 1
    new_parser: Callable[[], AnswerParser] | None = None
    call_id: Callable[[int], str] = str

    @property
    def picks_best(self) -> bool:
        """Whether the client gets some of the choices, which are known at the end only."""
        return self.num_sent_choices < self.num_choices

    def next_deadline(self, has_first_token: bool) -> float | None:
        """Returns the deadline that applies now."""
        first_token = None if has_first_token else self.first_token_deadline
        return min((time for time in (first_token, self.deadline) if time is not None), default=None)


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """How far a client has read: tokens, and bytes of their text; None: all text of these tokens.

    `is_started`: it also got the event that the request has a seat.
    """

    offset: int = 0
    text_bytes: int | None = None
    is_started: bool = False


BEGINNING = ReadPosition()
