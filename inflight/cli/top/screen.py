"""The state of `inflight top`, changed by messages and keys. Pure; reads no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from inflight.v1 import inference_pb2, stats_pb2

Executor = inference_pb2.ExecutorStats

# Except by name, the largest comes first.
SORTINGS: dict[str, Callable[[Executor], float]] = {
    "seats": lambda executor: executor.capacity.seats_used,
    "blocks": lambda executor: executor.capacity.blocks_used,
    "tokens/s": lambda executor: executor.capacity.output_tokens_per_s,
    "step time": lambda executor: executor.capacity.step_ms,
}
SORT_NAMES = ("name", *SORTINGS)

# Keys, as a terminal sends them.
LEAVE, SORT, ESCAPE = "q", "s", "\x1b"
NEXT, PREVIOUS = ("j", "\x1b[B", "\x1bOB"), ("k", "\x1b[A", "\x1bOA")


@dataclass(frozen=True, slots=True)
class Screen:
    """The newest message and what the user has chosen. `note` is about the connection."""

    now: inference_pb2.GetStatsResponse
    sorting: str = "name"
    selected: str = ""
    note: str = ""
    has_left: bool = False
    # Steps per second by executor, since the message before.
    step_rates: dict[str, float] = field(default_factory=dict)
    # The latest known step of each executor: not every message has one.
    steps: dict[str, stats_pb2.IterationStats] = field(default_factory=dict)

    @classmethod
    def of(cls, message: inference_pb2.GetStatsResponse) -> Screen:
        """With the first message."""
        return cls(message, steps=_newest_steps(message))

    def shows(self, message: inference_pb2.GetStatsResponse) -> Screen:
        """With the next message, which may come from another router."""
        rates = _step_rates(self.now, message)
        return replace(self, now=message, step_rates=rates, steps=self.steps | _newest_steps(message), note="")

    def noting(self, note: str) -> Screen:
        """With a line about the connection."""
        return replace(self, note=note)

    def pressed(self, key: str) -> Screen:
        """After a key. Unknown keys change nothing."""
        if key in NEXT:
            return self._select(1)
        if key in PREVIOUS:
            return self._select(-1)
        if key == LEAVE:
            return replace(self, has_left=True)
        if key == SORT:
            place = SORT_NAMES.index(self.sorting)
            return replace(self, sorting=SORT_NAMES[(place + 1) % len(SORT_NAMES)])
        return replace(self, selected="") if key == ESCAPE else self

    @property
    def executors(self) -> list[Executor]:
        """The executors in the chosen order."""
        named = sorted(self.now.executors, key=lambda one: (one.capacity.model, one.capacity.executor_id))
        figure = SORTINGS.get(self.sorting)
        return named if figure is None else sorted(named, key=figure, reverse=True)

    def _select(self, distance: int) -> Screen:
        ids = [executor.capacity.executor_id for executor in self.executors]
        if not ids:
            return self
        if self.selected not in ids:
            return replace(self, selected=ids[0 if distance > 0 else -1])
        return replace(self, selected=ids[(ids.index(self.selected) + distance) % len(ids)])


def _newest_steps(message: inference_pb2.GetStatsResponse) -> dict[str, stats_pb2.IterationStats]:
    return {one.capacity.executor_id: one.iterations[-1] for one in message.executors if one.iterations}


def _step_rates(before: inference_pb2.GetStatsResponse, now: inference_pb2.GetStatsResponse) -> dict[str, float]:
    """Leaves out an executor that has restarted, whose number of steps is lower than before."""
    elapsed_s = (now.timestamp_ms - before.timestamp_ms) / 1000
    if elapsed_s <= 0:
        return {}
    counted = {executor.capacity.executor_id: executor.capacity.num_steps for executor in before.executors}
    new = {executor.capacity.executor_id: executor.capacity.num_steps for executor in now.executors}
    return {
        name: (num_steps - counted[name]) / elapsed_s
        for name, num_steps in new.items()
        if num_steps >= counted.get(name, num_steps + 1)
    }
