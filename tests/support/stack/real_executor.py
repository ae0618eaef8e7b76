"""An executor in the process of the test, with a real model behind the real service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from inflight.executor.engine.gc import GarbageCollection
from inflight.executor.loader import load_executor
from inflight.executor.main import Parts, build_executor
from inflight.executor.settings import ExecutorSettings
from tests.support.device.torch_threads import torch_threads


@asynccontextmanager
async def run_real_executor(settings: ExecutorSettings) -> AsyncIterator[tuple[Parts, str]]:
    """Yields the executor's parts and the address where it serves."""
    with torch_threads(settings.num_threads):
        parts = build_executor(settings, load_executor(settings), None, GarbageCollection())
    address = await parts.serving.server.start(settings.listen)
    parts.engine.start()
    reports = asyncio.create_task(parts.serving.service.run())
    try:
        yield parts, address
    finally:
        reports.cancel()
        await parts.serving.service.close(0)
        await parts.serving.server.stop(0)
        assert await asyncio.to_thread(parts.engine.stop, 60)
        parts.runner.close()
