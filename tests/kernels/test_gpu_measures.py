"""`make bench-gpu` on a tiny model and without a GPU: that it runs, not how fast."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import LlamaConfig

from inflight.bench.gpu.engine.peers import serve_static
from inflight.bench.gpu.engine.random_model import RandomModel, make_model
from inflight.bench.gpu.engine.serving import TimedRequest, blocks_of, serve
from inflight.bench.gpu.engine.session import Sizes
from inflight.bench.gpu.engine.steps import decode_step_s, prefill_step_s
from inflight.bench.gpu.engine.traffic import decode_launches
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.scheduler.limits import Batching, SchedulerLimits
from inflight.executor.scheduler.sequence import Processors
from tests.support.checkpoints.tiny_models import sizes

BLOCK_SIZE = 16
LIMITS = SchedulerLimits(
    max_num_sequences=2,
    num_standby_sequences=3,
    max_num_tokens=16,
    context_length=64,
    enable_chunked_context=True,
    batching=Batching.INFLIGHT,
    enable_prefix_cache=True,
)
REQUESTS = [TimedRequest([5, 9, 40], 3, 0.0), TimedRequest([7] * 10, 2, 0.01), TimedRequest([8], 3, 0.0)]


@pytest.fixture(scope="module")
def model() -> RandomModel:
    config = LlamaConfig(**sizes(num_hidden_layers=1))
    with torch.random.fork_rng(devices=[]):
        return make_model(config, TritonAttention(), torch.float32, torch.device("cpu"))


def runner_of(model: RandomModel, num_blocks: int) -> GpuRunner:
    return GpuRunner(model.decoder, model.allocate_kv(num_blocks, BLOCK_SIZE), LIMITS, BLOCK_SIZE)


def test_engine_serves_every_request_and_times_each_token(model: RandomModel) -> None:
    num_blocks = blocks_of(REQUESTS, BLOCK_SIZE)
    served = serve(runner_of(model, num_blocks), LIMITS, num_blocks, BLOCK_SIZE, REQUESTS)
    assert served.output_tokens == 8
    assert len(served.first_token_s) == 3
    assert len(served.between_tokens_s) == 5
    assert 0 < max(served.first_token_s) <= served.total_s


def test_static_batches_count_the_tokens_that_were_asked_for(model: RandomModel) -> None:
    served = serve_static(model.network, REQUESTS, max_num_sequences=2)
    assert served.output_tokens == 8
    assert len(served.first_token_s) == 3


def test_steps_are_timed(model: RandomModel) -> None:
    runner = runner_of(model, 16)
    assert decode_step_s(runner, 2, context=20, block_size=BLOCK_SIZE, num_steps=2) > 0
    assert decode_step_s(runner, 2, 20, BLOCK_SIZE, num_steps=2, processors=Processors(presence_penalty=1.0)) > 0
    runner.repeat_decodes(2)
    assert prefill_step_s(runner, 10, BLOCK_SIZE, repetitions=1) > 0


def test_launches_of_a_step_are_counted_with_their_bytes() -> None:
    sizes = Sizes(16, 3, 2, 1, 8, 32, 50, has_tied_embeddings=True)
    launches = decode_launches(sizes, 2, context=40)
    count = Counter[str]()
    for launch, number in launches.items():
        count[launch.kernel] += number
    # Of each layer: four products, two norms; the head, the last norm
    assert count["product"] == 3 * 4 + 1
    assert count["residual_norm_kernel"] == 3 * 2 + 1
    assert count["attend_kernel"] == count["combine_kernel"] == count["rope_write_kernel"] == count["gated_kernel"] == 3
    attention = next(launch for launch in launches if launch.kernel == "attend_kernel")
    # Keys and values of two sequences, 16 bytes each, are sectors of two tokens; queries and numbers are beside them
    assert 2 * 2 * 40 * 16 <= attention.bytes_loaded <= 2 * 2 * 40 * 16 + 40 * 32
    head = max((launch for launch in launches if launch.kernel == "product"), key=lambda launch: launch.operations)
    assert head.operations == max(2 * 2 * 16 * 50, 2 * 2 * 16 * 64)
