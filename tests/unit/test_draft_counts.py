"""Counts of drafted tokens by position."""

from __future__ import annotations

from inflight.executor.speculation.counts import DraftCounts, DraftTally


def test_drafts_are_counted_by_position() -> None:
    tally = DraftTally()
    assert tally.counts == DraftCounts()
    assert tally.counts.num_drafts == 0

    tally.record(3, 1)
    tally.record(1, 1)
    tally.record(2, 0)
    tally.record(0, 0)

    counts = tally.counts
    assert counts == DraftCounts((3, 2, 1), (2, 0, 0))
    assert (counts.num_drafts, counts.num_verified, counts.num_accepted) == (3, 6, 2)
    assert tally.counts is counts
