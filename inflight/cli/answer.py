"""An answer printed as it arrives, with a note where its stream was resumed and a summary at the end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from typing import TextIO

from inflight.cli.flags import RESUME_TOKEN_VARIABLE
from inflight.events import Accepted, Delta, Prompt, Resumed
from inflight.sync_stream import Stream

# ANSI escape codes of terminals.
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# Output of a model must not control the terminal: control characters are replaced by their symbols (␛).
VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
VISIBLE |= dict.fromkeys(range(128, 160), 65533)


def print_answer(stream: Stream, out: TextIO, notes: TextIO, *, shows_token: bool = False) -> str:
    """Writes the stream's text to `out` as it arrives and returns one line with tokens and times.

    Resumptions are reported to `notes`, and with `shows_token` the command that explains the request.

    Raises:
        InflightError: the request was refused or failed.
    """
    began_s = time.monotonic()
    is_terminal = out.isatty()
    first_s: float | None = None
    for event in stream.events():
        if isinstance(event, Delta):
            if event.num_tokens:
                first_s = first_s or time.monotonic() - began_s
            out.write(event.text.translate(VISIBLE) if is_terminal else event.text)
            out.flush()
        elif isinstance(event, Prompt):
            for line in describe_prompt(event):
                write_note(notes, line)
        elif isinstance(event, Resumed):
            write_note(notes, "connection lost; resumed")
        elif isinstance(event, Accepted) and shows_token:
            write_note(
                notes, f"{RESUME_TOKEN_VARIABLE}={event.resume_token} inflight explain {_quoted(event.request_id)}"
            )
    return describe_answer(stream, first_s, time.monotonic() - began_s)


def describe_prompt(prompt: Prompt) -> Iterator[str]:
    """Yields a line for each token: its log probability, its rank, its text, and the likeliest in its place."""
    for position in prompt.logprobs:
        if position is None:
            yield f"{'':>9} {'':>6} {_shown(prompt.first_text_bytes)}"
        else:
            top = ", ".join(f"{_shown(one.text_bytes)} {one.logprob:.3f}" for one in position.top)
            chosen = position.chosen
            line = f"{chosen.logprob:9.3f} {chosen.rank:6} {_shown(chosen.text_bytes)}"
            yield f"{line}  ({top})" if top else line


def _shown(text_bytes: bytes) -> str:
    return repr(text_bytes.decode(errors="backslashreplace"))


def _quoted(request_id: str) -> str:
    """Returns the id as an argument for a shell."""
    return f"{'-- ' if request_id.startswith('-') else ''}{shlex.quote(request_id)}"


def write_note(notes: TextIO, text: str) -> None:
    """Writes a line to `notes`, dimmed on a terminal."""
    notes.write(f"\n{DIM}{text}{PLAIN}\n" if notes.isatty() else f"{text}\n")
    notes.flush()


def describe_answer(stream: Stream, first_s: float | None, total_s: float) -> str:
    """Returns one line: tokens, time to the first token, tokens per second after it, finish reason."""
    num_tokens = stream.transcript.choices[0].num_tokens
    parts = [f"{num_tokens} tokens in {total_s:.2f} s"]
    if first_s is not None:
        parts.append(f"first after {first_s:.2f} s")
        if num_tokens > 1 and total_s > first_s:
            parts.append(f"{(num_tokens - 1) / (total_s - first_s):.1f} tokens/s")
    if stream.finish_reason is not None:
        parts.append(stream.finish_reason.value.replace("_", " "))
    if stream.transcript.choices[0].constraint_unfinished:
        parts.append("the output does not satisfy the constraint")
    return " · ".join(parts)
