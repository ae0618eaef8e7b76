"""Tells a task that shall end from one whose call was cancelled: gRPC raises the same `CancelledError` for both."""

from __future__ import annotations

import asyncio


def task_is_cancelled() -> bool:
    """Whether somebody wants this task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
