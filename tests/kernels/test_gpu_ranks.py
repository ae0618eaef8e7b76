"""Ranks of the GPU forward pass in one process, by Triton's interpreter: the logits of transformers, and the tokens of
the generic forward pass.

Each rank computes on a thread, and one of them at a time, because the interpreter is not made for more. Messages are
those of the leader to its workers; processes and the exchange between them are left to `tests/stack`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig, Olmo2Config, PretrainedConfig, Qwen2MoeConfig, Qwen3Config

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.checkpoint.shards import WHOLE, Shard
from inflight.executor.engine.runner import StepSizes
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.forward.gpu_ranks import GpuRanks
from inflight.executor.gpu.graphs import Bucket
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.parallel.gpu_shard import GpuShard
from inflight.executor.parallel.messages import Kind
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Processors, Sampling, Sequence, Stopping
from tests.kernels.test_gpu_graphs import Captured
from tests.kernels.test_gpu_runner import BLOCK_SIZE, NUM_BLOCKS, assert_same_sequences, outputs
from tests.kernels.test_gpu_runner import LIMITS as LIMITS_OF_ONE
from tests.kernels.test_gpu_runner import load as load_with_kv
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes

TIMEOUT_S = 300.0
# Each launch takes the interpreter long.
LIMITS = replace(LIMITS_OF_ONE, max_num_sequences=1, context_length=16)
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0}
# The ranks of `4-of-2` have unequal parts of every matrix, and some have none. So it is with those of an expert.
FAMILY: dict[str, tuple[PretrainedConfig, int]] = {
    "llama-bias-tied": (LlamaConfig(**sizes(num_hidden_layers=1, attention_bias=True, tie_word_embeddings=True)), 2),
    "gemma2": (Gemma2Config(**sizes(num_hidden_layers=1, **GEMMA, attn_logit_softcapping=2.0)), 2),
    "qwen3-4-of-2-kv-heads": (Qwen3Config(**sizes(num_hidden_layers=1)), 4),
    "qwen2-moe": (
        Qwen2MoeConfig(
            **sizes(num_experts=4, moe_intermediate_size=20, shared_expert_intermediate_size=36, mlp_only_layers=[0]),
            num_experts_per_tok=2,
        ),
        2,
    ),
}


class Turns:
    """Threads that compute in turn, and change at their exchanges."""

    def __init__(self, num_ranks: int) -> None:
        self.turn = threading.Condition()
        self.failure = ""
        self.gathered: list[Tensor] = []
        self._parts: dict[int, Tensor] = {}
        self._num_ranks = num_ranks

    def all_gather(self, rank: int, part: Tensor) -> Tensor:
        self._parts[rank] = part.clone()
        gathered = self.gathered
        if len(self._parts) == self._num_ranks:
            self.gathered = gathered = [self._parts[number] for number in range(self._num_ranks)]
            self._parts = {}
            self.turn.notify_all()
        else:
            self.turn.wait_for(lambda: self.gathered is not gathered or self.failure, TIMEOUT_S)
            if self.failure:
                raise RuntimeError("a rank has left the exchange")
        return torch.stack(self.gathered)

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.turn.notify_all()


class OfRank:
    """`Ranks` of a thread."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self._rank = turns, rank

    def all_gather(self, part: Tensor) -> Tensor:
        return self._turns.all_gather(self._rank, part)

    def broadcast(self, values: Tensor) -> None:
        values.copy_(self._turns.all_gather(self._rank, values)[0])


