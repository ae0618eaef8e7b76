"""An upper limit on the values of a JSON text, checked before it is parsed.

A parser takes some 100 ns for each value and holds the interpreter lock until it is done: 4 MB of empty objects hold up
an event loop for 200 ms. The count looks only at brackets and commas outside of strings and stops at the limit.
"""

from __future__ import annotations

import itertools
import re

# A string, of which an unterminated one goes to the end; what begins or separates values; a list of whole numbers.
# None of it backtracks.
_STRING = rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)'
_TOKENS = re.compile(_STRING + rb"|[\[{,]", re.DOTALL)
_TOKENS_AND_ID_LISTS = re.compile(_STRING + rb"|\[[0-9,\s]*+\]|[\[{,]", re.DOTALL)
_QUOTE = ord('"')


def has_more_values(text: bytes, most: int, *, id_list_is_one: bool = False) -> bool:
    """Whether a JSON text can hold more than so many values. With `id_list_is_one` a list of whole numbers counts as
    one value. Of a text that is no JSON the answer means nothing."""
    # All of a short text, and most long ones, are below the limit even with what is in strings.
    if text.count(b",") + text.count(b"[") + text.count(b"{") < most:
        return False
    pattern = _TOKENS_AND_ID_LISTS if id_list_is_one else _TOKENS
    # A value stands behind each bracket and comma. An object has three tokens for each of its values, so more than that
    # is no JSON.
    num_values = 1
    for num_tokens, token in enumerate(itertools.islice(pattern.finditer(text), 3 * most + 1), start=1):
        num_values += text[token.start()] != _QUOTE
        if num_values > most or num_tokens > 3 * most:
            return True
    return False
