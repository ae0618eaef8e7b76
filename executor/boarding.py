"""Who boards a step, and what kept the next one from it."""

from __future__ import annotations

from executor.limits import Batching, SchedulerLimits
from executor.places import Places
from executor.room import Room
from executor.step_bounds import StepConstraint
from executor.step_draft import StepDraft
from executor.twins import Twins


class Boarding:
    """Seats who is in line: the preempted first, then the others by their turn. Only who waits for a twin is passed."""

    def __init__(self, limits: SchedulerLimits, places: Places, room: Room, twins: Twins) -> None:
        self._limits = limits
        self._is_static = limits.batching is Batching.STATIC
        self._places = places
        self._room = room
        self._twins = twins
        self._decodes_gave_way = False

    def decodes_give_way(self) -> bool:
        """Whether the first prompt gets this step instead of the decodes.

        Only without chunks, where a long prompt would otherwise wait until enough decodes have ended; and at most
        every other step, so that the decodes go on.
        """
        gave_way, self._decodes_gave_way = self._decodes_gave_way, False
        num_decodes = len(self._places.decodes)
        if self._limits.enable_chunked_context or gave_way or not num_decodes:
            return False
        first = next(iter(self._places.prefills), None)
        if first is not None:
            num_tokens_left = self._limits.max_num_tokens - num_decodes
            self._decodes_gave_way = first.num_tokens - first.num_computed > num_tokens_left
        return self._decodes_gave_way

    def board(self, draft: StepDraft) -> StepConstraint:
        """Seats who can board now.

        A static batch fills its seats at once, even if its prompts then take several steps. In flight, who would get
        no token now waits on: later it may find more of its prefix cached.
        """
        places = self._places
        if not (places.waiting or places.preempted):
            return draft.closed_by if draft.is_cut else self._unless_full(StepConstraint.NO_WORK)
        if self._is_static and (places.num_seated or places.leaving):
            return StepConstraint.STATIC_BATCH
        end = StepConstraint.NO_WORK
        for sequence in places.in_line():
            if places.num_seated >= self._limits.max_num_sequences:
                return StepConstraint.SEATS
            if draft.is_full and not self._is_static:
                return draft.closed_by
            if not self._is_static and self._twins.keep_waiting(sequence):
                end = StepConstraint.TWIN
                continue
            if not self._room.take(sequence, draft):
                return StepConstraint.BLOCKS
            places.seat(sequence)
            self._twins.begin(sequence)
            draft.board(sequence)
            draft.add_prefill(sequence)
        return draft.closed_by if draft.is_cut else self._unless_full(end)

    def _unless_full(self, constraint: StepConstraint) -> StepConstraint:
        """A full step is bound by seats though nothing waits here: what waits may be in the routers' queue."""
        return StepConstraint.SEATS if self._places.num_seated >= self._limits.max_num_sequences else constraint
