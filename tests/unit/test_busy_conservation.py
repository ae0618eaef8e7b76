"""The comparison of what executors were busy with what the ledger has booked: it sees what is missing, what was counted
twice, and what an end of a process excuses."""

from __future__ import annotations

import pytest

from inflight.bench.fleet.usage import UNREPORTED_S, Booked, Costs, Life, Look, costs_of

S = 1_000_000_000
# A second of the time of day, in milliseconds, at which `time.monotonic` was 0.
ZERO_MS = 5_000_000.0


def life(name: str = "x", started_s: float = 10.0, ended_s: float | None = None, busy: float = 0.5) -> Life:
    """A start that was busy for a share of its time and was looked at once a second."""
    until_s = 20.0 if ended_s is None else ended_s
    looks = [Look(started_s + at, round(at * busy * S)) for at in range(int(until_s - started_s) + 1)]
    return Life(name, started_s, looks, ended_s)


def compared(lives: list[Life], counted: list[int], lost_s: float | None = None, more_ns: int = 0) -> Costs:
    """The ledger has counted so much of each start, and its lines have `more_ns` beyond that."""
    by_source = {
        (one.name, round(ZERO_MS + one.started_s * 1000) + 400): used
        for one, used in zip(lives, counted, strict=True)
        if used
    }
    return costs_of(lives, Booked(sum(counted) + more_ns, 0, by_source), lost_s, ZERO_MS)


def test_executor_that_runs_is_counted_to_the_nanosecond() -> None:
    costs = compared([life(), life("y")], [5 * S, 5 * S])
    assert costs.problems == ()
    assert costs.busy_ns == costs.tenants_ns == 10 * S
    assert len(compared([life(), life("y")], [5 * S, 5 * S - 1]).problems) == 1
    assert len(compared([life(), life("y")], [5 * S, 5 * S + 1]).problems) == 1


def test_lines_that_do_not_sum_to_what_was_counted_are_a_problem() -> None:
    (problem,) = compared([life()], [5 * S], more_ns=-1).problems
    assert "sum to" in problem


@pytest.mark.parametrize(("late_s", "is_right"), [(0, True), (2, True), (UNREPORTED_S + 1, False)])
def test_executor_that_ended_may_lack_what_it_had_no_time_to_report(late_s: float, is_right: bool) -> None:
    counted = round((8 - late_s) * 0.5 * S)
    costs = compared([life(ended_s=18.0), life(started_s=19.0)], [counted, S // 2])
    assert costs.unreported_ns == 4 * S - counted
    assert costs.max_unreported_s == late_s
    assert (costs.problems == ()) == is_right


def test_executor_that_ended_was_not_busy_for_longer_than_it_ran() -> None:
    ended = life(ended_s=18.5)
    assert compared([ended], [ended.seen_ns + S // 2]).problems == ()
    assert len(compared([ended], [ended.seen_ns + 2 * S]).problems) == 1


def test_what_redis_lost_is_missing_of_executors_that_had_ended() -> None:
    lives = [life(ended_s=18.0), life("y")]
    costs = compared(lives, [0, 5 * S], lost_s=19.0)
    assert (costs.problems, costs.lost_ns, costs.unreported_ns) == ((), 4 * S, 0)
    assert len(compared(lives, [0, 5 * S], lost_s=17.0).problems) == 1


def test_each_start_of_an_executor_is_compared_by_itself() -> None:
    lives = [life(ended_s=14.0), life(started_s=15.0)]
    assert compared(lives, [2 * S, round(2.5 * S)]).problems == ()
    assert compared(lives, [round(2.5 * S), 2 * S]).problems != ()
