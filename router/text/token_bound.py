"""A lower bound on the tokens of a text, known from its bytes without tokenizing it. Pure.

If every token stands for a run of the text's bytes, a token that covers a byte is at most as long as the longest token
with that byte. A byte therefore counts for at least the inverse of that length, and the sum over all bytes is at most
the number of tokens: 4 MB of digits are 4 million tokens of SmolLM2, which has no token of two digits.

Tokenizers whose tokens need not cover the text have no such bound: 0. Examples are an unknown word of any length as one
token, dropped spaces, and a normalizer that rewrites characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from inflight.router.text.detokenizer import TokenPieces

# For text that is not pure ASCII these may rewrite characters.
_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
# These split a text, or put a mark before it, and drop nothing.
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
_SPACES = b" \t\n\v\f\r\x1c\x1d\x1e\x1f"


@dataclass(frozen=True, slots=True)
class TokenBound:
    """`shares` are the least parts of a token that each byte value counts for. `ascii_only`: the bound holds for ASCII
    text only."""

    shares: NDArray[np.float64]
    ascii_only: bool

    def least_tokens(self, text: str) -> int:
        """Returns the bound. Takes some milliseconds for a megabyte."""
        if self.ascii_only and not text.isascii():
            return 0
        counts = np.bincount(np.frombuffer(text.encode(), dtype=np.uint8), minlength=256)
        # Rounding of a sum of millions of terms is far smaller than this.
        return max(0, int(counts @ self.shares - 1e-3))


def read_bound(tokenizer: PreTrainedTokenizerBase, pieces: TokenPieces | None) -> TokenBound | None:
    """Returns the bound of a tokenizer whose `pieces` are known; None if it has none."""
    if pieces is None or not _encodes_by_backend(tokenizer):
        return None
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizers = _steps(described["normalizer"], "normalizers")
    kinds = {step["type"] for step in normalizers}
    if not all(_keeps(step) for step in _steps(described["pre_tokenizer"], "pretokenizers")):
        return None
    if not all(step["type"] in _UNICODE_FORMS or _marks_spaces(step) for step in normalizers):
        return None
    single = {piece[0] for piece in pieces.pieces if len(piece) == 1}
    if described["model"]["type"] != "BPE" or (described["model"].get("unk_token") and len(single) < 256):
        return None
    added = described["added_tokens"]
    shares = _shares([*pieces.pieces, *(token["content"].encode() for token in added)], single)
    if any(token["lstrip"] or token["rstrip"] for token in added):  # these take any number of spaces around them
        shares[list(_SPACES)] = 0
        shares[128:] = 0
    return TokenBound(shares, ascii_only=not kinds.isdisjoint(_UNICODE_FORMS))


def _encodes_by_backend(tokenizer: PreTrainedTokenizerBase) -> bool:
    own = type(tokenizer)
    return isinstance(tokenizer, PreTrainedTokenizerFast) and own._encode_plus is PreTrainedTokenizerFast._encode_plus


def _steps(described: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer, sequences resolved."""
    if described is None:
        return []
    if described["type"] != "Sequence":
        return [described]
    return [step for inner in described[name] for step in _steps(inner, name)]


def _keeps(step: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer drops nothing of the text."""
    return step["type"] in _KEEPING or (step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed")


def _marks_spaces(step: dict[str, Any]) -> bool:
    """Returns whether a normalizer only puts sentencepiece's mark before the text or in place of spaces, as in
    pieces."""
    if step["type"] == "Prepend":
        return True
    is_replace = step["type"] == "Replace"
    return is_replace and (step["pattern"].get("String"), step["content"]) == (" ", "▁")


def _shares(pieces: Iterable[bytes], single: set[int]) -> NDArray[np.float64]:
    """Returns the shares. A byte without a token of its own may be left out of the text, so it counts for nothing."""
    longest = np.zeros(256)
    for piece in pieces:
        for byte in set(piece):
            longest[byte] = max(longest[byte], len(piece))
    shares = np.zeros(256)
    for byte in single:
        shares[byte] = 1 / longest[byte]
    return shares
