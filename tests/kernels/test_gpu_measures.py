"""`make bench-gpu` on a tiny model and without a GPU: that it runs, not how fast."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from inflight.bench.gpu.engine.random_model import RandomModel, make_model
from inflight.bench.gpu.engine.steps import decode_step_s, prefill_step_s
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.scheduler.sequence import Processors
from tests.support.checkpoints.tiny_models import sizes
from tests.support.scheduler.scheduling import make_limits

BLOCK_SIZE = 16
LIMITS = make_limits(max_num_sequences=2, num_standby_sequences=3, max_num_tokens=16, context_length=64)


@pytest.fixture(scope="module")
def model() -> RandomModel:
    config = LlamaConfig(**sizes(num_hidden_layers=1))
    with torch.random.fork_rng(devices=[]):
        return make_model(config, TritonAttention(), torch.float32, torch.device("cpu"))


def runner_of(model: RandomModel, num_blocks: int) -> GpuRunner:
    return GpuRunner(model.decoder, model.allocate_kv(num_blocks, BLOCK_SIZE), LIMITS, BLOCK_SIZE)


def test_steps_are_timed(model: RandomModel) -> None:
    runner = runner_of(model, 16)
    assert decode_step_s(runner, 2, context=20, block_size=BLOCK_SIZE, num_steps=2) > 0
    assert decode_step_s(runner, 2, 20, BLOCK_SIZE, num_steps=2, processors=Processors(presence_penalty=1.0)) > 0
    runner.repeat_decodes(2)
    assert prefill_step_s(runner, 10, BLOCK_SIZE, repetitions=1) > 0
