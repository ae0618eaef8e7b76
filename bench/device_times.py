"""How much of a run the device worked, from an engine's own totals before and after it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Totals since an engine's start; None where it does not measure them. `elapsed_s` is time with work to do."""

    num_steps: int = 0
    busy_s: float | None = None
    elapsed_s: float | None = None


def added_up(times: Sequence[DeviceTimes]) -> DeviceTimes:
    """The totals of several engines."""
    busy_s = [one.busy_s for one in times if one.busy_s is not None]
    elapsed_s = [one.elapsed_s for one in times if one.elapsed_s is not None]
    complete = bool(times) and len(busy_s) == len(elapsed_s) == len(times)
    return DeviceTimes(
        sum(one.num_steps for one in times), sum(busy_s) if complete else None, sum(elapsed_s) if complete else None
    )


def device_figures(before: DeviceTimes, after: DeviceTimes) -> dict[str, float]:
    """The device's share of the time, and how long it waited for the host at each step; nothing where not measured."""
    if before.busy_s is None or before.elapsed_s is None or after.busy_s is None or after.elapsed_s is None:
        return {}
    num_steps, elapsed_s = after.num_steps - before.num_steps, after.elapsed_s - before.elapsed_s
    if num_steps <= 0 or elapsed_s <= 0:
        return {}
    busy_s = after.busy_s - before.busy_s
    return {
        "device_busy_fraction": round(busy_s / elapsed_s, 4),
        "exposed_host_ms": round(1e3 * (elapsed_s - busy_s) / num_steps, 4),
    }
