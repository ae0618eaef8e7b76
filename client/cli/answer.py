"""Prints an answer as it comes, says where its stream was resumed, and afterwards what it took."""

from __future__ import annotations

import time
from typing import TextIO

from client.events import Delta, Resumed
from client.sync import Stream

# Of ANSI's terminals.
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def print_answer(stream: Stream, out: TextIO, notes: TextIO) -> str:
    """Writes the stream's text to `out` as it comes and returns one line about tokens and times.

    What happened on the way goes to `notes`.

    Raises:
        InflightError: the request was refused, or broke off.
    """
    began_s = time.monotonic()
    first_s: float | None = None
    for event in stream.events():
        if isinstance(event, Delta):
            first_s = first_s or time.monotonic() - began_s
            out.write(event.text)
            out.flush()
        elif isinstance(event, Resumed):
            write_note(notes, "connection lost; resumed")
    return describe_answer(stream, first_s, time.monotonic() - began_s)


def write_note(notes: TextIO, text: str) -> None:
    """A line on the side, dim where somebody looks at it."""
    notes.write(f"\n{DIM}{text}{PLAIN}\n" if notes.isatty() else f"{text}\n")
    notes.flush()


def describe_answer(stream: Stream, first_s: float | None, total_s: float) -> str:
    """One line: tokens, time to the first of them, speed after it, why it ended."""
    num_tokens = stream.transcript.choices[0].num_tokens
    parts = [f"{num_tokens} tokens in {total_s:.2f} s"]
    if first_s is not None:
        parts.append(f"first after {first_s:.2f} s")
        if num_tokens > 1 and total_s > first_s:
            parts.append(f"{(num_tokens - 1) / (total_s - first_s):.1f} tokens/s")
    if stream.finish_reason is not None:
        parts.append(stream.finish_reason.value.replace("_", " "))
    return " · ".join(parts)
