"""Executors of several ranks in the whole stack: the tokens of one rank, also when a worker is killed or stopped."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.stack.test_equality import COMMON, answers, differences, random_request
from tests.support.stack.executors_linked import wait_for_executors

NUM_REQUESTS = 60
NUM_AT_ONCE = 8
ARGUMENTS = (*COMMON, "--max-num-sequences", "8", "--max-tokens-in-paged-kv-cache", "4096")
# The time-out is longer than a busy machine keeps a rank from the processor. One worker is stopped, and waited for.
RANKS = ("--tensor-parallel-size", "2", "--tensor-parallel-timeout-s", "12")


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and that have not ended."""
    return [child for child, parent, state in processes() if parent == pid and state != "Z"]


def processes() -> Iterator[tuple[int, int, str]]:
    """Pid, parent's pid and state of every process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it has ended meanwhile
            yield int(folder.name), int(parent), state


async def until_gone(pids: Sequence[int]) -> None:
    """Waits until these processes have ended: a worker whose executor has ended is killed by the kernel."""
    async with asyncio.timeout(60):
        while [pid for pid, _, _ in processes() if pid in pids]:
            await asyncio.sleep(0.05)


@dataclass(slots=True)
class Blow:
    """Sends a signal to the worker of the executor that produces the first token that a client gets."""

    stack: LocalStack
    signal: signal.Signals
    num_tokens: int = 0
    executor: str = ""
    worker: int = 0
    pids: list[int] = field(default_factory=list)

    def on_token(self, executor_id: str) -> None:
        self.num_tokens += 1
        if self.worker or self.num_tokens < 3 * NUM_AT_ONCE:
            return
        (child,) = (child for child in self.stack.executors if child.name == executor_id)
        (self.worker,) = children_of(child.pid)
        self.executor, self.pids = executor_id, [child.pid, self.worker]
        os.kill(self.worker, self.signal)


@pytest.mark.timeout(600)
async def test_streams_continue_elsewhere_when_a_worker_is_killed_or_stopped(tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(20)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    async with AsyncExitStack() as stacks:

        async def start(name: str, num_executors: int, *args: str) -> LocalStack:
            options: dict[str, Any] = {"model": str(tiny_model), "executor_args": (*ARGUMENTS, *args)}
            options |= {"router_args": ("--max-attempts", "3"), "run_dir": tmp_path / name}
            stack = await stacks.enter_async_context(LocalStack(StackOptions(executors=num_executors, **options)))
            await wait_for_executors(stack.address, num_executors)
            return stack

        # Given the tokens of one rank, greedy and seeded, with every feature of the logits stage
        one_rank = await start("one", 1)
        expected = await answers(one_rank.address, requests, NUM_AT_ONCE)
        assert sum(len(one.token_ids) > 0 for one in expected) > 0.9 * NUM_REQUESTS
        # Then executors of two ranks give the same, while a worker is killed, and then one is stopped
        ranks = await start("ranks", 3, *RANKS)
        blows = (Blow(ranks, signal.SIGKILL), Blow(ranks, signal.SIGSTOP))
        half = NUM_REQUESTS // 2
        for number, blow in enumerate(blows):
            some = slice(number * half, (number + 1) * half)
            answered = await answers(ranks.address, requests[some], NUM_AT_ONCE, blow.on_token)
            assert differences(answered, expected[some]) == {}
            # And the executor has ended, with the first cause in its log and no process left
            (child,) = (child for child in ranks.executors if child.name == blow.executor)
            assert await child.wait() == 1
            reason = "by signal 9" if blow.signal is signal.SIGKILL else "no sign of life"
            assert "a rank of this executor has failed" in child.log_file.read_text()
            assert reason in child.log_file.read_text()
            await until_gone(blow.pids)
        assert len({blow.executor for blow in blows}) == 2
