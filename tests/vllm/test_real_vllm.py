"""vLLM itself behind the executor API: SmolLM2 on the CPU, in the environment of vLLM that `make test-vllm` installs.

All tests share a stack of two executors, and the last ones kill one of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inflight import AsyncClient
from inflight.common.process import EXIT_FAILED
from inflight.errors import InflightError
from inflight.local.options import StackOptions, executor_command, router_command
from inflight.local.ports import free_ports
from inflight.local.process import ChildProcess
from inflight.local.ready import wait_until_serving
from inflight.local.stack import EXECUTOR_SERVICE, REDIS_URL_VARIABLE, ROUTER_SERVICE, LocalStack
from tests.stack.conftest import EXECUTOR_ARGS
from tests.vllm.conftest import ADAPTERS, NUM_SEATS, PATIENCE_S, SMALL, Setting, adapter_flags
from tests.vllm.contract import CONTRACT, OF_SMOLLM2

NUM_TOKENS = 24
# The model's name on the executor of our own engine.
OURS = "ours"
PROMPTS = ["The city bus stops at every corner.", "Once upon a time there was a lighthouse", "def add(a, b):"]

pytestmark = pytest.mark.timeout(1500)


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: LocalStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.address) as opened:
        yield opened


async def ids_of(client: AsyncClient, prompt_ids: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> list[int]:
    """The greedy tokens, each offset exactly once."""
    ids: list[int] = []
    stream = client.generate(
        token_ids=prompt_ids, max_tokens=num_tokens, temperature=0, ignore_eos=True, want_token_ids=True
    )
    async for delta in stream:
        assert delta.offset == len(ids)
        ids.extend(delta.token_ids)
    return ids


async def end_of(client: AsyncClient, prompt_ids: tuple[int, ...], deadline_s: float) -> str:
    """How a request that takes longer than its deadline ends."""
    try:
        done = await client.complete(token_ids=prompt_ids, max_tokens=400, ignore_eos=True, deadline_s=deadline_s)
    except InflightError:
        return "nothing before the deadline"
    return "none" if done.finish_reason is None else done.finish_reason.value


def test_real_backend_passes_the_contract(setting: Setting) -> None:
    flags = [*SMALL.split(), "--max-model-len=512", '--structured-outputs-config={"backend":"guidance"}']
    said = setting.run("tests.vllm.contract", "--model", str(setting.model.folder), *flags)
    assert sum(line.startswith("ok ") for line in said.splitlines()) == len(CONTRACT) + len(OF_SMOLLM2)


@pytest.mark.asyncio(loop_scope="module")
async def test_greedy_tokens_are_those_of_vllm(setting: Setting, client: AsyncClient) -> None:
    prompts = [await client.tokenize(prompt) for prompt in PROMPTS]
    ours = await asyncio.gather(*(ids_of(client, prompt) for prompt in prompts))
    said = await asyncio.to_thread(
        setting.run,
        "tests.vllm.reference",
        str(setting.model.folder),
        str(NUM_TOKENS),
        text=json.dumps([list(prompt) for prompt in prompts]),
    )
    # vLLM logs to stdout, too.
    (line,) = [line for line in said.splitlines() if line.startswith("[[")]
    assert ours == json.loads(line)


@pytest.mark.asyncio(loop_scope="module")
async def test_executors_report_vllms_seats_and_blocks(client: AsyncClient) -> None:
    executors = (await client.capacity()).executors
    assert len(executors) == 2
    for one in executors:
        assert (one.seats_total, one.block_size) == (NUM_SEATS, 32)
        assert one.blocks_total > 16


@pytest.mark.asyncio(loop_scope="module")
async def test_cancelled_and_expired_requests_leave_nothing(client: AsyncClient) -> None:
    prompt = await client.tokenize(PROMPTS[1])
    stream = client.generate(token_ids=prompt, max_tokens=300, ignore_eos=True)
    async for _ in stream:
        break
    assert await end_of(client, prompt, deadline_s=2.0) in ("deadline", "nothing before the deadline")
    async with asyncio.timeout(PATIENCE_S):
        while any(one.blocks_reserved or one.seats_used for one in (await client.capacity()).executors):
            await asyncio.sleep(0.05)
    assert len(await ids_of(client, prompt, 4)) == 4


@pytest_asyncio.fixture(loop_scope="module")
async def both(stack: LocalStack, setting: Setting, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a second router, in front of the stack's executors and one of our own engine."""
    (tmp_path / "admission.toml").write_text(f'[variants.both]\n"{setting.model.name}" = 1\n"{OURS}" = 1\n')
    executor, router = (f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2))
    options = StackOptions(
        model=f"{setting.model.name}={setting.model.folder},{OURS}={setting.model.folder}",
        executor_model=(str(setting.model.folder), OURS),
        executor_args=(*EXECUTOR_ARGS, *adapter_flags(stack.options.run_dir.parent / "adapters")),
        router_args=("--admission-file", str(tmp_path / "admission.toml")),
    )
    executors = (executor, *(one.address for one in stack.executors))
    commands = {
        "executor": (executor, EXECUTOR_SERVICE, executor_command(options, OURS, executor)),
        "router": (router, ROUTER_SERVICE, router_command(options, "second", router, executors)),
    }
    children = []
    try:
        for role, (address, service, command) in commands.items():
            environment = {REDIS_URL_VARIABLE: stack.redis_url}
            log_file = tmp_path / f"{role}.log"
            children.append(await ChildProcess.start(role, role, address, command, log_file, environment, ""))
            await wait_until_serving(address, service, PATIENCE_S, None)
        yield router
    finally:
        for child in reversed(children):
            await child.stop(5.0)


