"""Where each sequence inside stands, and the rows of the seats. See the table in `executor.scheduler.scheduler`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from executor.scheduler.sequence import FinishReason, Sequence

# Few wait here, routers hold the rest: so the more important pass those. More would let them starve.
MAX_PASSED_BY = 32


def turn(sequence: Sequence) -> int:
    """Who has the smaller one boards first: in order of arrival, but ahead of less important ones that came up to
    MAX_PASSED_BY arrivals earlier for each step of priority between them."""
    return sequence.arrival - MAX_PASSED_BY * sequence.priority


class SequenceQueues:
    """The dictionaries keep the order in which sequences came to a place."""

    def __init__(self, num_seat_rows: int) -> None:
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.preempted: dict[Sequence, None] = {}
        self.prefills: dict[Sequence, None] = {}
        self.decodes: dict[Sequence, None] = {}
        self.ending: dict[Sequence, None] = {}
        # Who gives up its seat, with the place that it would go on in.
        self.pausing: dict[Sequence, dict[Sequence, None]] = {}
        # The reason of an end that is still to be handed out; None where it has been.
        self.leaving: dict[Sequence, FinishReason | None] = {}
        self._num_seat_rows = num_seat_rows
        self._free_seats = list(range(num_seat_rows))[::-1]

    @property
    def num_seated(self) -> int:
        """Seats that nobody else can have."""
        return len(self.decodes) + len(self.prefills)

    @property
    def num_boarded(self) -> int:
        """Who has boarded and stays."""
        return self.num_seated + len(self.ending) + len(self.pausing)

    @property
    def is_empty(self) -> bool:
        """Whether nobody is anywhere."""
        return not (self.waiting or self.preempted or self.num_boarded or self.leaving)

    def boarded(self) -> Iterator[Sequence]:
        """Who has boarded and stays."""
        return chain(self.decodes, self.prefills, self.ending, self.pausing)

    def in_line(self) -> list[Sequence]:
        """Who may board: the preempted ahead of the others, of them the more important and then the earlier first."""
        new = sorted(self.waiting, key=turn)
        if not self.preempted:
            return new
        back = sorted(self.preempted, key=lambda sequence: (-sequence.priority, sequence.arrival))
        return [*back, *new]

    def seat(self, sequence: Sequence) -> None:
        """Lets a sequence board."""
        self.waiting.pop(sequence, None)
        self.preempted.pop(sequence, None)
        self.prefills[sequence] = None
        sequence.seat = self._free_seats.pop()

    def pause(self, sequence: Sequence) -> None:
        """From now on it is in no step; see `resume` and `preempt`."""
        place = self.decodes if sequence in self.decodes else self.prefills
        del place[sequence]
        self.pausing[sequence] = place

    def resume(self, sequence: Sequence) -> None:
        """It goes on as if nothing had been."""
        self.pausing.pop(sequence)[sequence] = None

    def preempt(self, sequence: Sequence) -> None:
        """It loses its seat and waits to board again."""
        del self.pausing[sequence]
        self.free_seat(sequence)
        self.preempted[sequence] = None

    def leave(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Whoever it is, wherever it is."""
        assert sequence not in self.leaving, f"{sequence.request_id} leaves twice"
        for place in (self.decodes, self.prefills, self.ending, self.waiting, self.preempted, self.pausing):
            if sequence in place:
                del place[sequence]
                break
        self.leaving[sequence] = reason

    def free_seat(self, sequence: Sequence) -> None:
        """Gives the row of its seat back, if it has one."""
        if sequence.seat is not None:
            self._free_seats.append(sequence.seat)
            sequence.seat = None

    def check(self) -> None:
        """Asserts that each row is free or of one sequence."""
        seats = [sequence.seat for sequence in chain(self.boarded(), self.leaving) if sequence.seat is not None]
        assert sorted([*seats, *self._free_seats]) == list(range(self._num_seat_rows)), f"seats: {seats}"
