"""A process that compiles constraints, one after the other, for a router.

It reads a constraint from its standard input and writes the canonical grammar or what is wrong with the constraint to
its standard output. A constraint comes from a client, and no bound of the compiler covers everything, so the process is
expendable: the kernel ends it when a constraint takes too much processor time or memory, and the router starts another.
Besides llguidance it imports only the modules of this folder and of canonical grammars, so it starts quickly.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import llguidance

from inflight.common.grammar import PARSER_LIMITS, canonical_grammar
from inflight.router.constraint.json_schema import MAX_VIOLATIONS
from inflight.router.constraint.process import LENGTH_BYTES, OUT_OF_MEMORY
from inflight.router.constraint.source import (
    TOOLS,
    ConstraintError,
    ConstraintSource,
    canonical,
    patterns,
    source_of,
)

# Processor time for one constraint.
MAX_COMPILE_S = 2.0
# Address space, of which Python and llguidance take 35 MiB.
MAX_MEMORY_BYTES = 256 * 1024 * 1024
# A grammar that compiles may still have no output at all, or need more than the limits after its first tokens.
PROBED_STEPS = 64
# Processor time for these steps. With a model's vocabulary a step costs more, and each token needs one.
MAX_PROBE_S = 0.5
# As `inflight.router.constraint.answer_grammar` writes it; in a text of JSON the quotes before it would be escaped.
_TOKEN_ID = re.compile(r"<\[\d+\]>")


class Compiler:
    """Compiles grammars for a vocabulary of single bytes, which is the same for every model."""

    def __init__(self) -> None:
        self._tokenizer = llguidance.LLTokenizer("byte")
        self._limits = llguidance.LLParserLimits(**PARSER_LIMITS)

    def compile(self, source: str, ignored: set[str] | None = None) -> str:
        """Returns the canonical grammar of a constraint. Adds words of its schemas that JSON Schema does not know to
        `ignored`. Raises `ConstraintError`."""
        constraint = source_of(source)
        grammar = canonical(constraint, ignored)
        checked = grammar
        if constraint.kind == TOOLS or constraint.reasoning:
            # Ids of the model's special tokens, which this vocabulary does not have.
            checked = _TOKEN_ID.sub(f"<[{self._tokenizer.eos_token - 1}]>", grammar)
        matcher = self._matcher(checked)
        if matcher.is_error():
            raise ConstraintError(self._wrong_patterns(constraint) or [readable(matcher.get_error())])
        if warnings := matcher.get_grammar_warnings():
            raise ConstraintError([f"cannot be enforced: {readable(warning)}" for warning in warnings])
        self._probe(matcher)
        return grammar

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def _wrong_patterns(self, source: ConstraintSource) -> list[str]:
        """Returns violations for the patterns that do not compile on their own. The compiler's error does not say
        where in the schema its pattern is."""
        violations: list[str] = []
        for beginning, pattern in patterns(source):
            alone = {"type": "string", "pattern": pattern.translated}
            matcher = self._matcher(canonical_grammar("json_schema", alone))
            if matcher.is_error() and len(violations) < MAX_VIOLATIONS:
                reason = f"does not compile: {readable(matcher.get_error())}"
                violations.append(beginning + pattern.refused(reason))
        return violations

    def _probe(self, matcher: llguidance.LLMatcher) -> None:
        """Takes the first steps of one output. Raises `ConstraintError` if that is impossible or too much work."""
        chance = random.Random(0)
        end = self._tokenizer.eos_token
        until = time.process_time() + MAX_PROBE_S
        for _ in range(PROBED_STEPS):
            if time.process_time() > until:
                raise ConstraintError(["takes too much work for each token; simplify it"])
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            _check(matcher)
            allowed = [token for token in range(self._tokenizer.vocab_size) if mask >> token & 1 and token != end]
            if not allowed:
                return
            matcher.consume_token(chance.choice(allowed))
            _check(matcher)


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ConstraintError([readable(matcher.get_error())])


def readable(message: str) -> str:
    """Returns a message of the compiler in one line, without its copy of the grammar."""
    if "NoExtension" in message:
        return "no output satisfies it"
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = (reasons or lines or ["it does not compile"])[0]
    return text if len(text) <= 300 else text[:299] + "…"


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Ends this process by SIGPROF after so much processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer_constraint(compiler: Compiler, source: str) -> str:
    """Returns the answer to one constraint as JSON text."""
    try:
        with processor_time(MAX_COMPILE_S):
            ignored: set[str] = set()
            grammar = compiler.compile(source, ignored)
            return json.dumps({"grammar": grammar, "ignored": sorted(ignored)})
    except ConstraintError as error:
        return json.dumps({"violations": error.violations})


def read_frame(stream: BinaryIO) -> str | None:
    """Returns the next text; None at the end."""
    header = stream.read(LENGTH_BYTES)
    return None if len(header) < LENGTH_BYTES else stream.read(int.from_bytes(header, "big")).decode()


def frame(text: str) -> bytes:
    """Returns a text as it is sent."""
    encoded = text.encode()
    return len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded


def main() -> None:
    """Answers until the router closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the router, which closes the pipe
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # rather this process than its router
    compiler = Compiler()
    try:
        while (source := read_frame(sys.stdin.buffer)) is not None:
            sys.stdout.buffer.write(frame(answer_constraint(compiler, source)))
            sys.stdout.buffer.flush()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
