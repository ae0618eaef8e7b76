"""One stream as its client saw it, and the checks of what it should be. Pure.

Exactly once means: every token at its offset, none missing, none twice, and the text of just these tokens. A stream
that its client left early must be the beginning of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from inflight.bench.chaos.requests import Expected, SampleRequest
from inflight.errors import InflightError
from inflight.events import Accepted, Delta, Done, Event, Finished, Notice, Resumed


@dataclass(slots=True)
class Observed:
    """What a stream brought. Times are of the monotonic clock."""

    sample: SampleRequest
    began_s: float
    request_id: str | None = None
    num_choices: int = 1  # computed, all alike; one is sent
    arrivals_s: list[float] = field(default_factory=list)
    offsets: list[tuple[int, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    was_accepted: bool = False
    accepted_s: float | None = None
    finish_reason: str | None = None
    counted_tokens: int | None = None
    migrated_s: list[float] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)
    was_left: bool = False
    has_timed_out: bool = False
    error: InflightError | None = None
    ended_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(number for _, number in self.offsets)

    def add(self, event: Event, at_s: float) -> None:
        match event:
            case Accepted():
                self.was_accepted = True
                self.accepted_s = self.accepted_s or at_s
                self.request_id = event.request_id
            case Delta():
                if event.num_tokens:
                    self.arrivals_s.append(at_s)
                    self.offsets.append((event.offset, event.num_tokens))
                self.token_ids.extend(event.token_ids)
                self.text += event.text
            case Notice() if event.kind == "migrated":
                self.migrated_s.append(at_s)
            case Resumed():
                self.resumed_s.append(at_s)
            case Finished():
                self.finish_reason = event.reason.value
            case Done():
                self.counted_tokens = event.usage.output_tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a stream differs from the undisturbed one: tokens that are missing or wrong, tokens that came again or should
    not have come, and in words what else is wrong."""

    lost: int = 0
    duplicated: int = 0
    problem: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.duplicated or self.problem)


def judge(observed: Observed, expected: Expected) -> Verdict:
    """Holds a stream that ended, or that its client left, against the undisturbed one."""
    lost, duplicated, num_tokens = _judge_offsets(observed.offsets)
    problems = []
    if observed.sample.wants_ids:
        wrong = list(_wrong_offsets(observed, expected))
        if wrong:
            lost += len(wrong)
            problems.append(f"{len(wrong)} wrong tokens, the first at offset {wrong[0]}")
        if len(observed.token_ids) != observed.num_tokens:
            problems.append(f"{len(observed.token_ids)} token ids with {observed.num_tokens} tokens")
    if num_tokens > len(expected.token_ids):
        duplicated += num_tokens - len(expected.token_ids)
        problems.append(f"{num_tokens} tokens instead of {len(expected.token_ids)}")
    if not observed.was_left:
        if num_tokens < len(expected.token_ids):
            lost += len(expected.token_ids) - num_tokens
            problems.append(f"ended after {num_tokens} of {len(expected.token_ids)} tokens")
        problems += _judge_end(observed, expected)
    text_lost, text_duplicated, about_text = _judge_text(observed, expected)
    if about_text is not None:
        problems.append(about_text)
        # A wrong text with right tokens is one thing lost or repeated; with wrong tokens it has been counted.
        if not (lost or duplicated):
            lost, duplicated = text_lost, text_duplicated
    return Verdict(lost, duplicated, "; ".join(problems) or None)


def _judge_offsets(offsets: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Tokens left out, tokens that came again, and where the stream ended."""
    lost = duplicated = due = 0
    for offset, number in offsets:
        lost += max(0, offset - due)
        duplicated += min(number, max(0, due - offset))
        due = max(due, offset + number)
    return lost, duplicated, due


def _wrong_offsets(observed: Observed, expected: Expected) -> Iterator[int]:
    """Offsets of tokens that are not the undisturbed ones."""
    ids = iter(observed.token_ids)
    for offset, number in observed.offsets:
        due = expected.token_ids[offset : offset + number]
        for place, (got, wanted) in enumerate(zip(itertools.islice(ids, number), due, strict=False)):
            if got != wanted:
                yield offset + place


def _judge_text(observed: Observed, expected: Expected) -> tuple[int, int, str | None]:
    got, due = observed.text.encode(), expected.text.encode()
    if got == due or (observed.was_left and due.startswith(got)):
        return 0, 0, None
    at = next((i for i, (a, b) in enumerate(zip(got, due, strict=False)) if a != b), min(len(got), len(due)))
    about = f"text differs from byte {at} on: {len(got)} bytes instead of {len(due)}"
    return (0, 1, about) if len(got) > len(due) else (1, 0, about)


def _judge_end(observed: Observed, expected: Expected) -> list[str]:
    problems = []
    if observed.finish_reason != expected.finish_reason:
        problems.append(f"finished by {observed.finish_reason} instead of {expected.finish_reason}")
    due = len(expected.token_ids) * observed.num_choices
    if observed.counted_tokens != due:
        problems.append(f"{observed.counted_tokens} output tokens counted instead of {due}")
    return problems
