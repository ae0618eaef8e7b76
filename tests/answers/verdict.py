"""What is to be said of an answer: whether its text satisfies the schema, by two independent validators. Pure.

`jsonschema` checks formats only where their packages are there; `jsonschema_rs` brings its own checks of all of them.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

import jsonschema
import jsonschema_rs

from inflight.events import Completion, FinishReason
from tests.answers.schemas import Schema

MAX_TEXT = 200


class Verdict(Enum):
    """How an answer ended. `CUT_OFF` by `max_tokens`, and said so."""

    VALID = "valid"
    CUT_OFF = "cut off"
    INVALID = "invalid"
    FAILED = "failed"


def in_range(text: str) -> float:
    """A number of JSON may be beyond the range of a double; the validators take none that is not finite."""
    return max(-1e300, min(1e300, float(text)))


def problem_of(schema: Schema, text: str) -> str | None:
    """Returns how a text violates a schema; None if it is valid."""
    try:
        document: Any = json.loads(text, parse_float=in_range)
    except ValueError as error:
        return str(error)
    checker = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        checker(schema, format_checker=checker.FORMAT_CHECKER).validate(document)
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(document)
    except (jsonschema.ValidationError, jsonschema_rs.ValidationError) as error:
        return error.message
    return None


def judge(schema: Schema, completion: Completion) -> tuple[Verdict, str]:
    """Returns the verdict and in words what is wrong."""
    reason, is_unfinished = completion.finish_reason, completion.constraint_unfinished
    if reason is FinishReason.LENGTH and is_unfinished:
        return Verdict.CUT_OFF, ""
    if reason not in (FinishReason.STOP_TOKEN, FinishReason.LENGTH):
        return Verdict.FAILED, f"finished by {reason}"
    problem = "the answer ended by itself and is unfinished" if is_unfinished else problem_of(schema, completion.text)
    if problem is None:
        return Verdict.VALID, ""
    return Verdict.INVALID, f"{problem}: {completion.text[:MAX_TEXT]!r} ({reason})"
