"""Sampling parameters of a step in columns: kept by seat between steps, selected by row for each step.

It does no arithmetic of sampling. Only two things change from step to step: the output index, and the banned ids of a
sequence that has not reached its minimum number of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from inflight.executor.logits.grammar import Guide
from inflight.executor.logits.row import LogitsRow, mask_of
from inflight.executor.scheduler.sequence import NO_DRAFTS, NO_PROCESSORS, Sampling, StepPlan, accepted_ids
from inflight.executor.scheduler.sequence import Sequence as BoardedSequence
from inflight.executor.step.batch import StepBatch, YieldingRows
from inflight.executor.step.sampling import SampleRow

# The numbers of a row: the fields of `Sampling`, as in `SamplingNumbers` of native/sampler.h.
_WIDE = {"top_p": np.float64, "seed": np.uint64}
_NARROW = {"int": np.int32, "float": np.float32}
NUMBERS = np.dtype([(one.name, _WIDE.get(one.name, _NARROW[str(one.type)])) for one in fields(Sampling)], align=True)
_numbers_of = attrgetter(*(one.name for one in fields(Sampling)))

NO_IDS: frozenset[int] = frozenset()
NO_ROWS: Mapping[int, LogitsRow] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Columns of the R rows that sample, each contiguous, as the C++ sampler requires. `numbers` are of type `NUMBERS`.

    The banned ids of row i are `banned_ids[banned_starts[i]:banned_starts[i + 1]]`. `draws` says whether a row's
    temperature is not 0. `processed` are the rows whose logits are changed first, by row, and `has_masks` says whether
    one of them has a mask. `reporting` are the rows that report log probabilities, each with the number of likeliest
    tokens to report; the positions that score a prompt follow behind the R rows. Where `drafts` are verified from row i
    on, row i + 1 is sampled as if the first draft were output, and so on.
    """

    numbers: npt.NDArray[np.void]
    output_index: npt.NDArray[np.int64]
    banned_starts: npt.NDArray[np.int32]  # [R + 1]
    banned_ids: npt.NDArray[np.int32]
    draws: bool
    processed: Mapping[int, LogitsRow] = field(default_factory=lambda: NO_ROWS)
    has_masks: bool = False
    reporting: tuple[tuple[int, int], ...] = ()
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: NO_DRAFTS)

    @classmethod
    def of(cls, rows: Iterable[SampleRow]) -> SamplingBatch:
        rows = list(rows)
        numbers = np.array([_numbers_of(row.sampling) for row in rows], NUMBERS)
        banned_starts, banned_ids = _columns_of_ids([row.banned_ids for row in rows])
        processed = {i: row.processed for i, row in enumerate(rows) if row.processed is not None}
        return cls(
            numbers=numbers,
            output_index=np.array([row.output_index for row in rows], np.int64),
            banned_starts=banned_starts,
            banned_ids=banned_ids,
            draws=bool(numbers["temperature"].any()),
            processed=processed,
            has_masks=any(row.mask is not None for row in processed.values()),
        )

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.output_index)

    @property
    def excludes(self) -> bool:
        """Whether a request may exclude tokens from its row."""
        return len(self.processed) > 0 or len(self.banned_ids) > 0

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes its largest logit, and nothing is banned or changed."""
        return not self.draws and not self.excludes

    @property
    def takes_largest(self) -> bool:
        """Whether every row takes its largest logit, perhaps after changes, and none has a mask."""
        return not self.draws and not self.has_masks

    def rows(self) -> list[SampleRow]:
        """Returns the rows as objects."""
        if not self.num_rows:
            return []
        samplings = [Sampling(*row) for row in self.numbers.tolist()]
        banned = [frozenset(ids.tolist()) for ids in np.split(self.banned_ids, self.banned_starts[1:-1])]
        processed = [self.processed.get(i) for i in range(self.num_rows)]
        return [SampleRow(*row) for row in zip(samplings, self.output_index.tolist(), banned, processed, strict=True)]

    def constrained(self) -> list[LogitsRow]:
        """Returns the rows whose mask has to be computed before they are sampled."""
        return [row for row in self.processed.values() if row.guide is not None] if self.has_masks else []

    def append(self, sampled_ids: Sequence[int]) -> None:
        """Adds the sampled tokens to the rows that depend on them. The thread that runs the steps calls it."""
        for index, row in self.processed.items():
            if row.has_drafts:
                continue
            drafts = self.drafts.get(index, ())
            for token_id in accepted_ids(drafts, sampled_ids[index : index + 1 + len(drafts)]):
                row.append(token_id)


class SamplingColumns:
    """The sampling parameters of the sequences on seats."""

    def __init__(self, num_seats: int, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._numbers = np.zeros(num_seats, NUMBERS)
        self._prompt_length = np.zeros(num_seats, np.int64)
        self._has_mask = np.zeros(num_seats, np.bool_)
        # Rows of seats whose logits are changed; usually empty.
        self._processed: dict[int, LogitsRow] = {}
        # Seats whose sequence must not stop yet when it boards; usually empty.
        self._restrained: dict[int, BoardedSequence] = {}
        # Seats that report log probabilities, and how many of the likeliest tokens.
        self._reporting: dict[int, int] = {}

    def select(self, plan: StepPlan, batch: StepBatch) -> SamplingBatch:
        """Returns the columns of the rows that sample. Plans must come in the order in which they are made."""
        for sequence in plan.boarded:
            self._board(sequence, plan)
        yielding = YieldingRows.of(plan)
        seats = batch.table_rows.numpy()[yielding.rows]
        ends = batch.context_lengths.numpy()[yielding.rows] - yielding.num_behind
        output_index = ends - self._prompt_length[seats]
        numbers = self._numbers[seats]
        banned_starts, banned_ids = self._banned(seats, output_index)
        drafts = {int(np.searchsorted(yielding.rows, row)): ids for row, ids in plan.drafts.items()}
        processed = self._processed_rows(seats, drafts)
        return SamplingBatch(
            numbers=numbers,
            output_index=output_index,
            banned_starts=banned_starts,
            banned_ids=banned_ids,
            draws=bool(numbers["temperature"].any()),
            processed=processed,
            has_masks=bool(self._has_mask[seats].any()),
            reporting=self._reporting_rows(seats) + (_scoring_rows(plan, len(seats)) if plan.scored else ()),
            drafts=drafts,
        )

    def _board(self, sequence: BoardedSequence, plan: StepPlan) -> None:
        seat = sequence.seat_row
        self._numbers[seat] = _numbers_of(sequence.sampling)
        self._prompt_length[seat] = sequence.num_prompt_tokens
        self._processed.pop(seat, None)
        self._has_mask[seat] = sequence.constraint is not None or bool(sequence.processors.allowed_ids)
        if sequence.processors != NO_PROCESSORS or sequence.constraint is not None:
            self._processed[seat] = self._processed_row(sequence, plan)
        self._restrained.pop(seat, None)
        # The mask of a constrained sequence says when it may stop.
        is_restrained = sequence.stopping.min_tokens > 0 and sequence.constraint is None
        if is_restrained and sequence.stopping.stop_token_ids:
            self._restrained[seat] = sequence
        self._reporting.pop(seat, None)
        if sequence.num_top_logprobs is not None:
            self._reporting[seat] = sequence.num_top_logprobs

    def _processed_row(self, sequence: BoardedSequence, plan: StepPlan) -> LogitsRow:
        if sequence.num_in_flight > plan.sequences.count(sequence):
            # Its row would miss the tokens of the steps in flight.
            raise RuntimeError(f"{sequence.request_id} boards while steps of it are in flight")
        return LogitsRow(
            sequence.processors,
            sequence.token_ids,
            sequence.num_prompt_tokens,
            sequence.length_limit,
            self._vocabulary_size,
            self._guide(sequence),
        )

    def _guide(self, sequence: BoardedSequence) -> Guide | None:
        if sequence.constraint is None:
            return None
        allowed_ids = sequence.processors.allowed_ids
        allowed = mask_of(allowed_ids, self._vocabulary_size) if allowed_ids else None
        return Guide(sequence.constraint, sequence.stopping, allowed, self._vocabulary_size)

    def _processed_rows(
        self, seats: npt.NDArray[np.int32], drafts: Mapping[int, tuple[int, ...]]
    ) -> Mapping[int, LogitsRow]:
        if not self._processed:
            return NO_ROWS
        rows = ((row, self._processed.get(seat)) for row, seat in enumerate(seats.tolist()))
        processed = {row: state for row, state in rows if state is not None}
        for first, ids in drafts.items():
            if first in processed:
                processed.update(enumerate(processed[first].after(ids), start=first + 1))
        return processed

    def _reporting_rows(self, seats: npt.NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
        if not self._reporting:
            return ()
        rows = ((row, self._reporting.get(seat)) for row, seat in enumerate(seats.tolist()))
        return tuple((row, num_top) for row, num_top in rows if num_top is not None)

    def _banned(
        self, seats: npt.NDArray[np.int32], output_index: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        if not self._restrained:
            return np.zeros(len(seats) + 1, np.int32), np.zeros(0, np.int32)
        return _columns_of_ids(
            [self._banned_at(seat, index) for seat, index in zip(seats.tolist(), output_index.tolist(), strict=True)]
        )

    def _banned_at(self, seat: int, output_index: int) -> frozenset[int]:
        """Returns the stop token ids until the sequence has its minimum number of tokens, then nothing."""
        sequence = self._restrained.get(seat)
        if sequence is None:
            return NO_IDS
        if output_index < sequence.stopping.min_tokens:
            return sequence.stopping.stop_token_ids
        # A row may be sampled beyond drafts that are then not accepted.
        if sequence.num_output_tokens >= sequence.stopping.min_tokens:
            del self._restrained[seat]
        return NO_IDS


def _scoring_rows(plan: StepPlan, first: int) -> tuple[tuple[int, int], ...]:
    num_top = (one.sequence.num_prompt_logprobs or 0 for one in plan.scored for _ in range(one.start, one.end))
    return tuple(enumerate(num_top, start=first))


def _columns_of_ids(
    of_rows: Collection[Collection[int]],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns the start of each row's ids, and the ids."""
    starts = np.zeros(len(of_rows) + 1, np.int32)
    np.cumsum([len(ids) for ids in of_rows], out=starts[1:])
    return starts, np.array([token_id for ids in of_rows for token_id in sorted(ids)], np.int32)
