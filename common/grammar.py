"""Canonical grammars of constrained outputs: written by routers, compiled by executors.

A grammar is the JSON text that llguidance takes, `{"grammars":[…]}`, in one spelling: no spaces, members in the order
given (it is the order of an object's properties), nothing escaped that JSON does not require. Its hash is the SHA-256
of its UTF-8 bytes. Equal constraints have equal hashes, so compiled grammars are cached by hash. This module needs
neither llguidance nor protobuf.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from inflight.common.protocol import MAX_GRAMMAR_BYTES

# Arguments of `llguidance.LLParserLimits`. Routers and executors compile with the same, so that a grammar that a
# router accepts compiles on an executor. A lexer state takes 1 to 2 kB. Verbose errors would repeat the grammar and
# the output.
PARSER_LIMITS: Final[dict[str, Any]] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class GrammarError(ValueError):
    """A grammar that cannot be compiled. The text is for the user."""


def canonical_grammar(member: str, grammar: Any) -> str:
    """Returns the text of a grammar. `member` is `json_schema` with a schema, or `lark_grammar` with a text."""
    return canonical_grammars({member: grammar})


def canonical_grammars(*grammars: dict[str, Any]) -> str:
    """Returns the text of a grammar that refers to others by name, after the first."""
    parts = {"grammars": list(grammars)}
    return json.dumps(parts, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def grammar_hash(grammar: str) -> bytes:
    """Returns the SHA-256 of a canonical grammar."""
    return hashlib.sha256(grammar.encode()).digest()


def grammar_violation(grammar: str, expected_hash: bytes) -> str | None:
    """Returns what is wrong with a grammar that another process sent, without compiling it."""
    num_bytes = len(grammar.encode())
    if not 0 < num_bytes <= MAX_GRAMMAR_BYTES:
        return f"the grammar has {num_bytes} bytes; must have 1 to {MAX_GRAMMAR_BYTES}"
    if expected_hash != grammar_hash(grammar):
        return "the hash is not the SHA-256 of the grammar"
    return None
