"""Ranks of the GPU forward pass as processes that exchange over gloo, by Triton's interpreter: the tokens of the
generic forward pass, and the end of the executor when a rank ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal

import pytest
import torch.distributed as dist
from transformers import LlamaConfig

from inflight.executor.engine.runner import DeviceLostError
from inflight.executor.scheduler.sequence import Sampling, Sequence, Stopping
from inflight.executor.settings import ExecutorSettings
from tests.kernels.test_gpu_runner import assert_same_sequences, outputs, sequence
from tests.stack.test_tensor_parallel import children_of
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.stack.ranked_executor import scheduler_of, start_ranks

BLOCK_SIZE = 16


def settings_of(folder: Path, num_ranks: int, backend: Literal["reference", "triton"]) -> ExecutorSettings:
    return ExecutorSettings(
        insecure=True,
        model=str(folder),
        device="cpu",
        attention_backend=backend,
        dtype="float32",
        num_threads=1,
        max_num_sequences=2,
        max_num_tokens=16,
        max_sequence_length=16,
        max_tokens_in_paged_kv_cache=64,
        tensor_parallel_size=num_ranks,
        # What is compared are tokens, on machines of any load.
        tensor_parallel_timeout_s=60,
    )


def requests() -> list[Sequence]:
    """A greedy and a seeded one, which share steps."""
    both = [sequence(0, 3, Sampling(0.0, 0, 1.0, 0)), sequence(1, 2, Sampling(1.0, 0, 1.0, 2**63 + 5))]
    for one in both:
        one.stopping, one.num_reserved_blocks = Stopping(3, 0, frozenset()), 1
    return both


@pytest.mark.timeout(600)
def test_ranks_choose_the_tokens_of_the_generic_forward_pass_until_one_ends(tmp_path: Path) -> None:
    config = LlamaConfig(**sizes(num_hidden_layers=1, max_position_embeddings=32))
    folder = save_model(config, tmp_path / "tiny")
    expected, ours = requests(), requests()
    others = set(children_of(os.getpid()))
    with torch_threads(1):
        with start_ranks(settings_of(folder, 1, "reference")) as (loaded, runner):
            outputs(runner, expected, scheduler_of(loaded, BLOCK_SIZE))
        with start_ranks(settings_of(folder, 2, "triton")) as (loaded, runner):
            outputs(runner, ours, scheduler_of(loaded, BLOCK_SIZE))
            assert_same_sequences(ours, expected)
            # When the worker is killed between steps
            (worker,) = set(children_of(os.getpid())) - others
            os.kill(worker, signal.SIGKILL)
            # Then the next step fails with the cause, as one after which there is none
            scheduler = scheduler_of(loaded, BLOCK_SIZE)
            assert scheduler.offer(requests()[0]) is None
            with pytest.raises(DeviceLostError, match="rank 1"):
                runner.launch(scheduler.schedule()).result()
    # And tests that follow in this process can open another process group
    assert not dist.is_initialized()