@pytest.mark.asyncio(loop_scope="module")
async def test_both_engines_serve_one_name_with_the_same_tokens(both: str, setting: Setting) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "want_token_ids": True}
    async with AsyncClient(both) as client:
        seen = []
        for adapter in ("", *ADAPTERS, ADAPTERS[0]):
            answers = [
                (await client.complete(PROMPTS[1], model=model, adapter_id=adapter, **asked)).token_ids
                for model in (setting.model.name, OURS)
            ]
            assert answers[0] == answers[1]
            seen.append(answers[0])
        assert seen[1] == seen[-1]
        assert len(set(seen)) == 1 + len(ADAPTERS)
        # A session stays with one of the engines.
        sessions = [f"session {number}" for number in range(12)]
        first, second = [[await executor_of(client, session) == OURS for session in sessions] for _ in range(2)]
        assert set(first) == {True, False}
        assert first == second


async def executor_of(client: AsyncClient, session: str) -> str | None:
    """The executor that serves a request of a session."""
    stream = client.generate(PROMPTS[0], model="both", session_id=session, max_tokens=1)
    async for _ in stream:
        pass
    return stream.transcript.executor_id


@pytest.mark.asyncio(loop_scope="module")
async def test_what_needs_all_of_its_output_goes_on_with_the_same_tokens(client: AsyncClient) -> None:
    """A client that brings its output is what a failure is to an executor."""
    sampled: dict[str, Any] = {"temperature": 1.3, "seed": 5, "exact_resume": True, "max_tokens": 24}
    requests: list[dict[str, Any]] = [
        {**sampled, "frequency_penalty": 0.8, "ignore_eos": True},
        {**sampled, "regex": "[a-z]{4} [0-9]{12}"},
        {"temperature": 0, "presence_penalty": 1.5, "bad_words": ["the"], "max_tokens": 16, "ignore_eos": True},
    ]
    for asked in requests:
        whole = (await client.complete(PROMPTS[1], want_token_ids=True, **asked)).token_ids
        for place in (1, len(whole) // 2):
            rest = await client.complete(PROMPTS[1], want_token_ids=True, prior_output_ids=whole[:place], **asked)
            assert rest.token_ids[-len(whole) + place :] == whole[place:]


@pytest.mark.asyncio(loop_scope="module")
async def test_every_stream_ends_exactly_once_when_an_executor_is_killed(
    stack: LocalStack, client: AsyncClient
) -> None:
    """It leaves one executor. Half of the streams need what they have said to be output of vLLM's."""
    prompts = [await client.tokenize(f"{prompt} {number}") for number in range(2) for prompt in PROMPTS]
    greedy: dict[str, Any] = {"temperature": 0}
    exact: dict[str, Any] = {"temperature": 1.0, "presence_penalty": 0.7, "seed": 3, "exact_resume": True}
    asked = [
        {"max_tokens": 40, "ignore_eos": True, "want_token_ids": True, **(exact if number % 2 else greedy)}
        for number in range(len(prompts))
    ]
    expected = [
        list((await client.complete(token_ids=prompt, **options)).token_ids)
        for prompt, options in zip(prompts, asked, strict=True)
    ]
    begun = asyncio.Event()
    outputs: list[list[int]] = [[] for _ in prompts]

    async def read(index: int) -> None:
        async for delta in client.generate(token_ids=prompts[index], **asked[index]):
            assert delta.offset == len(outputs[index])
            outputs[index].extend(delta.token_ids)
            if sum(map(bool, outputs)) >= 3:
                begun.set()

    reading = asyncio.gather(*(read(index) for index in range(len(prompts))))
    await begun.wait()
    killed = stack.executors.pop(0)
    children = _children(killed.pid)
    assert children
    os.kill(killed.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await reading
        assert outputs == expected
        # vLLM's engine goes with its executor.
        while any(_is_engine(pid) for pid in children):
            await asyncio.sleep(0.05)


@pytest.mark.asyncio(loop_scope="session")
async def test_executor_ends_at_once_when_vllms_engine_dies(stack: LocalStack) -> None:
    """The last one: it leaves no executor. In the loop of the stack, which waits for its processes."""
    executor = stack.executors.pop(0)
    (engine,) = [pid for pid in _children(executor.pid) if b"EngineCore" in _command(pid)]
    os.kill(engine, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        assert await executor.wait() == EXIT_FAILED


def _children(pid: int) -> list[int]:
    processes = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [int(path.name) for path in processes if _parent(path) == pid]


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _is_engine(pid: int) -> bool:
    """Whether it runs and is not the resource tracker, which removes what the others leave."""
    command = _command(pid)
    return bool(command) and b"resource_tracker" not in command


def _command(pid: int) -> bytes:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""
