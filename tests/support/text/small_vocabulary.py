"""A tokenizer of few tokens for constrained output: the printable ASCII characters, and some longer texts."""

from __future__ import annotations

import functools
import hashlib
import json
import string
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inflight.executor.logits.grammar import CompiledGrammar
from inflight.executor.scheduler.sequence import Constraint

PAD_ID, BOS_ID, EOS_ID, OTHER_EOS_ID = 0, 1, 2, 3
SPECIAL = ("<pad>", "<bos>", "<eos>", "<end>")
CHARACTERS = "".join(sorted(set(string.printable) - set("\t\r\x0b\x0c")))
# Byte-level vocabularies write these bytes as other characters.
WRITTEN = {" ": "Ġ", "\n": "Ċ"}
LONGER = (
    '{"',
    '":',
    '",',
    '"}',
    "tr",
    "true",
    "fal",
    "false",
    "nu",
    "null",
    "12",
    "ab",
    "abc",
    "ba",
    "a ",
    " 1",
    "],",
    "é",
)
# Ids without a token, as models have that pad their vocabulary.
NUM_PADDING = 9


def _written(text: str) -> str:
    if text == "é":
        return "Ã©"
    return "".join(WRITTEN.get(character, character) for character in text)


TEXTS = (*SPECIAL, *CHARACTERS, *LONGER)
NUM_TOKENS = len(TEXTS)
VOCABULARY_SIZE = NUM_TOKENS + NUM_PADDING


@functools.cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {_written(text) if text not in SPECIAL else text: i for i, text in enumerate(TEXTS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")


@functools.cache
def small_llguidance() -> LLTokenizer:
    return from_tokenizer(small_tokenizer(), n_vocab=VOCABULARY_SIZE, eos_token=[EOS_ID, OTHER_EOS_ID])


def text_of(token_ids: list[int]) -> str:
    """The text without special tokens. Padding ids are written as a character of no text."""
    return "".join(TEXTS[i] if i < NUM_TOKENS else "\0" for i in token_ids if i >= len(SPECIAL))


def schema_grammar(schema: Any) -> str:
    """A grammar as the router makes it."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": r"[ \n]{0,2}"})


def regex_grammar(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


@functools.cache
def compiled(grammar: str) -> CompiledGrammar:
    return CompiledGrammar(small_llguidance(), grammar)


def constraint(grammar: str, *, ignores_eos: bool = False, is_ready: bool = True) -> Constraint:
    key = hashlib.sha256(grammar.encode()).digest()
    made = Constraint(grammar, key, frozenset({EOS_ID, OTHER_EOS_ID}), ignores_eos)
    if is_ready:
        made.compiled = compiled(grammar)
    return made
