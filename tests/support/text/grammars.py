"""Canonical grammars and the texts that they accept, by llguidance with a vocabulary of single bytes."""

from __future__ import annotations

import functools

import llguidance

from inflight.common.grammar import PARSER_LIMITS

TOKENIZER = llguidance.LLTokenizer("byte")


@functools.lru_cache(maxsize=256)
def matcher_of(grammar: str) -> llguidance.LLMatcher:
    """Returns the matcher of a grammar, at the beginning of the output. It is not to be advanced."""
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: str, text: str) -> bool:
    """Returns whether a text is a whole output of a grammar."""
    matcher = matcher_of(grammar).deep_copy()
    encoded = text.encode()
    return matcher.try_consume_tokens(list(encoded)) == len(encoded) and matcher.is_accepting()
