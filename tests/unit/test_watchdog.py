"""Detection of a stalled engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from inflight.executor.engine.watchdog import Observation, observe, watch_engine

INTERVAL_S = 1.0


@dataclass(slots=True)
class Engine:
    """What the watchdog sees."""

    has_work: bool = True
    progress: tuple[int, ...] = (0, 0)
    expected_step_s: float = 0.0


def looks(engine: Engine, before: Observation, *times_s: float) -> Observation:
    """The last of looks at these times."""
    for at_s in times_s:
        before = observe(before, at_s, engine, INTERVAL_S)
    return before


def first_look(engine: Engine) -> Observation:
    return Observation(0.0, engine.has_work, engine.progress)


def test_time_with_work_and_without_a_step_counts() -> None:
    engine = Engine()
    assert looks(engine, first_look(engine), 1, 2, 3).stalled_s == 3


def test_step_starts_over() -> None:
    engine = Engine()
    before = looks(engine, first_look(engine), 1, 2)
    engine.progress = (1, 0)
    assert looks(engine, before, 3).stalled_s == 0
    assert looks(engine, before, 3, 4).stalled_s == 1


def test_idle_engine_does_not_stand_still() -> None:
    engine = Engine(has_work=False)
    assert looks(engine, first_look(engine), 1, 2, 30).stalled_s == 0


def test_work_counts_from_the_first_look_that_sees_it() -> None:
    engine = Engine(has_work=False)
    before = looks(engine, first_look(engine), 1, 2)
    engine.has_work = True
    assert looks(engine, before, 3).stalled_s == 0
    assert looks(engine, before, 3, 4).stalled_s == 1


def test_engine_that_had_nothing_to_do_between_two_looks_starts_over() -> None:
    engine = Engine()
    before = looks(engine, first_look(engine), 1, 2)
    engine.progress = (0, 1)
    assert looks(engine, before, 3).stalled_s == 0


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    engine = Engine()
    assert looks(engine, first_look(engine), 1, 2, 1000).stalled_s <= 4


class StalledError(Exception):
    """The watchdog has reported a stall."""


@pytest.mark.parametrize(("expected_step_s", "stalled_at_s"), [(0.0, 30), (9.0, 30), (40.0, 120)])
async def test_step_that_is_expected_to_take_long_may_take_three_times_as_long(
    expected_step_s: float, stalled_at_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        assert seconds == INTERVAL_S
        now_s += 1

    async def on_change(is_stalled: bool) -> None:
        raise StalledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(StalledError):
        await watch_engine(Engine(expected_step_s=expected_step_s), 30.0, on_change, lambda: float(now_s))
    assert now_s == stalled_at_s
