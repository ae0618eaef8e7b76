"""Incremental detokenization of output tokens.

A detokenizer belongs to one choice and remembers only what is incomplete. Invariants: the texts of all calls together
are the text of all tokens, however the tokens were divided among calls; returned text never changes; the cost of a
token does not depend on how many came before. To continue earlier output, push that output first.

`PieceDetokenizer` works on the bytes of tokens, for tokenizers whose text is the concatenation of them. `read_pieces`
reads these bytes from a `tokenizers` decoder into a table, once per tokenizer; all requests share it. Two families
qualify: byte-level BPE (GPT-2, SmolLM2, Qwen, Llama 3) and sentencepiece with byte fallback (Llama 2, Mistral, Gemma).
It holds back the bytes of an incomplete character, at most three: a U+FFFD that the model really produced passes at
once. `WindowDetokenizer` serves tokenizers of which only `decode` is known.

The second family's text differs from that of `tokenizers` in one point, on purpose. If a run of byte tokens is not
UTF-8 as a whole, `tokenizers` replaces every byte of it, including complete characters, which cannot be known before
the run ends. Here, as in sentencepiece itself, complete characters stay and every other byte becomes U+FFFD.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# A character has at most four bytes. If some are missing, it shows as at most three U+FFFD. A fourth token in a row
# that still ends in U+FFFD shows that not all of them stand for an incomplete character.
MAX_INCOMPLETE_CHARACTERS = 3
MAX_HELD_TOKENS = 4
# Tokens of context that a tokenizer gets before the new one. Decoders look at their neighbours only.
MIN_WINDOW_TOKENS = 8
# At this size the window is cut even if the cut may show.
MAX_WINDOW_TOKENS = 64
REPLACEMENT = "\ufffd"
# An error policy of codecs: U+FFFD for every byte that is not UTF-8, as in sentencepiece. Python's "replace" puts one
# for several bytes that belong together.
EACH_BYTE_REPLACED = "inflight.each-byte-replaced"


class IncrementalDetokenizer(Protocol):
    """Turns tokens into text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that they complete."""
        ...

    def flush(self) -> str:
        """Ends the text and returns what was held back; an incomplete character becomes U+FFFD."""
        ...


class PieceDetokenizer:
    """A detokenizer for tokenizers with a table of bytes."""

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool = True) -> None:
        self._pieces = pieces.visible if skip_special_tokens else pieces.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(pieces.utf8_errors)
        self._num_spaces_to_strip = pieces.max_stripped_spaces

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that they complete."""
        pieces = self._pieces
        # Models pad their vocabulary; such an id has no token and no text.
        added = b"".join([pieces[token_id] for token_id in token_ids if token_id < len(pieces)])
        return self._strip_leading(self._decoder.decode(added))

    def flush(self) -> str:
        """Ends the text and returns what was held back; an incomplete character becomes U+FFFD."""
        return self._strip_leading(self._decoder.decode(b"", final=True))

    def _strip_leading(self, text: str) -> str:
        while self._num_spaces_to_strip and text:
            if not text.startswith(" "):
                self._num_spaces_to_strip = 0
            else:
                self._num_spaces_to_strip -= 1
                text = text[1:]
        return text


