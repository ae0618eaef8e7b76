"""Times of an executor's reports, and the end of reporting."""

from __future__ import annotations

import asyncio

import pytest

from inflight.executor.serving.report import Reporter


@pytest.mark.parametrize("num_turns", range(5))
async def test_reports_end_when_cancelled_in_the_moment_that_one_is_due(num_turns: int) -> None:
    reporter = Reporter(lambda seq, status: None)
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reporter.send_now()
    for _ in range(num_turns):  # of the event loop
        await asyncio.sleep(0)
    running.cancel()
    ended, _ = await asyncio.wait((running,), timeout=60)
    assert ended
