"""Queues of the accepted sequences, and the rows of the seats. See the table in `executor.scheduler.scheduler`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from executor.scheduler.sequence import FinishReason, Sequence

# Few sequences wait here, since routers hold the rest, so the more important ones pass these. A larger number would let
# the others starve.
MAX_PASSED_BY = 32


def turn(sequence: Sequence) -> int:
    """Returns the boarding key; the smallest boards first. Sequences board in order of arrival, but ahead of less
    important ones that arrived up to MAX_PASSED_BY arrivals earlier per step of priority between them."""
    return sequence.arrival - MAX_PASSED_BY * sequence.priority


class SequenceQueues:
    """One dictionary per state. Each keeps the order in which sequences entered the state."""

    def __init__(self, num_seat_rows: int) -> None:
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        # Accepted sequences whose grammar is not compiled.
        self.preparing: dict[Sequence, None] = {}
        self.preempted: dict[Sequence, None] = {}
        self.prefills: dict[Sequence, None] = {}
        self.decodes: dict[Sequence, None] = {}
        self.ending: dict[Sequence, None] = {}
        # Sequences that are to give up their seat, with the queue that they would resume in.
        self.pausing: dict[Sequence, dict[Sequence, None]] = {}
        # The reason of an end that is still to be returned; None where it has been.
        self.leaving: dict[Sequence, FinishReason | None] = {}
        self._num_seat_rows = num_seat_rows
        self._free_seats = list(range(num_seat_rows))[::-1]

    @property
    def num_seated(self) -> int:
        """Seats that are taken."""
        return len(self.decodes) + len(self.prefills)

    @property
    def num_boarded(self) -> int:
        """Sequences that have boarded and not ended."""
        return self.num_seated + len(self.ending) + len(self.pausing)

    @property
    def is_empty(self) -> bool:
        """Whether all queues are empty."""
        return not (self.preparing or self.can_run)

    @property
    def can_run(self) -> bool:
        """Whether any sequence is on a seat, may board or is leaving. One that is being prepared needs a command."""
        return bool(self.waiting or self.preempted or self.num_boarded or self.leaving)

    def boarded(self) -> Iterator[Sequence]:
        """Returns the sequences that have boarded and not ended."""
        return chain(self.decodes, self.prefills, self.ending, self.pausing)

    def boarding_order(self) -> list[Sequence]:
        """Returns the sequences that may board, in boarding order: the preempted ones by priority and arrival, then the
        others by `turn`."""
        new = sorted(self.waiting, key=turn)
        if not self.preempted:
            return new
        back = sorted(self.preempted, key=lambda sequence: (-sequence.priority, sequence.arrival))
        return [*back, *new]

    def seat(self, sequence: Sequence) -> None:
        self.waiting.pop(sequence, None)
        self.preempted.pop(sequence, None)
        self.prefills[sequence] = None
        sequence.seat = self._free_seats.pop()

    def pause(self, sequence: Sequence) -> None:
        """Excludes the sequence from further steps until `resume` or `preempt`."""
        place = self.decodes if sequence in self.decodes else self.prefills
        del place[sequence]
        self.pausing[sequence] = place

    def resume(self, sequence: Sequence) -> None:
        """Puts a paused sequence back into the queue that it was in."""
        self.pausing.pop(sequence)[sequence] = None

    def preempt(self, sequence: Sequence) -> None:
        """Takes the seat of a paused sequence, which waits to board again."""
        del self.pausing[sequence]
        self.free_seat(sequence)
        self.preempted[sequence] = None

    def leave(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Moves the sequence from its queue to `leaving`."""
        assert sequence not in self.leaving, f"{sequence.request_id} leaves twice"
        queues = (self.decodes, self.prefills, self.ending, self.waiting, self.preparing, self.preempted, self.pausing)
        for place in queues:
            if sequence in place:
                del place[sequence]
                break
        self.leaving[sequence] = reason

    def free_seat(self, sequence: Sequence) -> None:
        """Frees the sequence's seat row, if it has one."""
        if sequence.seat is not None:
            self._free_seats.append(sequence.seat)
            sequence.seat = None

    def check(self) -> None:
        """Asserts that each row is free or belongs to one sequence."""
        seats = [sequence.seat for sequence in chain(self.boarded(), self.leaving) if sequence.seat is not None]
        assert sorted([*seats, *self._free_seats]) == list(range(self._num_seat_rows)), f"seats: {seats}"
