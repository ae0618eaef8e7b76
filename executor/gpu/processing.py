"""The logits stage on the GPU: rows whose logits are changed are drawn again from a changed copy.

A step first draws all of its rows from the model's logits, by a graph or without. Behind that, up to `ROWS` rows at a
time are copied as float32, changed, and drawn again, if any of them is changed. So graphs stay as they are, rows that
change nothing cost nothing, and the model's logits are left for the log probabilities, which are of them.

The host keeps which ids a row changes, each once, and sends them with every step: their number is bounded by the
context and the vocabulary, so a few buffers of fixed size suffice. A token that the previous step has sampled and the
host has not read is this step's input on the device, where the penalties count it. Only rows whose masks depend on
tokens, and drafts, must wait for the previous step (`PendingStep.allows_next`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.common.protocol import MAX_LOGIT_BIASES
from inflight.executor.gpu.sampling import CHUNK, DrawRows, draw
from inflight.executor.gpu.step_buffers import HostRing
from inflight.executor.gpu.step_layout import ALIGNMENT_WORDS, Words
from inflight.executor.kernels.processing import change_kernel, copy_kernel, name_excluded_kernel
from inflight.executor.logits.row import MASK_BITS, LogitsRow
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling_columns import SamplingBatch

# Rows that are changed at once: the float32 copies of this many rows are kept, however many seats there are.
ROWS = 32
# Entries that a program processes.
TILE = 256
UNREAD_TOKENS = "a step was launched before tokens were read that its rows depend on"
NO_PLACES: Mapping[int, int] = MappingProxyType({})


class ChangedIds:
    """The ids that a row changes by numbers, in columns. No id is there twice.

    `counts` is how often the id is in the output; 0 for one in the prompt only, -1 for one with a bias only. Ids that
    no penalty of the row concerns are left out.
    """

    def __init__(self, row: LogitsRow) -> None:
        self._num_followed = first = _first_penalised(row)
        num_bias = len(row.bias_ids)
        known = np.concatenate((row.bias_ids, row.ids[first : row.num_ids]))
        unique, places = np.unique(known, return_inverse=True)
        most = len(unique) + max(0, len(row.ids) - row.num_ids)
        self._ids, self._biases = np.zeros(most, np.int32), np.zeros(most, np.float32)
        self._counts = np.full(most, -1, np.int32)
        self._ids[: len(unique)] = unique
        self._biases[places[:num_bias]] = row.bias_values
        self._counts[places[num_bias:]] = 0
        np.add.at(self._counts, places[num_bias + max(0, row.num_prompt - first) :], 1)
        self._num_followed = max(first, row.num_ids)
        self._places = {token_id: place for place, token_id in enumerate(unique.tolist())}

    def follow(self, row: LogitsRow) -> None:
        """Adds the tokens that were appended to the row."""
        for token_id in row.ids[self._num_followed : row.num_ids].tolist():
            place = self._places.setdefault(token_id, len(self._places))
            self._ids[place] = token_id
            self._counts[place] = max(self._counts[place], 0) + 1
        self._num_followed = max(self._num_followed, row.num_ids)

    @property
    def columns(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Ids, biases and counts."""
        num_ids = len(self._places)
        return self._ids[:num_ids], self._biases[:num_ids], self._counts[:num_ids]


def needs_tokens(row: LogitsRow) -> bool:
    """Returns whether all tokens of a row must be known on the host before its next step."""
    some = row.processors
    return row.guide is not None or row.has_drafts or bool(some.bad_words) or some.no_repeat_ngram_size > 0


def unread_places(batch: StepBatch, sampling: SamplingBatch) -> Mapping[int, int]:
    """Returns for each row with penalties whose newest token is not read the token's place in `batch.token_ids`.

    Raises:
        RuntimeError: a row depends on a token that is neither read nor an input of this step.
    """
    places = {}
    for i, row in sampling.processed.items():
        num_unread = int(sampling.output_index[i]) - len(row.output)
        if num_unread > int(not needs_tokens(row)):
            raise RuntimeError(UNREAD_TOKENS)
        if num_unread > 0 and _first_penalised(row) < len(row.ids):
            places[i] = int(batch.logit_rows[i])
    return places


