"""Two ranks with a GPU each, which exchange by NCCL: the tokens of one GPU, by graphs and launches, and a lost rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from inflight.executor.engine.runner import DeviceLostError
from inflight.executor.scheduler.sequence import Sampling, Sequence
from inflight.executor.settings import ExecutorSettings
from tests.kernels.test_gpu_runner import BLOCK_SIZE, outputs, sequence
from tests.stack.test_tensor_parallel import children_of
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.stack.ranked_executor import scheduler_of, start_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"ranks need two GPUs, and torch finds {torch.cuda.device_count()}")


def settings_of(folder: Path, num_ranks: int, *, uses_graphs: bool) -> ExecutorSettings:
    return ExecutorSettings(
        insecure=True,
        model=str(folder),
        device="cuda",
        attention_backend="triton",
        dtype="float32",
        max_num_sequences=4,
        max_num_tokens=64,
        max_tokens_in_paged_kv_cache=4096,
        enable_cuda_graphs=uses_graphs,
        tensor_parallel_size=num_ranks,
        tensor_parallel_timeout_s=30,
    )


def requests() -> list[Sequence]:
    """Greedy, seeded and restricted ones."""
    samplings = (Sampling(0.0, 0, 1.0, 0), Sampling(1.0, 0, 1.0, 2**63 + 5), Sampling(0.8, 5, 0.9, 7))
    return [sequence(number, 3 + 20 * number, sampling) for number, sampling in enumerate(samplings)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("uses_graphs", [True, False], ids=["graphs", "launches"])
def test_ranks_choose_the_tokens_of_one_gpu_until_one_ends(tmp_path: Path, uses_graphs: bool) -> None:
    folder = save_model(LlamaConfig(**sizes()), tmp_path / "tiny")
    others = set(children_of(os.getpid()))
    with start_ranks(settings_of(folder, 1, uses_graphs=uses_graphs)) as (loaded, runner):
        expected = outputs(runner, requests(), scheduler_of(loaded, BLOCK_SIZE))
    with start_ranks(settings_of(folder, 2, uses_graphs=uses_graphs)) as (loaded, runner):
        assert outputs(runner, requests(), scheduler_of(loaded, BLOCK_SIZE)) == expected
        (worker,) = set(children_of(os.getpid())) - others
        os.kill(worker, signal.SIGKILL)
        scheduler = scheduler_of(loaded, BLOCK_SIZE)
        assert scheduler.offer(requests()[0]) is None
        with pytest.raises(DeviceLostError, match="rank 1"):
            runner.launch(scheduler.schedule()).result()
