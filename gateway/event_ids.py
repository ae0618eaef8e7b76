"""Event ids of a stream, which contain everything that any gateway needs to resume after the event. Pure.

    1~<answer's id>~<created>~<request id>,<resume token>,<tokens>,<bytes of text>,<f where it has finished>~…

There is one group for each choice, in order. With log probabilities a group ends in a comma and the number of
characters that their tokens stand for, and with those of a prompt in another comma and the number of its tokens. An id
is as secret as the resume tokens in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from inflight.gateway.errors import ApiError

VERSION = "1"
HEADER = "Last-Event-ID"

# More would make events longer than their content, and headers longer than servers accept.
MAX_RESUMED_CHOICES = 8
_ANSWER_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_GROUP = re.compile(
    r"([A-Za-z0-9._:-]{1,128}),([A-Za-z0-9_-]{1,2048}),([0-9]{1,9}),([0-9]{1,10}),(f?)"
    r"(?:,([0-9]{1,10})(?:,([0-9]{1,9}))?)?"
)
_CREATED = re.compile(r"[0-9]{1,12}")


@dataclass(slots=True)
class Place:
    """The client's position in one choice: tokens, bytes of their text, and whether it knows that the choice ended.

    `num_characters` counts the characters of the tokens whose log probabilities it has, `num_prompt_tokens` those of
    the prompt among them.
    """

    request_id: str = ""
    resume_token: str = ""
    num_tokens: int = 0
    text_bytes: int = 0
    has_finished: bool = False
    num_characters: int = 0
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerId:
    """Properties of an answer that are common to all its events."""

    name: str
    created: int


def event_id(answer: AnswerId, places: list[Place]) -> str:
    """Returns the id of an event after which the client is at these positions; empty if it would be too long, or if a
    resume token is not known yet."""
    if len(places) > MAX_RESUMED_CHOICES or not all(place.resume_token for place in places):
        return ""
    return "~".join((VERSION, answer.name, str(answer.created), *map(_group, places)))


def read_event_id(text: str) -> tuple[AnswerId, list[Place]]:
    """Parses an event id. Raises `ApiError`."""
    version, *rest = text.split("~")
    if version != VERSION or len(rest) < 3 or len(rest) - 2 > MAX_RESUMED_CHOICES:
        raise no_event_id()
    name, created, *groups = rest
    found = [_GROUP.fullmatch(group) for group in groups]
    if not (_ANSWER_ID.fullmatch(name) and _CREATED.fullmatch(created)) or None in found:
        raise no_event_id()
    places = [
        Place(one[1], one[2], int(one[3]), int(one[4]), bool(one[5]), int(one[6] or 0), int(one[7] or 0))
        for one in found
        if one is not None
    ]
    return AnswerId(name, int(created)), places


def _group(place: Place) -> str:
    parts = (place.request_id, place.resume_token, place.num_tokens, place.text_bytes, "f" * place.has_finished)
    counts = (place.num_characters, place.num_prompt_tokens)
    shown = counts if place.num_prompt_tokens else counts[: bool(place.num_characters)]
    return ",".join(map(str, (*parts, *shown)))


def no_event_id() -> ApiError:
    """Returns the refusal of an id."""
    return ApiError(400, f"{HEADER}: is not the id of an event of this API", param=HEADER)
