"""Signals of a server process, sent to a real one."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

# Drains for ever.
SERVER = """
import asyncio
from inflight.common.rpc.server import Signals

async def main():
    signals = Signals(asyncio.get_running_loop())
    print("serving", flush=True)
    await signals.drain.wait()
    print("draining", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_first_signal_drains_and_the_second_exits_at_once(second: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"serving\n"
            process.send_signal(signal.SIGTERM)
            assert await process.stdout.readline() == b"draining\n"
            process.send_signal(second)
            assert await process.wait() == 128 + second
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
