"""Lines of batches' files: the requests of an input file, and the results of output and error files. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from inflight.gateway.answers import encoded
from inflight.gateway.errors import ApiError
from inflight.gateway.store.batches import Batch

MAX_CUSTOM_ID_CHARACTERS = 512
# Of a file. Reading ends with the last of them.
MAX_PROBLEMS = 100
_DIGEST_BYTES = 16
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(slots=True, eq=False)
class Problem(Exception):
    """Why a file is no batch, in OpenAI's form. `line` is None for the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def shown(self) -> dict[str, Any]:
        """Returns an element of a batch's `errors`."""
        return {"code": self.code, "message": self.message, "param": self.param, "line": self.line}


@dataclass(frozen=True, slots=True)
class Line:
    """A request of an input file. Lines count from 1."""

    number: int
    custom_id: str
    body: dict[str, Any]


def parse_line(number: int, raw: bytes | None, endpoint: str) -> Line:
    """Parses a line; None is one that is too long. Raises `Problem`."""
    if raw is None:
        raise Problem("line_too_long", "the line is longer than the body of a request may be", line=number)
    try:
        found = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Problem("invalid_json_line", f"the line is not JSON: {error}", line=number) from None
    if not isinstance(found, dict):
        raise Problem("invalid_json_line", "the line must be a JSON object", line=number)
    for name in _FIELDS:
        if found.get(name) is None:
            raise Problem("missing_required_parameter", f"{name}: is required", name, number)
    if unknown := found.keys() - set(_FIELDS):
        name = min(unknown)[:100]
        raise Problem("unknown_parameter", f"{name}: is not a field of a line", name, number)
    custom_id, body = found["custom_id"], found["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        text = f"custom_id: must be a text of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters"
        raise Problem("invalid_custom_id", text, "custom_id", number)
    if found["method"] != "POST":
        raise Problem("invalid_method", "method: must be POST", "method", number)
    if found["url"] != endpoint:
        text = f"url: must be {endpoint}, the endpoint of the batch"
        raise Problem("mismatched_url", text, "url", number)
    if not isinstance(body, dict):
        raise Problem("invalid_body", "body: must be an object", "body", number)
    return Line(number, custom_id, body)


@dataclass(slots=True)
class FileCheck:
    """The check of a whole file. `problems` are those of its lines, at most 100."""

    endpoint: str
    max_lines: int
    total: int = 0
    model: str | None = None
    problems: list[Problem] = field(default_factory=list)
    _seen: dict[bytes, int] = field(default_factory=dict)

    def take(self, number: int, raw: bytes | None) -> bool:
        """Checks a line. Returns whether the next one is to be read."""
        self.total += 1
        if self.total > self.max_lines:
            text = f"the file has more than {self.max_lines} requests"
            self.problems.append(Problem("too_many_requests", text, line=number))
            return False
        try:
            self._check(parse_line(number, raw, self.endpoint))
        except Problem as problem:
            self.problems.append(problem)
        return len(self.problems) < MAX_PROBLEMS

    def end(self) -> None:
        """Checks the file as a whole."""
        if not self.total:
            self.problems.append(Problem("empty_file", "the file has no requests"))

    def _check(self, line: Line) -> None:
        digest = hashlib.blake2b(line.custom_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()
        if (first := self._seen.setdefault(digest, line.number)) != line.number:
            text = f"custom_id: is that of line {first}, too"
            raise Problem("duplicate_custom_id", text, "custom_id", line.number)
        model = line.body.get("model")
        if not isinstance(model, str) or not model:
            raise Problem("missing_required_parameter", "body.model: is required", "body.model", line.number)
        if self.model is None:
            self.model = model
        elif model != self.model:
            text = f"body.model: differs from that of the first line, {self.model[:100]!r}"
            raise Problem("mismatched_model", text, "body.model", line.number)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a line: a line of the output file, or of the error file. `usage` is that of the answer."""

    number: int
    text: bytes
    is_success: bool
    usage: Mapping[str, Any] | None = None


def result_of(batch: Batch, line: Line, answer: dict[str, Any] | ApiError) -> Result:
    """Returns the result of a line that was answered, or refused."""
    error = answer if isinstance(answer, ApiError) else None
    body = answer if not isinstance(answer, ApiError) else answer.body()
    status = 200 if error is None else error.status
    response = {"status_code": status, "request_id": f"req_{request_name(batch, line.number)}", "body": body}
    text = _written(batch, line.number, line.custom_id, response, None)
    return Result(line.number, text, error is None, None if error is not None else body.get("usage"))


# What a line that was not run has as its error, by what its batch ended as.
_NOT_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed before the batch was cancelled."),
    "failed": ("batch_failed", "This request was not executed before the batch failed."),
}


def result_not_run(batch: Batch, line: Line) -> Result:
    """Returns the result of a line that had none when its batch ended."""
    code, text = _NOT_RUN[batch.outcome]
    written = _written(batch, line.number, line.custom_id, None, {"code": code, "message": text})
    return Result(line.number, written, is_success=False)


def request_name(batch: Batch, number: int) -> str:
    """Returns the name of a line's request, which is the same whenever and wherever it runs."""
    return f"{batch.batch_id.partition('_')[2]}{number:06x}"


def idempotency_key(batch: Batch, number: int, run: int) -> str:
    """Returns the key of a line's request. `run` counts the times that its output was lost."""
    return f"{batch.batch_id}.{number}" + (f".{run}" if run else "")


def _written(
    batch: Batch, number: int, custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    name = f"batch_req_{request_name(batch, number)}"
    return encoded({"id": name, "custom_id": custom_id, "response": response, "error": error}) + b"\n"


def ranges_of(numbers: list[int]) -> list[list[int]]:
    """Returns numbers as ranges `[first, last]` in order."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges
