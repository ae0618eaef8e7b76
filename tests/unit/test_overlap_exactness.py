"""A model gives the same tokens whether or not a step is launched while the one before is computed."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Batching, Scheduler, SchedulerLimits
from inflight.executor.scheduler.sequence import FinishReason, Sampling, Sequence, Stopping
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.scheduler.scheduling import make_limits

BLOCK_SIZE = 16
NUM_BLOCKS = 64
LIMITS = make_limits(max_num_sequences=4, num_standby_sequences=16, max_num_tokens=24, context_length=128)

Ends = dict[str, tuple[list[int], FinishReason]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedModel]:
    folder = save_model(LlamaConfig(**sizes()), tmp_path_factory.mktemp("model") / "tiny")
    with torch_threads(1):
        loaded = load_model(resolve_model(str(folder)), dtype_name="float32", device_name="cpu")
        loaded.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        yield loaded


def crowd() -> list[Sequence]:
    """Prompts that share beginnings, greedy and sampled, with stop tokens, least and largest numbers of tokens."""
    made = []
    for i in range(12):
        prompt = [3 + (7 * j) % 90 for j in range(20 * (i % 3))] + [5 + i, 9]
        sampling = Sampling(0.0, 0, 1.0, 0) if i % 2 else Sampling(0.9, 20 * (i % 4), 0.9, 1000 + i)
        stopping = Stopping(4 + 3 * i, i % 5, frozenset(range(VOCABULARY_SIZE - 12 * (i % 4), VOCABULARY_SIZE)))
        num_blocks = -(-(len(prompt) + stopping.max_tokens) // BLOCK_SIZE)
        made.append(Sequence(f"r{i}", 1, prompt, len(prompt), sampling, stopping, num_blocks, b""))
    return made


def ride(model: PagedModel, limits: SchedulerLimits, overlap: bool) -> Ends:
    """What a crowd that arrives at once gets."""
    outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
    runner = ModelRunner(model, limits, BLOCK_SIZE)
    scheduler = Scheduler(limits, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    engine = Engine(scheduler, runner, outputs.put, lambda error: None, overlap=overlap)
    for sequence in crowd():
        engine.submit(sequence)
    engine.start()
    ends: Ends = {}
    while len(ends) < len(crowd()):
        for event in outputs.get(timeout=60).finished:
            token_ids = event.sequence.token_ids[event.sequence.num_prompt_tokens :]
            ends[event.sequence.request_id] = (token_ids, event.reason)
    engine.stop()
    runner.close()
    scheduler.check_when_idle()
    return ends


@pytest.mark.parametrize(
    "limits",
    [LIMITS, replace(LIMITS, enable_chunked_context=False), replace(LIMITS, batching=Batching.STATIC)],
    ids=["inflight", "without-chunks", "static"],
)
def test_overlap_changes_no_token(model: PagedModel, limits: SchedulerLimits) -> None:
    in_turn, overlapped = (ride(model, limits, overlap) for overlap in (False, True))

    assert overlapped == in_turn
    assert {reason for _, reason in in_turn.values()} == {FinishReason.STOP_TOKEN, FinishReason.LENGTH}
