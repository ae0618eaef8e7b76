"""An executor as a process of its own: how it drains and ends, with a router's stream that a test drives."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from transformers import LlamaConfig

from inflight.local.ports import free_ports
from inflight.local.process import ChildProcess
from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.stack.router_stream import RouterStream, make_submit, router_stream

# So long that no sequence of a test reaches it.
CONTEXT_LENGTH = 100_000
# Longer than a busy machine delays a step.
WATCHDOG_S = 3
ARGUMENTS = (
    "--insecure",
    *("--device", "cpu"),
    *("--dtype", "float32"),
    *("--attention-backend", "reference"),
    *("--num-threads", "1"),
    *("--max-num-sequences", "1"),
    *("--max-tokens-in-paged-kv-cache", str(3 * CONTEXT_LENGTH)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**sizes(max_position_embeddings=CONTEXT_LENGTH))
    return save_model(config, tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def executor_process(model: Path, folder: Path, *arguments: str) -> AsyncIterator[ChildProcess]:
    """A process that serves."""
    (port,) = free_ports("127.0.0.1", 1)
    address = f"127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "inflight.cli.main",
        "executor",
        "--insecure",
        "--listen",
        address,
        "--model",
        str(model),
    ]
    child = await ChildProcess.start(
        "executor", "executor", address, [*command, *ARGUMENTS, *arguments], folder / "executor.log", {}
    )
    try:
        yield child
    finally:
        child.kill()
        await child.wait()


async def generation_of(child: ChildProcess) -> int:
    """Waits until it serves."""
    async with grpc.aio.insecure_channel(child.address) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        describe = stub.Describe(executor_pb2.DescribeRequest(), wait_for_ready=True, timeout=240)
        return int((await describe).generation)


async def start_two(router: RouterStream) -> None:
    """One sequence that runs, and one that waits for its seat."""
    submits = [make_submit(request_id, [1, 2], CONTEXT_LENGTH - 10) for request_id in ("runs", "waits")]
    for submit in submits:
        submit.reserved_blocks = -(-CONTEXT_LENGTH // 16)
    router.send(submits=submits)
    await router.until(lambda: router.of("runs") and len(router.of("runs")[0].tokens) >= 10 and router.of("waits"))


async def test_terminated_executor_hands_everything_back_and_exits_with_0(model: Path, tmp_path: Path) -> None:
    async with executor_process(model, tmp_path, "--drain-timeout-s", "1", "--watchdog-s", str(WATCHDOG_S)) as child:
        generation = await generation_of(child)
        async with router_stream(child.address, generation=generation) as router:
            await start_two(router)
            # A process that is stopped for longer than its watchdog allows an engine goes on as if nothing had been
            os.kill(child.pid, signal.SIGSTOP)
            await asyncio.sleep(1.5 * WATCHDOG_S)
            os.kill(child.pid, signal.SIGCONT)
            num_tokens = len(router.of("runs")[0].tokens)
            await router.until(lambda: len(router.of("runs")[0].tokens) > num_tokens + 100)
            # When it is to end, who had no seat goes at once, and who has one when the time is over
            os.kill(child.pid, signal.SIGTERM)
            await router.until(lambda: router.is_over)
            assert router.ended == ["waits", "runs"]
        assert await asyncio.wait_for(child.wait(), 60) == 0
    for request_id in ("runs", "waits"):
        end = router.of(request_id)[0].end
        assert end is not None
        assert (end.reason, end.error) == (types_pb2.FINISH_REASON_PREEMPTED, "")
    assert router.of("runs")[0].token_ids
    assert "Traceback" not in (tmp_path / "executor.log").read_text()
