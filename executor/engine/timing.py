"""Timing of the loop: smoothed speeds, the device's idle time, and the parts of the loop on the host.

Engine's thread only. Times in seconds, rates per second.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight.executor.engine.runner import PendingStep
from inflight.executor.scheduler.sequence import StepPlan
from inflight.executor.scheduler.step_record import DeviceTimes, LoopPart

_NOTHING = (0.0,) * len(LoopPart)


class LoopParts:
    """A clock that is read at the end of each part of the loop. The time since the previous reading belongs to that
    part."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = list(_NOTHING)
        # Time of the last reading.
        self.read_s = 0.0

    def begin(self, now_s: float) -> None:
        """Starts timing when there is work again."""
        self.read_s = now_s

    def end(self, part: LoopPart) -> None:
        now_s = self._clock()
        self._seconds[part] += now_s - self.read_s
        self.read_s = now_s

    def take(self) -> tuple[float, ...]:
        """Returns the seconds of each part since the last call."""
        taken = tuple(self._seconds)
        self._seconds[:] = _NOTHING
        return taken


# Weight of the newest step in the smoothed speeds: about the last 20 steps count.
SMOOTHING = 0.05


class Throughput:
    """Smoothed step time, prefill rate and device utilisation, from the retired steps."""

    def __init__(self) -> None:
        self._num_steps = 0
        self.step_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self.exposed_host_s = 0.0
        self.elapsed_s = 0.0
        self._busy_s = 0.0
        # When the device last finished, or when work arrived after a period without any.
        self._since_s = 0.0

    @property
    def device_busy_fraction(self) -> float:
        """Busy share of the time in which there is work, smoothed."""
        period_s = self._busy_s + self.exposed_host_s
        return self._busy_s / period_s if period_s else 0.0

    def wake(self, now_s: float) -> None:
        """Records that there is work again: from here on the device waits for the host."""
        self._since_s = max(self._since_s, now_s)

    def observe(self, plan: StepPlan, step: PendingStep) -> DeviceTimes:
        """Adds one step. Returns how long the device waited for it and was busy with it.

        A step launched while the previous one was running begins when that one ends.
        """
        began_s = max(step.began_s, self._since_s)
        # A device's own clock may lag behind the host's; negative times are not reported.
        exposed_s, busy_s = began_s - self._since_s, max(0.0, step.ended_s - began_s)
        self._since_s = step.ended_s
        self.elapsed_s += exposed_s + busy_s
        elapsed_s = exposed_s + busy_s
        weight = SMOOTHING if self._num_steps else 1.0
        self._num_steps += 1
        self.exposed_host_s += weight * (exposed_s - self.exposed_host_s)
        self._busy_s += weight * (busy_s - self._busy_s)
        self.step_s = self.exposed_host_s + self._busy_s
        if elapsed_s > 0:
            self._observe_rates(plan, elapsed_s)
        return DeviceTimes(exposed_s, busy_s)

    def _observe_rates(self, plan: StepPlan, elapsed_s: float) -> None:
        num_prefill = sum(length for length in plan.lengths if length > 1)
        if num_prefill:
            self.prefill_tokens_per_s = _smooth(self.prefill_tokens_per_s, num_prefill / elapsed_s)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + SMOOTHING * (new - old)