class WindowDetokenizer:
    """A detokenizer for any other tokenizer: decodes the last few tokens again and returns what is new at the end.

    `_window` holds the last tokens; `_num_sent` characters of its text were returned. U+FFFD at the end may stand for
    an incomplete character and is held back; after `MAX_HELD_TOKENS` such tokens only the last three of them.
    """

    def __init__(self, decode: Callable[[list[int]], str], skipped_ids: frozenset[int]) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._window: list[int] = []
        self._num_sent = 0
        self._num_held_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that they complete."""
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped_ids])

    def flush(self) -> str:
        """Ends the text and returns what was held back."""
        text = self._decode(self._window)[self._num_sent :]
        self._num_sent += len(text)
        return text

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        num_certain = len(text.rstrip(REPLACEMENT))
        if num_certain > self._num_sent:
            self._num_held_tokens = 0
        self._num_held_tokens = self._num_held_tokens + 1 if num_certain < len(text) else 0
        if self._num_held_tokens >= MAX_HELD_TOKENS:
            num_certain = max(num_certain, len(text) - MAX_INCOMPLETE_CHARACTERS)
        # A decoder may take back what it showed for an incomplete character; text that was sent stays.
        start = min(self._num_sent, len(text))
        self._num_sent = max(start, num_certain)
        new = text[start : self._num_sent]
        if len(self._window) > 2 * MIN_WINDOW_TOKENS:
            self._cut_window(text)
        return new

    def _cut_window(self, text: str) -> None:
        """Drops the beginning of the window if the rest decodes to the same text without it.

        This fails inside a character, where one of the next few positions will do. It also fails if the rest has no
        text: the next token would be decoded as the first of the text.
        """
        for num_kept in range(MIN_WINDOW_TOKENS, MIN_WINDOW_TOKENS + MAX_INCOMPLETE_CHARACTERS + 1):
            kept = self._window[-num_kept:]
            tail = self._decode(kept)
            if tail and REPLACEMENT not in tail and text.endswith(tail):
                break
        else:
            if len(self._window) < MAX_WINDOW_TOKENS:
                return
        self._window = kept
        self._num_sent = max(0, len(tail) - (len(text) - self._num_sent))


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE_REPLACED, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class TokenPieces:
    """The bytes of every token id. An id without a token has no bytes.

    `visible` is `pieces` with nothing for special tokens. `max_stripped_spaces` leading spaces of the whole text are
    not part of it. `utf8_errors` names the policy of codecs for bytes that are not UTF-8.
    """

    pieces: tuple[bytes, ...]
    visible: tuple[bytes, ...]
    max_stripped_spaces: int
    utf8_errors: str

    def showing(self, token_ids: frozenset[int]) -> TokenPieces:
        """Returns a table in which these special tokens are visible."""
        if not token_ids:
            return self
        visible = list(self.visible)
        for token_id in token_ids:
            visible[token_id] = self.pieces[token_id]
        return replace(self, visible=tuple(visible))


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the ids that `decode(skip_special_tokens=True)` leaves out."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)
    return frozenset(tokenizer.all_special_ids)


def read_pieces(tokenizer: PreTrainedTokenizerBase) -> TokenPieces | None:
    """Returns the table of a tokenizer of one of the two families, else None."""
    if not _decodes_by_backend(tokenizer):
        return None
    steps = _decoder_steps(tokenizer)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        alphabet = _byte_level_alphabet()
        pieces = tuple(_byte_level_piece(token, alphabet) for token in _tokens(tokenizer))
        return _table(tokenizer, pieces, max_stripped_spaces=0, utf8_errors="replace")
    rules = _fallback_rules(steps)
    if rules is None:
        return None
    pieces = tuple(_fallback_piece(token, rules) for token in _tokens(tokenizer))
    return _table(tokenizer, pieces, rules.max_stripped_spaces, EACH_BYTE_REPLACED)


def _decodes_by_backend(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the decoder of `tokenizers` makes the whole text, with no code of a subclass on top."""
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer).decode is PreTrainedTokenizerFast.decode
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
    )


def _decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return []
    described = json.loads(decoder.__getstate__())
    return described["decoders"] if described["type"] == "Sequence" else [described]


def _tokens(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    """Returns the token of every id, added tokens included; None for a free id."""
    backend = tokenizer.backend_tokenizer
    num_ids = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return [backend.id_to_token(token_id) for token_id in range(num_ids)]


def _table(
    tokenizer: PreTrainedTokenizerBase, pieces: tuple[bytes, ...], max_stripped_spaces: int, utf8_errors: str
) -> TokenPieces:
    special = special_token_ids(tokenizer)
    visible = tuple(b"" if token_id in special else piece for token_id, piece in enumerate(pieces))
    return TokenPieces(pieces, visible, max_stripped_spaces, utf8_errors)


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level token stands for.

    GPT-2's table: printable Latin-1 bytes stand for themselves, the others are numbered from U+0100.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _byte_level_piece(token: str | None, alphabet: dict[str, int]) -> bytes:
    if token is None:
        return b""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        # An added token, which is not written in the alphabet and stands for its own characters.
        return token.encode()


@dataclass(frozen=True, slots=True)
class _FallbackRules:
    """A decoder with byte fallback: texts that are replaced in a token, and spaces stripped from the whole."""

    replacements: tuple[tuple[str, str], ...]
    max_stripped_spaces: int


def _fallback_rules(steps: list[dict[str, Any]]) -> _FallbackRules | None:
    """Parses `Replace* ByteFallback Fuse Strip?`, where Replace is literal and Strip takes leading spaces only."""
    kinds = [step["type"] for step in steps]
    if "ByteFallback" not in kinds:
        return None
    at = kinds.index("ByteFallback")
    if kinds[at + 1 :] not in (["Fuse"], ["Fuse", "Strip"]):
        return None
    if not all(step["type"] == "Replace" and "String" in step["pattern"] for step in steps[:at]):
        return None
    replacements = tuple((step["pattern"]["String"], step["content"]) for step in steps[:at])
    if kinds[-1] == "Fuse":
        return _FallbackRules(replacements, max_stripped_spaces=0)
    strip = steps[-1]
    if strip["content"] != " " or strip["stop"] != 0:
        return None
    return _FallbackRules(replacements, max_stripped_spaces=strip["start"])


def _fallback_piece(token: str | None, rules: _FallbackRules) -> bytes:
    if token is None:
        return b""
    for old, new in rules.replacements:
        token = token.replace(old, new)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.encode()
