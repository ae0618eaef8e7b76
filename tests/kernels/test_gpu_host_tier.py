"""The GPU's runner swaps blocks in the order of its steps; without a GPU, by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from tests.kernels.test_gpu_runner import loaded
from tests.support.device.swapping import BLOCK_SIZE, LIMITS, NUM_BLOCKS, greedy_tokens
from tests.support.scheduler.evicted_prefixes import conversations


def load(folder: Path, backend_name: str) -> PagedModel:
    model = loaded(folder, backend_name)
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return model


def test_sequence_goes_on_after_its_blocks_were_away(folder: Path) -> None:
    reference = ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE)
    undisturbed = greedy_tokens(reference, swap_after=None, num_ahead=0)
    model = load(folder, "triton")
    assert isinstance(model.forward, GpuForward)
    for num_ahead in (0, 1):
        runner = GpuRunner(model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE)
        assert greedy_tokens(runner, swap_after=6, num_ahead=num_ahead) == undisturbed


def test_prefix_that_was_evicted_comes_back_as_it_was(folder: Path) -> None:
    reference, model = load(folder, "reference"), load(folder, "triton")
    assert isinstance(model.forward, GpuForward)
    decoder = model.forward.decoder
    computed, _ = conversations(lambda limits: ModelRunner(reference, limits, BLOCK_SIZE), num_host_blocks=0)
    copied, counts = conversations(lambda limits: GpuRunner(decoder, model.kv, limits, BLOCK_SIZE), num_host_blocks=12)

    assert copied == computed
    assert counts.restored_blocks >= 6
