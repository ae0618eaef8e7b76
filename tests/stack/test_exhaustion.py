"""Real processes that run out of what the machine has: room on the disk for their logs, file descriptors.

Of blocks: `tests/integration/test_max_utilization.py`, `tests/unit/test_preemption.py`. Of host memory:
`tests/unit/test_host_tier.py`.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from inflight import AsyncClient
from inflight.events import Delta
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.stack.conftest import EXECUTOR_ARGS


async def words(client: AsyncClient, prompt: str, max_tokens: int = 8) -> str:
    events = [event async for event in client.generate(prompt, max_tokens=max_tokens, temperature=0.0)]
    return "".join(event.text for event in events if isinstance(event, Delta))


def num_open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def until_closed(pid: int, num_files: int) -> None:
    async with asyncio.timeout(60):
        while num_open_files(pid) > num_files:
            await asyncio.sleep(0.02)


async def test_processes_serve_on_with_full_disks_and_without_file_descriptors(
    tmp_path: Path, tiny_model: Path
) -> None:
    for name in ("executor-0", "router-0"):
        (tmp_path / f"{name}.log").symlink_to("/dev/full")
    options = StackOptions(
        model=str(tiny_model),
        executor_args=(*EXECUTOR_ARGS, "--log-level", "debug"),
        router_args=("--log-level", "debug"),
        run_dir=tmp_path,
        program=(sys.executable, "-m", "inflight.cli.main"),
    )
    async with LocalStack(options) as stack:
        (router,) = stack.routers
        # Given processes that cannot write a line of their logs, which serve all the same
        async with AsyncClient(stack.address) as client:
            said = await words(client, "The capital of France is")
            assert said
            # When the router can open no more files
            soft, hard = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
            before = num_open_files(router.pid)
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (before + 4, hard))
            with ExitStack() as connections:
                host, _, port = stack.address.rpartition(":")
                for _ in range(40):
                    connections.enter_context(socket.create_connection((host, int(port)), timeout=5))
                # Then who is connected is served as before
                for _ in range(3):
                    assert await words(client, "The capital of France is") == said
                assert num_open_files(router.pid) <= before + 4
            # And when the others have gone, new requests are served again
            await until_closed(router.pid, before + 2)
        async with AsyncClient(stack.address) as client:
            assert await words(client, "The capital of France is") == said
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert router.exit_code is None
        assert stack.executors[0].exit_code is None
