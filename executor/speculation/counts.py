"""Counts of drafted tokens since the start, by position in the draft. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafted tokens that were verified, and those of them that were accepted, by position; both as long as the longest
    draft so far."""

    verified: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def num_drafts(self) -> int:
        """Drafts of which at least one token was verified."""
        return self.verified[0] if self.verified else 0

    @property
    def num_verified(self) -> int:
        """Drafted tokens that were verified."""
        return sum(self.verified)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(self.accepted)


NO_DRAFT_COUNTS = DraftCounts()


class DraftTally:
    """Counts the drafts that steps verified. One thread records; any may read `counts`."""

    def __init__(self) -> None:
        self._verified: list[int] = []
        self._accepted: list[int] = []
        self._counts: DraftCounts | None = NO_DRAFT_COUNTS

    @property
    def counts(self) -> DraftCounts:
        """The counts up to now; the same object until something is recorded."""
        if self._counts is None:
            self._counts = DraftCounts(tuple(self._verified), tuple(self._accepted))
        return self._counts

    def record(self, verified: int, accepted: int) -> None:
        """Adds a draft of which `verified` tokens were verified and the first `accepted` were right."""
        assert 0 <= accepted <= verified
        missing = [0] * (verified - len(self._verified))
        self._verified += missing
        self._accepted += missing
        for position in range(verified):
            self._verified[position] += 1
            self._accepted[position] += position < accepted
        self._counts = None
