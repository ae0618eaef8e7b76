"""A leader in this process with real workers: the tokens of one rank, bit by bit, in shared memory and over gloo, with
adapters, experts, sliding windows and a host tier."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from inflight.common.guard import guarded
from inflight.common.model_source import ModelError
from inflight.executor.adapters.errors import AdapterError
from inflight.executor.adapters.store import AdapterStore
from inflight.executor.loader import Loaded, load_executor
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import NO_PROCESSORS, Processors, Sampling, Sequence, StepResult, Stopping
from inflight.executor.settings import ExecutorSettings
from inflight.local.ports import free_ports
from tests.property.test_hybrid_shards import FAMILY as HYBRIDS
from tests.support.checkpoints.adapter_files import save_adapter
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.stack.ranked_executor import load_ranks

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


pytestmark = pytest.mark.usefixtures("one_thread")


def loaded(model: str, num_ranks: int, **changes: Any) -> AbstractContextManager[Loaded]:
    return load_ranks(ExecutorSettings(**SETTINGS | {"model": model, "tensor_parallel_size": num_ranks} | changes))


def various_requests() -> list[Sequence]:
    """Greedy, seeded and changed requests."""
    requests = [request(number, sampling) for number, sampling in enumerate(SAMPLINGS)]
    return [*requests, request(8, GREEDY, PENALTIES), request(9, SAMPLINGS[1], PENALTIES)]


def preempted_requests() -> list[Sequence]:
    """Requests that reserve blocks for their prompts only."""
    requests = various_requests()
    for one_request in requests:
        one_request.num_reserved_blocks = -(-one_request.num_prompt_tokens // BLOCK_SIZE)
    return requests


def tokens_of(one: Loaded, requests: list[Sequence] | None = None) -> list[list[int]]:
    """The outputs of requests that share steps."""
    return run(one, various_requests() if requests is None else requests)[0]


def run(one: Loaded, requests: list[Sequence]) -> tuple[list[list[int]], int]:
    """The outputs, and the blocks that came back from the host tier."""
    num_swapped_in = 0
    scheduler = Scheduler(one.limits, BlockPool(one.num_blocks, BLOCK_SIZE))
    runner = ModelRunner(one.model, one.limits, BLOCK_SIZE)
    for one_request in requests:
        assert scheduler.offer(one_request) is None
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        num_swapped_in += len(plan.swaps_in)
        pending = runner.launch(plan)
        scheduler.update(StepResult(plan, pending.result(), pending.logprobs()))
    runner.close()
    return [one_request.token_ids[one_request.num_prompt_tokens :] for one_request in requests], num_swapped_in


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
        (LlamaConfig(**sizes()), 4, {"dtype": "bfloat16"}),
        (MixtralConfig(**sizes(num_local_experts=4, num_experts_per_tok=2)), 2, {"dtype": "bfloat16"}),
        (
            Qwen3MoeConfig(**sizes(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=160)),
            2,
            {"dtype": "bfloat16", "weight_dtype": "int8"},
        ),
    ],
    ids=["llama-2", "qwen3-4", "smollm2-3", "llama-4-of-2-kv-heads", "mixtral-2", "qwen3-moe-2"],
)
def test_ranks_choose_the_tokens_of_one_rank(
    tmp_path: Path, config: PretrainedConfig | None, num_ranks: int, changes: dict[str, Any]
) -> None:
    model = "" if config is None else str(save_model(config, tmp_path / "tiny"))
    with loaded(model, 1, **changes) as one:
        expected = tokens_of(one)
    with loaded(model, num_ranks, **changes) as one:
        assert tokens_of(one) == expected


def long_requests() -> list[list[Sequence]]:
    """Requests whose prompts take several steps, the first of which yield no token of any row. Each is alone."""
    return [[request(15, sampling)] for sampling in SAMPLINGS[:2]]


@pytest.mark.timeout(600)
def test_prompt_longer_than_a_step_yields_the_tokens_of_one_rank(tmp_path: Path) -> None:
    model = str(save_model(LlamaConfig(**sizes()), tmp_path / "tiny"))
    with loaded(model, 1, dtype="float32") as one:
        expected = [tokens_of(one, alone) for alone in long_requests()]
    with loaded(model, 2, dtype="float32") as one:
        assert [tokens_of(one, alone) for alone in long_requests()] == expected
    with loaded_with_worker(model) as one:
        assert [tokens_of(one, alone) for alone in long_requests()] == expected


@pytest.mark.timeout(600)
def test_ranks_with_a_host_tier_choose_the_tokens_of_one_rank(tmp_path: Path) -> None:
    model = str(save_model(LlamaConfig(**sizes()), tmp_path / "tiny"))
    changes: dict[str, Any] = {"dtype": "float32", "batch_scheduler_policy": "max_utilization"}
    changes |= {"max_tokens_in_paged_kv_cache": 18 * BLOCK_SIZE, "kv_cache_host_memory_bytes": 1 << 20}
    with loaded(model, 1, **changes) as one:
        expected, num_swapped_in = run(one, preempted_requests())
    assert num_swapped_in > 0
    with loaded(model, 2, **changes) as one:
        assert run(one, preempted_requests()) == (expected, num_swapped_in)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "host_bytes"), [("lfm2", 8 << 20), ("qwen3_5", 0), ("granite", 0)], ids=["lfm2", "qwen3.5", "granite"]
)
def test_ranks_with_recurrent_state_choose_the_tokens_of_one_rank(tmp_path: Path, family: str, host_bytes: int) -> None:
    """With sequences that are preempted, whose state comes back or is computed again, and a prompt that finds a
    checkpoint."""
    model = str(save_model(HYBRIDS[family], tmp_path / "tiny"))
    changes: dict[str, Any] = {"dtype": "float32", "batch_scheduler_policy": "max_utilization"}
    changes |= {"max_tokens_in_paged_kv_cache": 18 * BLOCK_SIZE, "kv_cache_host_memory_bytes": host_bytes}
    found = []
    for num_ranks in (1, 2):
        with loaded(model, num_ranks, **changes) as one:
            limits = one.limits.states
            assert limits is not None
            tokens, num_swapped_in = run(one, preempted_requests())
            assert (num_swapped_in > 0) == (host_bytes > 0)
            # The second one loads what the first saves, where so little memory holds a checkpoint.
            twice = [replace(request(8, GREEDY), request_id=name, cache_salt=b"") for name in "ab"]
            found.append((tokens, tokens_of(one, twice), limits.num_slots, limits.num_checkpoints))
        assert [each.num_cached_tokens > 0 for each in twice] == [False, family != "granite"]
    assert found[0] == found[1]


@pytest.mark.timeout(600)
def test_ranks_with_a_pool_for_windows_choose_the_tokens_of_one_rank(tmp_path: Path) -> None:
    config = Gemma2Config(**sizes(query_pre_attn_scalar=16, sliding_window=16, max_position_embeddings=1024))
    model, changes = str(save_model(config, tmp_path / "tiny")), {"dtype": "float32", "kv_cache_dtype": "int8"}
    with loaded(model, 1, **changes) as one:
        expected = tokens_of(one)
    with loaded(model, 2, **changes) as one:
        assert one.limits.kv_window is not None
        assert one.limits.kv_window.num_blocks < one.num_blocks
        assert tokens_of(one) == expected


@pytest.mark.timeout(600)
def test_workers_that_join_by_themselves_choose_the_same_tokens(tmp_path: Path) -> None:
    """As on other machines: over gloo."""
    model = str(save_model(LlamaConfig(**sizes()), tmp_path / "tiny"))
    with loaded(model, 1, dtype="float32") as one:
        expected = tokens_of(one)
    with loaded_with_worker(model) as one:
        assert tokens_of(one) == expected


@contextmanager
def loaded_with_worker(model: str, of_worker: Mapping[str, str] = {}, **changes: Any) -> Iterator[Loaded]:
    """Two ranks over gloo, one of which is a process with flags of its own."""
    (port,) = free_ports("127.0.0.1", 1)
    address = f"127.0.0.1:{port}"
    flags = {"model": model, "dtype": "float32", "device": "cpu", "num-threads": "1", "tensor-parallel-size": "2"}
    flags |= {"tensor-parallel-rank": "1", "tensor-parallel-leader": address, **of_worker}
    command = [sys.executable, "-m", "inflight.cli.main", "executor", "--insecure"]
    command += [word for name, value in flags.items() for word in (f"--{name}", value)]
    with subprocess.Popen(guarded(command), env=dict(os.environ)) as worker:
        try:
            with loaded(model, 2, dtype="float32", tensor_parallel_listen=address, **changes) as one:
                yield one
            assert worker.wait(60) == 0
        finally:
            worker.kill()


def holder(store: AdapterStore, number: int, name: str) -> Sequence:
    """A greedy request that holds an adapter."""
    sequence = request(number, GREEDY)
    sequence.adapter_hash = bytes.fromhex({state.name: state.hash for state in store.states()}[name])
    store.hold(sequence)
    return sequence


def adapted(store: AdapterStore, number: int, name: str) -> Sequence:
    """A greedy request with an adapter, which is loaded."""
    sequence = holder(store, number, name)
    if sequence.adapter_slot is None:
        asyncio.run(store.load(sequence))
    return sequence


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    for seed, name in enumerate(("a", "b", "c")):
        save_adapter(folder / name, seed, rank=(4, 16, 3)[seed])
    return folder


def tokens_with_adapters(one: Loaded) -> list[list[int]]:
    """The outputs of requests with three adapters and of those without one, in the same steps."""
    assert one.adapters is not None
    requests = [adapted(one.adapters, number, name) for number, name in enumerate("abca")]
    found = tokens_of(one, [*requests, request(4, GREEDY), request(5, SAMPLINGS[1])])
    one.adapters.release(requests)
    return found


@pytest.mark.timeout(600)
def test_ranks_choose_the_tokens_of_one_rank_with_adapters(tmp_path: Path, adapters: Path) -> None:
    model, changes = str(save_model(LlamaConfig(**sizes()), tmp_path / "tiny")), {"adapter_folder": adapters}
    with loaded(model, 1, dtype="bfloat16", **changes) as one:
        expected = tokens_with_adapters(one)
        base = tokens_of(one, [request(number, GREEDY) for number in range(4)])
    assert all(with_adapter != without for with_adapter, without in zip(expected, base, strict=False))
    with loaded(model, 2, dtype="bfloat16", **changes) as one:
        assert tokens_with_adapters(one) == expected


@pytest.mark.timeout(600)
def test_adapter_that_one_rank_cannot_load_is_refused_until_it_can(tmp_path: Path, adapters: Path) -> None:
    model, there = str(save_model(LlamaConfig(**sizes()), tmp_path / "tiny")), tmp_path / "there"
    with loaded(model, 1, dtype="float32", adapter_folder=adapters, max_adapters=2) as one:
        assert one.adapters is not None
        expected = tokens_of(one, [adapted(one.adapters, 0, "a"), adapted(one.adapters, 1, "b")])
    # Given a worker that lacks an adapter and has other files of another
    shutil.copytree(adapters, there)
    shutil.rmtree(there / "b")
    save_adapter(there / "c", seed=9, rank=3)
    of_worker = {"adapter-folder": str(there)}
    with loaded_with_worker(model, of_worker, adapter_folder=adapters, max_adapters=2) as one:
        store = one.adapters
        assert store is not None
        first = adapted(store, 0, "a")
        # Then neither is loaded anywhere
        for name, reason in (("b", "adapter b cannot be loaded: rank 1: "), ("c", "rank 1: its files differ from")):
            refused = holder(store, 1, name)
            with pytest.raises(AdapterError, match=reason):
                asyncio.run(store.load(refused))
            store.release([refused])
            assert [state.name for state in store.states() if state.is_resident] == ["a"]
        # And it is once the worker has it, with the slot that was tried before
        shutil.copytree(adapters / "b", there / "b")
        assert tokens_of(one, [first, adapted(store, 1, "b")]) == expected


def test_size_that_does_not_divide_the_heads_is_refused_with_sizes_that_work() -> None:
    with pytest.raises(ModelError, match="9 heads and 3 KV heads cannot be divided by 2; sizes that work: 1, 3, 9"):
        load_executor(ExecutorSettings(**SETTINGS, tensor_parallel_size=2))


def test_forward_pass_without_ranks_is_refused() -> None:
    with pytest.raises(ModelError, match="needs the native forward pass"):
        load_executor(ExecutorSettings(**SETTINGS, tensor_parallel_size=3, forward="transformers"))
