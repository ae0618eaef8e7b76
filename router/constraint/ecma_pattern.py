"""Patterns of JSON schemas, in ECMAScript's dialect, rewritten for the compiler's, which is that of Rust's regex crate.

The dialects differ in what `.` and `\\s` match and in what `[`, `&&`, `--` and `~~` mean within a class. What has no
counterpart is refused by name, also what only Rust's dialect has, such as inline flags.
"""

from __future__ import annotations

import re


class PatternError(Exception):
    """A pattern that is not supported. The message completes a sentence that begins with its field."""


# Line terminators and whitespace of ECMA-262. They are classes, so they can stand within a class too.
ANY_CHARACTER = r"[^\n\r\x{2028}\x{2029}]"
WHITESPACE = r"[[\s\x{FEFF}]--\x{85}]"
NO_WHITESPACE = r"[^[\s\x{FEFF}]--\x{85}]"

ESCAPES = {"s": WHITESPACE, "S": NO_WHITESPACE, "0": r"\x{00}", "<": "<", ">": ">"}
SAME_ESCAPES = frozenset("dDwWbBfnrtv" + r"""!"#$%&'()*+,-./:;=?@[\]^_`{|}~ """)
# Escapes that take what follows: both dialects agree on these forms.
LONG_ESCAPE = re.compile(r"x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]{1,6}\}|[pP]\{[A-Za-z_=]+\}")
GROUP = re.compile(r"\((?:\?(?::|P?<[A-Za-z_]\w*>|=|!|<=|<!))?")
# Within a class: operators on classes in Rust's dialect, plain characters in ECMAScript's.
PLAIN_IN_CLASS = frozenset("[&~")


def rust_pattern(pattern: str) -> str:
    """Returns a pattern with the same meaning in Rust's dialect. Raises `PatternError`."""
    parts: list[str] = []
    at, in_class = 0, False
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            text, length = _escape(pattern, at + 1)
        elif in_class:
            text, length = _in_class(pattern, at)
            in_class = character != "]"
        elif character == "[":
            text, length = _opened(pattern, at)
            in_class = True
        elif character == "(":
            text, length = _group(pattern, at)
        else:
            text, length = ANY_CHARACTER if character == "." else character, 1
        parts.append(text)
        at += length
    return "".join(parts)


def _escape(pattern: str, at: int) -> tuple[str, int]:
    """Returns the translation of the escape whose letter is at `at`, and its length."""
    if long := LONG_ESCAPE.match(pattern, at):
        return "\\" + long[0], 1 + len(long[0])
    letter = pattern[at : at + 1]
    if letter in ESCAPES and not (letter == "0" and pattern[at + 1 : at + 2].isdigit()):
        return ESCAPES[letter], 2
    if letter in SAME_ESCAPES and letter:
        return "\\" + letter, 2
    raise PatternError(f"has the escape \\{letter}, which is not supported")


def _opened(pattern: str, at: int) -> tuple[str, int]:
    opening = "[^" if pattern.startswith("[^", at) else "["
    if pattern.startswith("]", at + len(opening)):
        raise PatternError(f"has the class {opening}], which is not supported")
    return opening, len(opening)


def _in_class(pattern: str, at: int) -> tuple[str, int]:
    if pattern.startswith("--", at):
        raise PatternError("has -- within a class, which is not supported; write \\-")
    return ("\\" if pattern[at] in PLAIN_IN_CLASS else "") + pattern[at], 1


def _group(pattern: str, at: int) -> tuple[str, int]:
    opening = GROUP.match(pattern, at)
    assert opening is not None
    if opening[0] == "(" and pattern.startswith("(?", at):
        raise PatternError(f"has the group {pattern[at : at + 4]}, which is not supported; flags are not")
    if opening[0][-1] in "=!":
        raise PatternError(f"has the look-around {opening[0]}, which is not supported")
    return opening[0], len(opening[0])
