"""Executors of several ranks in the whole stack: the tokens of one rank, with an adapter, and also when a worker is
killed or stopped."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inflight import AsyncClient
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.adapter_files import save_adapter
from tests.executors_linked import wait_for_executors
from tests.gateways import run_gateway
from tests.stack.test_equality import COMMON, answers, differences, random_request
from tests.stack.test_ranks_in_process import GREEDY, NUM_TOKENS, adapted, loaded, request, tokens_of
from tests.torch_threads import torch_threads

NUM_REQUESTS = 60
NUM_AT_ONCE = 8
ARGUMENTS = (*COMMON, "--max-num-sequences", "8", "--max-tokens-in-paged-kv-cache", "4096")
RANKS = ("--tensor-parallel-size", "2", "--tensor-parallel-timeout-s", "3")


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


@dataclass(frozen=True, slots=True)
class Stacks:
    """A stack with an executor of one rank, and one with three executors of two ranks, which serve an adapter."""

    one_rank: LocalStack
    ranks: LocalStack
    model: Path
    adapters: Path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stacks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stacks]:
    tmp_path = tmp_path_factory.mktemp("stacks")
    adapters = tmp_path / "adapters"
    save_adapter(adapters / "sql", seed=1, rank=8)
    async with AsyncExitStack() as exits:

        async def start(name: str, num_executors: int, *args: str) -> LocalStack:
            options: dict[str, Any] = {"model": str(tiny_model), "executor_args": (*ARGUMENTS, *args)}
            options |= {"router_args": ("--max-attempts", "3"), "run_dir": tmp_path / name}
            stack = await exits.enter_async_context(LocalStack(StackOptions(executors=num_executors, **options)))
            await wait_for_executors(stack.address, num_executors)
            return stack

        with_adapters = ("--adapter-folder", str(adapters), "--max-adapters", "2")
        one_rank, ranks = await start("one", 1), await start("ranks", 3, *RANKS, *with_adapters)
        yield Stacks(one_rank, ranks, tiny_model, adapters)


def tokens_of_one_rank(stacks: Stacks) -> tuple[list[int], list[int]]:
    """The greedy outputs of one rank in this process for the same prompt, with the adapter and without one."""
    with torch_threads(1), loaded(str(stacks.model), 1, dtype="float32", adapter_folder=stacks.adapters) as one:
        assert one.adapters is not None
        (with_adapter,), (without,) = (
            tokens_of(one, [sequence]) for sequence in (adapted(one.adapters, 3, "sql"), request(3, GREEDY))
        )
        return with_adapter, without


async def test_adapter_of_two_ranks_answers_through_the_gateway_as_one_rank(stacks: Stacks) -> None:
    expected, of_base = await asyncio.to_thread(tokens_of_one_rank, stacks)
    assert expected != of_base
    prompt, address = request(3, GREEDY).token_ids, stacks.ranks.address
    asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0}
    async with run_gateway(address) as gateway, gateway.openai() as openai, AsyncClient(address) as client:
        for model, tokens in ((f"{stacks.model.name}:sql", expected), (stacks.model.name, of_base)):
            completion = await client.complete(
                token_ids=prompt, model=model, ignore_eos=True, want_token_ids=True, **asked
            )
            assert [*completion.token_ids] == tokens
            answer = await openai.completions.create(
                model=model, prompt=prompt, extra_body={"ignore_eos": True}, **asked
            )
            assert answer.choices[0].text == completion.text


@pytest.mark.timeout(600)
async def test_streams_continue_elsewhere_when_a_worker_is_killed_or_stopped(stacks: Stacks) -> None:
    rng = random.Random(20)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    # Given the tokens of one rank, greedy and seeded, with every feature of the logits stage
    expected = await answers(stacks.one_rank.address, requests, NUM_AT_ONCE)
    assert sum(len(one.token_ids) > 0 for one in expected) > 0.9 * NUM_REQUESTS
    # Then executors of two ranks give the same, while a worker is killed, and then one is stopped
    ranks = stacks.ranks
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
        assert not [pid for pid, _, _ in processes() if pid in blow.pids]
    assert len({blow.executor for blow in blows}) == 2
