"""Runs an asynchronous command in the foreground: the first Ctrl-C or SIGTERM ends it in order, the second at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from inflight.cli.outcome import EXIT_INTERRUPTED


def run_in_foreground(command: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs the coroutine to its end and returns its exit code; 130 where it was interrupted.

    The first signal cancels it, so that its `async with` blocks clean up. The second ends the process; children that
    are guarded end with it.
    """
    return asyncio.run(_run(command))


async def _run(command: Callable[[], Coroutine[Any, Any, int]]) -> int:
    running = asyncio.create_task(command())
    was_interrupted = False

    def on_signal() -> None:
        nonlocal was_interrupted
        if was_interrupted:
            os._exit(EXIT_INTERRUPTED)
        was_interrupted = True
        running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        return await running
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
