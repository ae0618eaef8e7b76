"""Distinction between a cancelled task and a cancelled call: gRPC raises the same `CancelledError` for both."""

from __future__ import annotations

import asyncio


def task_is_cancelled() -> bool:
    """Returns whether the current task was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
