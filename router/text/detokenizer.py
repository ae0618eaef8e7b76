"""Incremental detokenization of output tokens.

A detokenizer belongs to one choice and remembers only what is incomplete. Invariants: the texts of all calls together
are the text of all tokens, however the tokens were divided among calls; returned text never changes; the cost of a
token does not depend on how many came before. To continue earlier output, push that output first.

`PieceDetokenizer` works on the bytes of tokens and holds back the bytes of an incomplete character, at most three: a
U+FFFD that the model really produced passes at once. `WindowDetokenizer` serves tokenizers of which only `decode` is
known.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from router.text.pieces import REPLACEMENT, TokenPieces

# A character has at most four bytes. If some are missing, it shows as at most three U+FFFD. A fourth token in a row
# that still ends in U+FFFD shows that not all of them stand for an incomplete character.
MAX_INCOMPLETE_CHARACTERS = 3
MAX_HELD_TOKENS = 4
# Tokens of context that a tokenizer gets before the new one. Decoders look at their neighbours only.
MIN_WINDOW_TOKENS = 8
# At this size the window is cut even if the cut may show.
MAX_WINDOW_TOKENS = 64


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
