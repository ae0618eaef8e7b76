"""Virtual time: events in order of their time, equal times in order of being set. Reads no clock.

A `Process` is what can die or hang: what reaches a dead one is lost, what reaches a hung one happens when it comes
back, in the order in which it came.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

US_PER_MS = 1_000
US_PER_S = 1_000_000

Action = Callable[..., None]


class Timeline:
    """The events to come. Times are whole microseconds, so that equal means equal."""

    def __init__(self) -> None:
        self.now_us = 0
        # Events so far: with the seed, the place of whatever happens.
        self.num_steps = 0
        self._num_set = 0
        self._events: list[tuple[int, int, Action, tuple[Any, ...]]] = []

    @property
    def now_ms(self) -> int:
        """The time that Redis is told."""
        return self.now_us // US_PER_MS

    def at(self, when_us: int, action: Action, *args: Any) -> None:
        """Has something happen at a time that is not past."""
        assert when_us >= self.now_us, f"{when_us} is before {self.now_us}"
        self._num_set += 1
        heapq.heappush(self._events, (when_us, self._num_set, action, args))

    def after(self, delay_us: int, action: Action, *args: Any) -> None:
        """Schedules an action after a delay."""
        self.at(self.now_us + delay_us, action, *args)

    def run_until(self, until_us: int) -> None:
        """Everything up to this time, that included."""
        events = self._events
        while events and events[0][0] <= until_us:
            self.now_us, _, action, args = heapq.heappop(events)
            self.num_steps += 1
            action(*args)
        self.now_us = until_us


class Process:
    """Whether something lives, and since when it does not answer."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.is_alive = True
        self._hangs_until_us = 0
        # What came while it hung.
        self._backlog: deque[tuple[Action, tuple[Any, ...]]] = deque()
        self._actions_left: int | None = None
        self._at_the_end: Action | None = None

    @property
    def is_hung(self) -> bool:
        """Whether it is stopped and will come back."""
        return self._hangs_until_us > self._timeline.now_us

    def kill(self) -> None:
        """Drops all further actions."""
        self.is_alive = False

    def hang(self, duration_us: int) -> None:
        """Nothing happens to it for so long, then all of it."""
        self._hangs_until_us = max(self._hangs_until_us, self._timeline.now_us + duration_us)
        self._timeline.at(self._hangs_until_us, self._catch_up)

    def doom(self, num_actions: int, at_the_end: Action) -> None:
        """Lets so many more things happen to it; in place of the next, `at_the_end` kills it."""
        self._actions_left, self._at_the_end = num_actions, at_the_end

    def run(self, action: Action, *args: Any) -> None:
        """Does something in the process, as soon as it can and behind all that came before."""
        if self.is_hung or self._backlog:
            self._backlog.append((action, args))
        else:
            self._act(action, args)

    def _catch_up(self) -> None:
        while self._backlog and not self.is_hung:
            self._act(*self._backlog.popleft())

    def _act(self, action: Action, args: tuple[Any, ...]) -> None:
        if not self.is_alive:
            return
        if self._actions_left is not None:
            self._actions_left -= 1
            if self._actions_left < 0:
                assert self._at_the_end is not None
                self._at_the_end()
                return
        action(*args)
