"""What changes the logits of one sequence before a token is chosen: its parameters, its token ids and its mask.

A row is a function of token ids and parameters only. It is built from the sequence's ids when the sequence boards, and
the thread that runs the device's steps appends each token that it samples. So it is the same alone, in a batch, after a
preemption and on another executor, and the next step can be launched before the host has read a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from inflight.executor.scheduler.sequence import Processors

if TYPE_CHECKING:
    from inflight.executor.logits.grammar import Guide

# Ids that a word of a mask covers: bit `id % 32` of word `id // 32`, as llguidance fills them.
MASK_BITS = 32


class LogitsRow:
    """The state of one sequence on a seat.

    `ids[:num_ids]` int32 are prompt and output, of which `num_prompt` are the prompt. `bias_ids` int32 and
    `bias_values` float32 are in the order of the ids. Bad word i is `bad_ids[bad_starts[i]:bad_starts[i + 1]]`, int32.
    `mask` int32 has a bit for every id of the vocabulary, set if the id is allowed; None allows all. `native` is the
    row as C++ code reads it, which makes it.
    """

    # Every step reads a few fields of every row, after its weights have displaced them from the caches.
    __slots__ = (
        *("num_ids", "mask", "native", "ids", "guide", "has_drafts", "_most_tokens", "processors", "num_prompt"),
        *("bias_ids", "bias_values", "bad_starts", "bad_ids", "__weakref__"),
    )

    def __init__(
        self,
        processors: Processors,
        token_ids: Sequence[int],
        num_prompt: int,
        most_tokens: int,
        vocabulary_size: int,
        guide: Guide | None = None,
    ) -> None:
        self.processors = processors
        self.num_prompt = num_prompt
        self.num_ids = len(token_ids)
        # A step that is launched before a stop token is read may sample one token more.
        self.ids = np.zeros(max(most_tokens, len(token_ids)) + 1, np.int32)
        self.ids[: len(token_ids)] = token_ids
        bias = sorted(processors.bias)
        self.bias_ids = np.array([token_id for token_id, _ in bias], np.int32)
        self.bias_values = np.array([value for _, value in bias], np.float32)
        self.bad_starts = np.zeros(len(processors.bad_words) + 1, np.int32)
        np.cumsum([len(word) for word in processors.bad_words], out=self.bad_starts[1:])
        self.bad_ids = np.array([token_id for word in processors.bad_words for token_id in word], np.int32)
        self.mask = mask_of(processors.allowed_ids, vocabulary_size) if processors.allowed_ids else None
        self.native: Any = None
        self._most_tokens = most_tokens
        # Whether the newest of its ids are drafts, which it has only for one step.
        self.has_drafts = False
        # The position in the grammar of a constrained row. Until a mask is computed, it allows nothing.
        self.guide = guide
        if guide is not None:
            self.mask = np.zeros(-(-vocabulary_size // MASK_BITS), np.int32)

    def after(self, drafts: Sequence[int]) -> list[LogitsRow]:
        """Returns this row after one of the drafts, after two, and so on. They share its arrays, in which the drafts
        are stored behind its own ids; each has a mask of its own where a grammar gives it. No step of the sequence may
        be in flight."""
        self.ids[self.num_ids : self.num_ids + len(drafts)] = drafts
        rows = [copy(self) for _ in drafts]
        guide = self.guide
        for number, row in enumerate(rows, 1):
            row.num_ids, row.has_drafts, row.native = self.num_ids + number, True, None
            if guide is not None:
                assert self.mask is not None
                guide = row.guide = guide.behind()
                row.mask = np.zeros_like(self.mask)
        return rows

    def append(self, token_id: int) -> None:
        """Adds a sampled token. One that is not a token of the vocabulary, or beyond the sequence's end, is ignored:
        the sequence has ended, and its row's next token is discarded."""
        if token_id >= 0 and self.num_ids < len(self.ids):
            self.ids[self.num_ids] = token_id
            self.num_ids += 1
            if self.guide is not None and self.num_ids == self._most_tokens:
                # No mask follows the last token, so its state would stay unknown.
                self.guide.follow(self.output)

    @property
    def prompt_and_output(self) -> npt.NDArray[np.int32]:
        """All token ids."""
        return self.ids[: self.num_ids]

    @property
    def output(self) -> npt.NDArray[np.int32]:
        """The output's token ids."""
        return self.ids[self.num_prompt : self.num_ids]


def mask_of(allowed_ids: Collection[int], vocabulary_size: int) -> npt.NDArray[np.int32]:
    """Returns the mask that allows these ids."""
    is_allowed = np.zeros(-(-vocabulary_size // MASK_BITS) * MASK_BITS, np.uint8)
    is_allowed[list(allowed_ids)] = 1
    return np.packbits(is_allowed, bitorder="little").view("<i4").astype(np.int32, copy=False)


def bits_of(mask: npt.NDArray[np.int32], vocabulary_size: int) -> npt.NDArray[np.bool_]:
    """Returns whether each id of the vocabulary is allowed."""
    bits = np.unpackbits(mask.astype("<i4", copy=False).view(np.uint8), bitorder="little")
    return bits[:vocabulary_size].astype(np.bool_)
