"""Upper limits on the values and the nesting of a JSON text, checked before it is parsed.

A parser takes some 100 ns per value and holds the interpreter lock until it is done: 4 MB of empty objects block an
event loop for 200 ms. The nesting at which Python raises RecursionError depends on its version and on the caller. The
counts examine only brackets and commas outside of strings and stop at the limit.
"""

from __future__ import annotations

import itertools
import re

# A string (an unterminated one ends with the text), the characters that begin or separate values, and a list of whole
# numbers. None of it backtracks.
_STRING = rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)'
_TOKENS = re.compile(_STRING + rb"|[\[{,]", re.DOTALL)
_TOKENS_AND_ID_LISTS = re.compile(_STRING + rb"|\[[0-9,\s]*+\]|[\[{,]", re.DOTALL)
_BRACKETS = re.compile(_STRING + rb"|[\[\]{}]", re.DOTALL)
_QUOTE = ord('"')
_OPENING = frozenset(b"[{")

# Levels of objects and lists in a schema, in arguments of a tool call and in other JSON text of a client. What works
# on the values may recurse. serde_json, which reads the grammars of schemas, stops at 128.
MAX_NESTING = 100


def has_more_values(text: bytes, most: int, *, id_list_is_one: bool = False) -> bool:
    """Returns whether a JSON text may hold more than `most` values. With `id_list_is_one` a list of whole numbers
    counts as one value. For a text that is not JSON the result has no meaning."""
    # All of a short text, and most long ones, are below the limit even with the characters in strings.
    if text.count(b",") + text.count(b"[") + text.count(b"{") < most:
        return False
    pattern = _TOKENS_AND_ID_LISTS if id_list_is_one else _TOKENS
    # A value follows each bracket and comma. An object has three tokens per value, so a text with more is not JSON.
    num_values = 1
    for num_tokens, token in enumerate(itertools.islice(pattern.finditer(text), 3 * most + 1), start=1):
        num_values += text[token.start()] != _QUOTE
        if num_values > most or num_tokens > 3 * most:
            return True
    return False


def nests_deeper(text: bytes, most: int = MAX_NESTING) -> bool:
    """Returns whether a JSON text has more than `most` levels of objects and lists. For a text that is not JSON the
    result has no meaning."""
    if text.count(b"[") + text.count(b"{") <= most:
        return False
    depth = 0
    for token in _BRACKETS.finditer(text):
        first = text[token.start()]
        if first != _QUOTE:
            depth += 1 if first in _OPENING else -1
        if depth > most:
            return True
    return False
