"""vLLM itself behind the executor API: SmolLM2 on the CPU, in the environment of vLLM that `make test-vllm` installs.

Skipped where there is none. It is slow to start, so all tests share a stack of two executors.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from inflight import AsyncClient
from inflight.bench.targets.model import LocalModel, local_model
from inflight.errors import InflightError
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.contract.test_imports import REPOSITORY
from tests.support.stack.executors_linked import wait_for_executors
from tests.vllm.contract import CONTRACT

# Two cores that are busy with other tests start it in minutes.
PATIENCE_S = 500.0
NUM_TOKENS = 24
PROMPTS = ["The city bus stops at every corner.", "Once upon a time there was a lighthouse", "def add(a, b):"]
SMALL = "--enforce-eager --max-model-len 512 --block-size 32 --max-num-seqs 2 --dtype float32"

pytestmark = pytest.mark.timeout(1500)


def vllm_python() -> Path | None:
    """The Python of an environment with vLLM and what the executor needs besides."""
    given = os.environ.get("INFLIGHT_VLLM_PYTHON")
    python = Path(given) if given else REPOSITORY / ".peers" / "vllm" / "bin" / "python"
    if not python.exists():
        return None
    wanted = "import vllm, grpc_health, grpc_reflection"
    return python if subprocess.run([python, "-c", wanted], capture_output=True, check=False).returncode == 0 else None


@dataclass(frozen=True, slots=True)
class Setting:
    """vLLM's Python, its environment, and the model as a folder."""

    python: Path
    environment: dict[str, str]
    model: LocalModel

    def run(self, *arguments: str, text: str = "") -> str:
        """Runs a module by vLLM's Python; returns its output."""
        command = [str(self.python), "-P", "-m", *arguments]
        ended = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=self.environment
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
        return ended.stdout


@pytest.fixture(scope="module")
def setting() -> Setting:
    python = vllm_python()
    if python is None:
        pytest.skip("no vLLM here: `make test-vllm` installs it, INFLIGHT_VLLM_PYTHON names another Python that has it")
    added = {
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    return Setting(python, {**os.environ, **added}, local_model(None))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """A router and two executors."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in setting.environment.items():
            patch.setenv(name, value)
        options = StackOptions(
            executors=2,
            executor_program=(str(setting.python), "-P", "-m", "inflight.cli.main"),
            executor_model=(str(setting.model.folder), setting.model.name),
            executor_args=("--engine", "vllm", f"--engine-args={SMALL}", "--num-standby-sequences", "1"),
            run_dir=tmp_path_factory.mktemp("vllm") / "run",
            start_timeout_s=PATIENCE_S,
        )
        async with LocalStack(options) as running:
            await wait_for_executors(running.address, options.executors)
            yield running


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
    flags = [*SMALL.split(), '--structured-outputs-config={"backend":"guidance"}']
    said = setting.run("tests.vllm.contract", "--model", str(setting.model.folder), *flags)
    assert sum(line.startswith("ok ") for line in said.splitlines()) == len(CONTRACT) + 1


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
        assert (one.seats_total, one.block_size) == (2, 32)
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


@pytest.mark.asyncio(loop_scope="module")
async def test_every_stream_ends_exactly_once_when_an_executor_is_killed(
    stack: LocalStack, client: AsyncClient
) -> None:
    """The last one: it leaves one executor."""
    prompts = [await client.tokenize(f"{prompt} {number}") for number in range(2) for prompt in PROMPTS]
    begun = asyncio.Event()
    outputs: list[list[int]] = [[] for _ in prompts]

    async def read(index: int) -> None:
        stream = client.generate(
            token_ids=prompts[index], max_tokens=40, temperature=0, ignore_eos=True, want_token_ids=True
        )
        async for delta in stream:
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
        assert [len(output) for output in outputs] == [40] * len(prompts)
        # vLLM's engine goes with its executor.
        while any(_is_engine(pid) for pid in children):
            await asyncio.sleep(0.05)


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
    try:
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return bool(command) and b"resource_tracker" not in command