class Group:
    """A `WorkerGroup` whose workers are threads of this process."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.shard = Shard(0, num_ranks)
        self._turns = Turns(num_ranks)
        self._messages = [queue.SimpleQueue[tuple[Kind, bytes] | None]() for _ in range(1, num_ranks)]
        self._threads = ThreadPoolExecutor(num_ranks)
        self._workers = [self._threads.submit(self._work, folder, rank) for rank in range(1, num_ranks)]

    @property
    def failure(self) -> str:
        return self._turns.failure

    def join(self, hello: object) -> None:
        pass

    def open_device_exchange(self, device: torch.device) -> OfRank:
        return OfRank(self._turns, 0)

    def send(self, kind: Kind, content: bytes) -> None:
        for messages in self._messages:
            messages.put((kind, content))

    def cause(self, otherwise: str) -> str:
        return self._turns.failure or otherwise

    @contextmanager
    def leading(self) -> Iterator[None]:
        """In it this thread computes, in turn with the others. Ends them afterwards."""
        try:
            with self._turns.turn:
                yield
        finally:
            for messages in self._messages:
                messages.put(None)
            self._threads.shutdown()

    def raise_failures(self) -> None:
        """Raises what a worker has failed with."""
        for worker in self._workers:
            worker.result()

    def _work(self, folder: Path, rank: int) -> None:
        messages = self._messages[rank - 1]
        with self._turns.turn:
            model = load(folder, self.shard.of(rank))
            assert isinstance(model.forward, GpuForward)
            exchange: Any = OfRank(self._turns, rank)
            shard = GpuShard(model, model.forward.decoder, exchange, lambda sizes: 0)
        while (message := messages.get()) is not None:
            with self._turns.turn:
                try:
                    shard.execute(*message)
                except Exception as error:
                    self._turns.fail(f"rank {rank}: {error}")
                    raise


def load(folder: Path, shard: Shard = WHOLE, group: Group | None = None) -> PagedModel:
    return load_model(
        resolve_model(str(folder)),
        dtype_name="float32",
        backend_name="triton",
        device_name="cpu",
        shard=shard,
        group=cast(Any, group),
    )


@pytest.mark.parametrize("name", FAMILY)
def test_ranks_yield_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    config, num_ranks = FAMILY[name]
    folder = save_model(config, tmp_path / "tiny", has_random_vectors=True)
    group = Group(folder, num_ranks)
    with group.leading():
        # Loading compares them.
        assert isinstance(load(folder, group.shard, group).forward, GpuRanks)
    group.raise_failures()


def test_norms_of_all_heads_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = save_model(Olmo2Config(**sizes(num_hidden_layers=1)), tmp_path / "tiny")
    with pytest.raises(ModelError, match="its norms of queries and keys cover the heads of all ranks"):
        load(folder, Shard(1, 2))


def various_requests() -> list[Sequence]:
    """A greedy row that reports log probabilities, also of its prompt, a seeded one, and one that is restricted and
    changed."""
    samplings = [Sampling(0.0, 0, 1.0, 0), Sampling(1.0, 0, 1.0, 2**63 + 5), Sampling(0.8, 5, 1.0, 7)]
    requests = []
    for number, sampling in enumerate(samplings):
        prompt = [(7 * number + 5 * i) % VOCABULARY_SIZE for i in range(2 + number)]
        stopping = Stopping(2, 0, frozenset())
        requests.append(Sequence(f"r{number}", 1, prompt, len(prompt), sampling, stopping, 1, b"salt"))
    requests[0].num_top_logprobs, requests[0].num_prompt_logprobs = 2, 1
    requests[2].processors = Processors(((11, 3.0),), presence_penalty=2.0)
    return requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**sizes(num_hidden_layers=1))
    return save_model(config, tmp_path_factory.mktemp("model") / "tiny")


def test_ranks_choose_the_tokens_of_the_generic_forward_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, ours = various_requests(), various_requests()
    outputs(ModelRunner(load_with_kv(folder, "reference"), LIMITS, BLOCK_SIZE), expected, scheduler())

    replays: list[dict[Bucket, int]] = [{}, {}]
    graphed = partial(GpuRunner, capture_graphs=Captured(replays[1]))
    # There is nothing to compile.
    monkeypatch.setattr("inflight.executor.gpu.runner.warm_up_lengths", lambda *_: [[1]])
    monkeypatch.setattr("inflight.executor.parallel.gpu_shard.GpuRunner", graphed)
    group = Group(folder, 2)
    with group.leading():
        runner = leading_runner(folder, group, Captured(replays[0]))
        outputs(runner, ours, scheduler())
    group.raise_failures()

    assert_same_sequences(ours, expected)
    assert replays[0] == replays[1] != {}


def scheduler() -> Scheduler:
    return Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))


def leading_runner(folder: Path, group: Group, captured: Captured) -> GpuRunner:
    """The leader's runner, prepared together with those of the others."""
    forward = load(folder, group.shard, group).forward
    assert isinstance(forward, GpuRanks)
    kv = forward.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    forward.start_runners(StepSizes(LIMITS, BLOCK_SIZE, uses_graphs=True, max_graph_tokens=0))
    runner = GpuRunner(
        forward.own.decoder,
        kv,
        LIMITS,
        BLOCK_SIZE,
        max_graph_tokens=0,
        capture_graphs=captured,
        followers=forward,
    )
    runner.prepare()
    return runner
