"""Layout of a step's input as one run of 32-bit words, for a single copy to the device. Pure.

With T tokens, S sequences, R rows that sample and Q positions that score a prompt, each field starts at a multiple of
16 bytes:

    token_ids, positions, slot_mapping, window_slots [T]
    adapter_rows [16 N] and adapter_slots [N], the N tiles of rows by adapter; none without adapter slots
    query_starts [S + 1], context_lengths, table_rows, is_carried, carried_from [S]
    state_rows [S, N], the N words of each sequence's recurrent state; none without recurrent layers
    logit_rows [R + Q]
    reported_rows [R + Q], of which the first are those that report log probabilities
    target_ids [Q], the tokens behind the positions that score
    the numbers of `Sampling`, floats as float32: temperatures, top_ks, top_ps, seeds_low, seeds_high, min_p_logs [R]
    output_indices [R]
    banned_starts [R + 1]
    banned_ids [320 R], of row i: [banned_starts[i], banned_starts[i + 1])

Of the last field only the used part is copied.

A step may have a layout for more tokens and sequences than it has. Padding tokens are 0 at position 0 and write their
KV to the spare block 0. In a layout of decodes each is a row that attends to itself, since its table row contains only
the spare block, and that samples greedily. In any other layout padding tokens belong to no sequence, padding sequences
have no tokens, and there are no padding rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from inflight.common.protocol import MAX_STOP_TOKEN_IDS
from inflight.executor.gpu.row_groups import TILE_ROWS, group_rows, num_tiles
from inflight.executor.step.batch import NO_SLOT, StepBatch
from inflight.executor.step.sampling import min_p_logs
from inflight.executor.step.sampling_columns import NUMBERS, SamplingBatch

Words = npt.NDArray[np.int32]

# Fields of the numbers of the rows that sample. A seed has two fields, and of min_p the logarithm is sent.
_FIELDS_OF = {"seed": ("seeds_low", "seeds_high"), "min_p": ("min_p_logs",)}
NUMBER_FIELDS = {name: _FIELDS_OF.get(name, (f"{name}s",)) for name in NUMBERS.names or ()}
FLOAT_FIELDS = tuple(names[0] for name, names in NUMBER_FIELDS.items() if NUMBERS[name].kind == "f")

# Most banned ids of a row: the stop ids of a request, and the end-of-sequence ids of the model.
MAX_BANNED = MAX_STOP_TOKEN_IDS + 64
ALIGNMENT_WORDS = 4


@dataclass(frozen=True)
class StepLayout:
    """Offsets of the fields of a step. Equal sizes give an equal layout."""

    num_tokens: int
    num_sequences: int
    num_logits: int
    num_scored: int = 0
    num_adapters: int = 0
    is_padded: bool = False
    num_state_words: int = 0

    @classmethod
    def of_decodes(cls, num_rows: int, num_adapters: int = 0) -> StepLayout:
        """Returns the layout of a step in which every row computes one token and samples."""
        return cls(num_rows, num_rows, num_rows, num_adapters=num_adapters)

    @cached_property
    def fields(self) -> dict[str, slice]:
        """The words of each field."""
        tokens, sequences, logits = self.num_tokens, self.num_sequences, self.num_logits
        tiles = num_tiles(tokens, self.num_adapters) if self.num_adapters else 0
        sizes = (
            *((name, tokens) for name in ("token_ids", "positions", "slot_mapping", "window_slots")),
            ("adapter_rows", tiles * TILE_ROWS),
            ("adapter_slots", tiles),
            ("query_starts", sequences + 1),
            *((name, sequences) for name in ("context_lengths", "table_rows", "is_carried", "carried_from")),
            ("state_rows", sequences * self.num_state_words),
            *((name, logits + self.num_scored) for name in ("logit_rows", "reported_rows")),
            ("target_ids", self.num_scored),
            *((name, logits) for names in NUMBER_FIELDS.values() for name in names),
            ("output_indices", logits),
            ("banned_starts", logits + 1),
            ("banned_ids", logits * MAX_BANNED),
        )
        fields, start = {}, 0
        for name, size in sizes:
            fields[name] = slice(start, start + size)
            start += _aligned(size)
        return fields

    @cached_property
    def num_words(self) -> int:
        """Words in all."""
        end: int = self.fields["banned_ids"].stop
        return _aligned(end)

    def fill(self, words: Words, batch: StepBatch, sampling: SamplingBatch, spare_table_row: int) -> int:
        """Writes a step of at most these sizes; without `is_padded`, only a step of decodes may be smaller. Returns how
        many words are used; the words behind them are not read."""
        views = {name: words[field] for name, field in self.fields.items()}
        _fill_tokens(views, batch)
        group_rows(batch, views["adapter_rows"], views["adapter_slots"])
        _fill_sequences(views, batch, spare_table_row, 0 if self.is_padded else 1)
        num_rows = len(batch.logit_rows)
        views["logit_rows"][:num_rows] = batch.logit_rows.numpy()
        views["logit_rows"][num_rows:] = np.arange(num_rows, len(views["logit_rows"]))
        views["target_ids"][:] = batch.target_ids.numpy()
        _fill_sampling(views, sampling)
        return _aligned(self.fields["banned_ids"].start + len(sampling.banned_ids))


def _aligned(num_words: int) -> int:
    return -(-num_words // ALIGNMENT_WORDS) * ALIGNMENT_WORDS


def _fill_tokens(views: dict[str, Words], batch: StepBatch) -> None:
    for name in ("token_ids", "positions", "slot_mapping"):
        views[name][: batch.num_tokens] = getattr(batch, name).numpy()
        views[name][batch.num_tokens :] = 0
    # Read only if layers with a sliding window have a pool of their own.
    if batch.window_slots is not None:
        views["window_slots"][: batch.num_tokens] = batch.window_slots.numpy()
        views["window_slots"][batch.num_tokens :] = 0
    else:
        views["window_slots"][:] = views["slot_mapping"]


def _fill_sequences(views: dict[str, Words], batch: StepBatch, spare_table_row: int, padding_tokens: int) -> None:
    """Each padding sequence has `padding_tokens`."""
    num_sequences, starts = batch.num_sequences, views["query_starts"]
    starts[: num_sequences + 1] = batch.query_starts.numpy()
    starts[num_sequences + 1 :] = batch.num_tokens + padding_tokens * np.arange(1, len(starts) - num_sequences)
    for name, padding in (("context_lengths", 1), ("table_rows", spare_table_row)):
        views[name][:num_sequences] = getattr(batch, name).numpy()
        views[name][num_sequences:] = padding
    carried = batch.carried_rows.numpy()
    views["is_carried"][:] = 0
    views["is_carried"][carried] = 1
    views["carried_from"][carried] = batch.carried_from.numpy()
    if batch.state_rows is not None:
        rows = views["state_rows"].reshape(-1, batch.state_rows.shape[1])
        rows[:num_sequences] = batch.state_rows.numpy()
        # Padding sequences have no slot, and no checkpoints.
        rows[num_sequences:] = (NO_SLOT, *[0] * (rows.shape[1] - 1))


def _fill_sampling(views: dict[str, Words], sampling: SamplingBatch) -> None:
    num_rows = sampling.num_rows
    for name, (field, *_) in NUMBER_FIELDS.items():
        if name not in _FIELDS_OF:
            view = views[field].view(np.float32) if field in FLOAT_FIELDS else views[field]
            view[:num_rows] = sampling.numbers[name]
    views["temperatures"][num_rows:] = 0
    min_p, seeds = sampling.numbers["min_p"], np.ascontiguousarray(sampling.numbers["seed"])
    views["min_p_logs"].view(np.float32)[:num_rows] = min_p_logs(min_p) if min_p.any() else -np.inf
    seeds = seeds.view(np.uint32).reshape(-1, 2).view(np.int32)  # little-endian: the low word comes first
    views["seeds_low"][:num_rows], views["seeds_high"][:num_rows] = seeds[:, 0], seeds[:, 1]
    views["output_indices"][:num_rows] = sampling.output_index
    views["reported_rows"][: len(sampling.reporting)] = [row for row, _ in sampling.reporting]
    num_banned = len(sampling.banned_ids)
    views["banned_starts"][: num_rows + 1] = sampling.banned_starts
    views["banned_starts"][num_rows + 1 :] = num_banned
    views["banned_ids"][:num_banned] = sampling.banned_ids
