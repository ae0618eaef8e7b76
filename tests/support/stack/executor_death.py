"""The death of the executor that serves a stream."""

from __future__ import annotations

import os
import signal

from inflight import AsyncStream, Completion
from inflight.local.stack import LocalStack
from inflight.local.state import read_state


async def finished_after_death(stack: LocalStack, stream: AsyncStream) -> Completion:
    """Reads a delta of a stream, kills the executor that it comes from, and returns what the stream says in all."""
    deltas = aiter(stream)
    await anext(deltas)
    kill_executor_of(stack, stream)
    async for _ in deltas:
        pass
    return stream.transcript.result()


def kill_executor_of(stack: LocalStack, stream: AsyncStream) -> None:
    """Kills the executor of the newest delta of a stream, without a warning."""
    state = read_state(stack.options.run_dir)
    assert state is not None
    (pid,) = (one.pid for one in state.processes if one.name == stream.transcript.executor_id)
    os.kill(pid, signal.SIGKILL)