def _first_penalised(row: LogitsRow) -> int:
    """Returns the index of the row's first token that a penalty concerns."""
    processors = row.processors
    if processors.repetition_penalty != 1.0:
        return 0
    is_penalised = processors.frequency_penalty != 0.0 or processors.presence_penalty != 0.0
    return row.num_prompt if is_penalised else len(row.ids)


def row_mask(row: LogitsRow, vocabulary_size: int) -> npt.NDArray[np.int32] | None:
    """Returns the mask of the ids that are allowed and do not complete a bad word or an n-gram; None if all are."""
    banned = [*_ends_of_bad_words(row), *_ends_of_ngrams(row).tolist()]
    if not banned:
        return row.mask
    mask = np.full(-(-vocabulary_size // MASK_BITS), -1, np.int32) if row.mask is None else row.mask.copy()
    ids = np.array(banned, np.int32)
    np.bitwise_and.at(mask, ids // MASK_BITS, ~np.left_shift(np.int32(1), ids % MASK_BITS))
    return mask


def _ends_of_bad_words(row: LogitsRow) -> list[int]:
    words = row.processors.bad_words
    if not words:
        return []
    longest = max(len(word) for word in words)
    end = tuple(row.output[-longest:].tolist())
    return [word[-1] for word in words if end[len(end) - len(word) + 1 :] == word[:-1] and len(word) <= len(end) + 1]


def _ends_of_ngrams(row: LogitsRow) -> npt.NDArray[np.int32]:
    size, ids = row.processors.no_repeat_ngram_size, row.prompt_and_output
    if size == 0 or len(ids) < size:
        return ids[:0]
    starts = np.arange(len(ids) - size + 1)
    for offset in range(size - 1):
        starts = starts[ids[starts + offset] == ids[len(ids) - size + 1 + offset]]
    return ids[starts + size - 1]


def name_excluded(logits: Tensor, token_ids: Tensor) -> None:
    """Writes `ALL_EXCLUDED` to `token_ids[R]` in place of `NO_TOKEN` where the model's `logits[R, vocabulary]` have a
    usable number."""
    num_rows, vocabulary_size = logits.shape
    name_excluded_kernel[(num_rows,)](logits, token_ids, vocabulary_size, logits.stride(0), CHUNK=CHUNK)


@dataclass(slots=True)
class _Words:
    """The words of a copy, written and read in the same order, each field at a multiple of 16 bytes."""

    words: Words
    end: int = 0

    def add(self, *parts: npt.NDArray[np.int32] | npt.NDArray[np.float32]) -> slice:
        """Writes arrays one behind the other and returns their place."""
        first = self.end
        for part in parts:
            self.words[self.end : self.end + len(part)] = part.view(np.int32)
            self.end += len(part)
        field = slice(first, self.end)
        self.end += -self.end % ALIGNMENT_WORDS
        return field


class Processing:
    """Buffers of the stage on one device."""

    def __init__(self, device: torch.device, vocabulary_size: int, context_length: int, max_num_rows: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._num_mask_words = -(-vocabulary_size // MASK_BITS)
        num_rows = min(ROWS, max_num_rows)
        # A step that is launched before a stop token is read may sample one token more.
        most_entries = num_rows * min(vocabulary_size, context_length + 1 + MAX_LOGIT_BIASES)
        num_words = num_rows * (6 + self._num_mask_words) + 3 * most_entries + 17 * ALIGNMENT_WORDS
        self._ring = HostRing(num_words, device)
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._changed = torch.empty((num_rows, vocabulary_size), dtype=torch.float32, device=device)
        self._changed_ids: WeakKeyDictionary[LogitsRow, ChangedIds] = WeakKeyDictionary()

    def draw(
        self,
        logits: Tensor,
        rows: DrawRows,
        sampling: SamplingBatch,
        token_ids: Tensor,
        unread: Mapping[int, int] = NO_PLACES,
        input_ids: Tensor | None = None,
    ) -> None:
        """Draws the rows of `logits[:R]` that are changed, and those beside them again, into `token_ids[:R]`.

        The newest tokens of the rows in `unread` are at these places of `input_ids`, the step's inputs. The host waits
        only in a step of more than `2 * ROWS` such rows, until earlier ones are copied.
        """
        for first in range(0, sampling.num_rows, ROWS):
            last = min(first + ROWS, sampling.num_rows)
            processed = {i - first: row for i, row in sampling.processed.items() if first <= i < last}
            if processed:
                places = {i - first: place for i, place in unread.items() if first <= i < last}
                changed = self.changed(logits[first:last], processed, places, input_ids)
                draw(changed, rows.part(first, last), token_ids[first:last])

    def changed(
        self,
        logits: Tensor,
        processed: Mapping[int, LogitsRow],
        unread: Mapping[int, int] = NO_PLACES,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """Returns a float32 copy of at most `ROWS` rows, those in `processed` changed. It is overwritten next time."""
        num_rows, vocabulary_size = logits.shape
        changed = self._changed[:num_rows]
        words = _Words(self._ring.take())
        masks = {i: mask for i, row in processed.items() if (mask := row_mask(row, vocabulary_size)) is not None}
        columns = {i: self._columns(row) for i, row in processed.items()}
        mask_indices = np.full(num_rows, -1, np.int32)
        mask_indices[list(masks)] = np.arange(len(masks))
        lengths = [len(columns[i][0]) if i in columns else 0 for i in range(num_rows)]
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        places = np.array([unread.get(i, -1) for i in range(num_rows)], np.int32)
        penalties = np.ones((3, num_rows), np.float32)
        for i, row in processed.items():
            some = row.processors
            penalties[:, i] = some.repetition_penalty, some.frequency_penalty, some.presence_penalty
        ordered = [columns[i] for i in sorted(columns)]
        fields = [
            *(words.add(starts), words.add(mask_indices), words.add(*masks.values())),
            *(words.add(penalty) for penalty in penalties),
            *(words.add(*(column[kind] for column in ordered)) for kind in range(3)),
            words.add(places),
        ]
        self._ring.copy_to(self._words, words.end)
        on_device = [self._words[field] for field in fields]
        num_tiles = -(-max(lengths) // TILE)
        self._launch(logits, changed, on_device, num_tiles + 1 if num_tiles or unread else 0, input_ids)
        return changed

    def _columns(self, row: LogitsRow) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        changed = self._changed_ids.get(row)
        if changed is None:
            changed = self._changed_ids[row] = ChangedIds(row)
        changed.follow(row)
        return changed.columns

    def _launch(
        self, logits: Tensor, changed: Tensor, fields: list[Tensor], num_programs: int, input_ids: Tensor | None
    ) -> None:
        """Copies and changes rows. `fields` are starts, mask indices, masks, three penalties, ids, biases, counts and
        places of unread tokens."""
        starts, mask_indices, masks, *penalties, ids, biases, counts, places = fields
        num_rows, vocabulary_size = logits.shape
        copy_kernel[(num_rows, -(-vocabulary_size // CHUNK))](
            *(logits, changed, mask_indices, masks),
            *(vocabulary_size, logits.stride(0), self._num_mask_words),
            CHUNK=CHUNK,
        )
        if num_programs:
            change_kernel[(num_rows, num_programs)](
                *(changed, starts, ids, biases.view(torch.float32), counts),
                *(penalty.view(torch.float32) for penalty in penalties),
                *(places, ids if input_ids is None else input_ids, vocabulary_size),
                TILE=TILE,
                enable_fp_fusion=False,
            )
