"""A leader in this process with real workers: the tokens of one rank, bit by bit, in shared memory and over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from common.guard import guarded
from common.model_source import ModelError
from executor.main import Loaded, load_model
from executor.model.runner import ModelRunner
from executor.scheduler.blocks import BlockPool
from executor.scheduler.scheduler import Scheduler
from executor.scheduler.sequence import NO_PROCESSORS, Processors, Sampling, Sequence, StepResult, Stopping
from executor.settings import ExecutorSettings
from inflight.local.ports import free_ports
from tests.tiny_models import save_model, sizes
from tests.torch_threads import torch_threads

BLOCK_SIZE = 16
NUM_TOKENS = 24
FOUR_KV_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 144, "intermediate_size": 200}
SETTINGS: dict[str, Any] = {
    "insecure": True,
    "device": "cpu",
    "num_threads": 1,
    "max_num_sequences": 6,
    "max_num_tokens": 64,
    "max_tokens_in_paged_kv_cache": 2048,
    # What is compared are tokens, on machines of any load.
    "tensor_parallel_timeout_s": 60,
}
GREEDY = Sampling(0.0, 0, 1.0, 0)
SAMPLINGS = (
    GREEDY,
    Sampling(1.0, 0, 1.0, 7),
    Sampling(0.8, 20, 0.9, 2**63),
    Sampling(1.2, 0, 1.0, 3, min_p=0.05),
)
PENALTIES = Processors(repetition_penalty=1.3, presence_penalty=0.5)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@contextmanager
def loaded(model: str, num_ranks: int, **changes: Any) -> Iterator[Loaded]:
    one = load_model(ExecutorSettings(**SETTINGS | {"model": model, "tensor_parallel_size": num_ranks} | changes))
    try:
        yield one
    finally:
        if one.group is not None:
            one.group.close()


def tokens_of(one: Loaded) -> list[list[int]]:
    """The outputs of greedy, seeded and changed requests that share steps."""
    scheduler = Scheduler(one.limits, BlockPool(one.num_blocks, BLOCK_SIZE))
    runner = ModelRunner(one.model, one.limits, BLOCK_SIZE)
    requests = [request(number, sampling) for number, sampling in enumerate(SAMPLINGS)]
    requests += [request(8, GREEDY, PENALTIES), request(9, SAMPLINGS[1], PENALTIES)]
    for one_request in requests:
        assert scheduler.offer(one_request) is None
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        pending = runner.launch(plan)
        scheduler.update(StepResult(plan, pending.result(), pending.logprobs()))
    runner.close()
    return [one_request.token_ids[one_request.num_prompt_tokens :] for one_request in requests]


def request(number: int, sampling: Sampling, processors: Processors = NO_PROCESSORS) -> Sequence:
    prompt = [3 + (number * 7 + i * i) % 80 for i in range(4 + 9 * number)]
    num_blocks = -(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE)
    stopping = Stopping(NUM_TOKENS, 0, frozenset())
    return Sequence(f"r{number}", 1, prompt, len(prompt), sampling, stopping, num_blocks, None, processors=processors)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("config", "num_ranks", "changes"),
    [
        (LlamaConfig(**sizes()), 2, {"dtype": "float32"}),
        (Qwen3Config(**sizes(**FOUR_KV_HEADS)), 4, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        (None, 3, {"dtype": "float32"}),
    ],
    ids=["llama-2", "qwen3-4", "smollm2-3"],
)
def test_ranks_choose_the_tokens_of_one_rank(
    tmp_path: Path, config: PretrainedConfig | None, num_ranks: int, changes: dict[str, Any]
) -> None:
    model = "" if config is None else str(save_model(config, tmp_path / "tiny"))
    with loaded(model, 1, **changes) as one:
        expected = tokens_of(one)
    with loaded(model, num_ranks, **changes) as one:
        assert tokens_of(one) == expected


@pytest.mark.timeout(600)
def test_workers_that_join_by_themselves_choose_the_same_tokens(tmp_path: Path) -> None:
    """As on other machines: over gloo."""
    model = str(save_model(LlamaConfig(**sizes()), tmp_path / "tiny"))
    with loaded(model, 1, dtype="float32") as one:
        expected = tokens_of(one)
    (port,) = free_ports("127.0.0.1", 1)
    address = f"127.0.0.1:{port}"
    flags = {"model": model, "dtype": "float32", "device": "cpu", "num-threads": "1", "tensor-parallel-size": "2"}
    flags |= {"tensor-parallel-rank": "1", "tensor-parallel-leader": address}
    command = [sys.executable, "-m", "inflight.cli.main", "executor", "--insecure"]
    command += [word for name, value in flags.items() for word in (f"--{name}", value)]
    worker = subprocess.Popen(guarded(command), env=dict(os.environ))
    with loaded(model, 2, dtype="float32", tensor_parallel_listen=address) as one:
        assert tokens_of(one) == expected
    assert worker.wait(60) == 0


def test_size_that_does_not_divide_the_heads_is_refused_with_sizes_that_work() -> None:
    with pytest.raises(ModelError, match="9 heads and 3 KV heads cannot be divided by 2; sizes that work: 1, 3"):
        load_model(ExecutorSettings(**SETTINGS, tensor_parallel_size=2))


def test_forward_pass_without_ranks_is_refused() -> None:
    with pytest.raises(ModelError, match="needs the native forward pass"):
        load_model(ExecutorSettings(**SETTINGS, tensor_parallel_size=3, forward="transformers"))
