"""Seat numbers of the sequences, for monitoring. Pure; computed on demand, and the scheduler does not depend on it.

The scheduler counts seats and does not number them, and its arrays have twice as many rows. Here each sequence on a
seat has a seat number, from when it was first asked for until it leaves. A sequence whose last token is in flight, or
that is pausing, loses its number when another one needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import chain

from inflight.executor.scheduler.queues import SequenceQueues
from inflight.executor.scheduler.sequence import Sequence


class SequencePhase(Enum):
    STANDBY = "standby"
    PREPARING = "preparing"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """Position and size of one sequence. `computed_tokens` includes the steps in flight."""

    request_id: str
    phase: SequencePhase
    seat: int | None
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    num_blocks: int
    reserved_blocks: int


class Seating:
    """Numbers the seats that are taken."""

    def __init__(self, queues: SequenceQueues, num_seats: int) -> None:
        self._queues = queues
        self._num_seats = num_seats
        self._seat_of: dict[Sequence, int] = {}

    def snapshot(self) -> tuple[SequenceSnapshot, ...]:
        """Returns all sequences that have not ended: first by seat, then those without one, the preempted first."""
        self._number()
        seat_of = self._seat_of
        seated = sorted(seat_of, key=seat_of.__getitem__)
        boarded = [sequence for sequence in self._queues.boarded() if sequence not in seat_of]
        others = chain(boarded, self._queues.preempted, self._queues.waiting, self._queues.preparing)
        return tuple(self._snapshot_of(sequence) for sequence in chain(seated, others))

    def waiting_phase(self, sequence: Sequence) -> SequencePhase | None:
        """Returns the phase of a sequence without a seat, None of one that has a seat."""
        if sequence in self._queues.waiting:
            return SequencePhase.STANDBY
        if sequence in self._queues.preparing:
            return SequencePhase.PREPARING
        return SequencePhase.PREEMPTED if sequence in self._queues.preempted else None

    def _number(self) -> None:
        """Updates the numbers. A sequence keeps its number; one that needs a number gets the lowest free one."""
        queues = self._queues
        staying = dict.fromkeys(chain(queues.decodes, queues.prefills))
        yielding = dict.fromkeys(chain(queues.ending, queues.pausing))
        self._seat_of = {s: seat for s, seat in self._seat_of.items() if s in staying or s in yielding}
        newcomers = [sequence for sequence in staying if sequence not in self._seat_of]
        giving_up = [sequence for sequence in self._seat_of if sequence in yielding]
        for sequence in giving_up[: max(0, len(newcomers) - len(self._free_seats()))]:
            del self._seat_of[sequence]
        others = (sequence for sequence in yielding if sequence not in self._seat_of)
        # A sequence that resumed from pausing may find its number taken.
        self._seat_of.update(zip(chain(newcomers, others), self._free_seats(), strict=False))

    def _free_seats(self) -> list[int]:
        return sorted(set(range(self._num_seats)).difference(self._seat_of.values()))

    def _phase(self, sequence: Sequence) -> SequencePhase:
        waiting = self.waiting_phase(sequence)
        if waiting is not None:
            return waiting
        queues = self._queues
        is_prefill = sequence in queues.prefills or queues.pausing.get(sequence) is queues.prefills
        return SequencePhase.PREFILL if is_prefill else SequencePhase.DECODE

    def _snapshot_of(self, sequence: Sequence) -> SequenceSnapshot:
        return SequenceSnapshot(
            sequence.request_id,
            self._phase(sequence),
            self._seat_of.get(sequence),
            sequence.num_prompt_tokens,
            sequence.num_computed,
            sequence.num_output_tokens,
            len(sequence.block_table),
            sequence.num_reserved_blocks,
        )
