"""A vLLM of the tests: its Python, and a stack of executors around it, which the files with the real one share.

It is skipped where there is none. It is slow to start.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from inflight.bench.targets.model import LocalModel, local_model
from inflight.executor.adapters.weights import AdapterLimits
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.contract.test_imports import REPOSITORY
from tests.support.checkpoints.adapter_files import SHAPE, save_adapter, tensors
from tests.support.stack.executors_linked import wait_for_executors

# Two cores that are busy with other tests start it in minutes.
PATIENCE_S = 500.0
NUM_SEATS = 2
NUM_STANDBY = 1
# The context is the model's own: the cases that other engines pass are for it.
SMALL = f"--enforce-eager --block-size 32 --max-num-seqs {NUM_SEATS} --dtype float32"
# Every limit is of a tenant that only one test uses.
ADAPTERS = ("one", "two", "three")
SMOLLM2 = dataclasses.replace(
    SHAPE,
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
)
ADMISSION = """
[tenants.narrow]
max_queue_requests = 1

[tenants.slow]
requests_per_s = 0.001
"""


def adapter_flags(folder: Path) -> tuple[str, ...]:
    """Fewer slots than adapters, so that one takes the place of another."""
    return ("--adapter-folder", str(folder), "--max-adapters", str(len(ADAPTERS) - 1), "--max-adapter-rank", "8")


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


@pytest.fixture(scope="session")
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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """A router and two executors."""
    run_dir = tmp_path_factory.mktemp("vllm")
    (run_dir / "admission.toml").write_text(ADMISSION)
    for seed, name in enumerate(ADAPTERS):
        save_adapter(run_dir / "adapters" / name, weights=tensors(seed, limits=AdapterLimits(SMOLLM2, 8)))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in setting.environment.items():
            patch.setenv(name, value)
        options = StackOptions(
            executors=2,
            executor_program=(str(setting.python), "-P", "-m", "inflight.cli.main"),
            executor_model=(str(setting.model.folder), setting.model.name),
            executor_args=(
                *("--engine", "vllm", f"--engine-args={SMALL}", "--num-standby-sequences", str(NUM_STANDBY)),
                *adapter_flags(run_dir / "adapters"),
            ),
            router_args=("--admission-file", str(run_dir / "admission.toml")),
            run_dir=run_dir / "run",
            start_timeout_s=PATIENCE_S,
        )
        async with LocalStack(options) as running:
            await wait_for_executors(running.address, options.executors)
            yield running
