"""The host tier on a GPU: locked memory, copies on the stream of the steps, graphs replayed behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.common.model_source import resolve_model
from inflight.executor.attention.backend import KvShape
from inflight.executor.attention.gpu_host_tier import GpuHostTier
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from tests.kernels.test_gpu_decoder import FAMILY
from tests.support.checkpoints.tiny_models import save_model
from tests.support.device.swapping import BLOCK_SIZE, LIMITS, NUM_BLOCKS, greedy_tokens

pytestmark = pytest.mark.gpu


def load(folder: Path, backend_name: str) -> PagedModel:
    source = resolve_model(str(folder))
    model = load_model(source, dtype_name="float32", backend_name=backend_name, device_name="cuda")
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return model


def test_blocks_come_back_elsewhere_bit_for_bit(gpu: torch.device) -> None:
    # Given more blocks of a model of Llama-8B's size than are on their way at once
    num_blocks, num_host_blocks = 200, 80
    kv = [TritonAttention().allocate(KvShape(8, 128), num_blocks, 16, torch.bfloat16, gpu) for _ in range(32)]
    for layer in kv:
        layer.keys.normal_()
        layer.values.normal_()
    before = [rows.clone() for layer in kv for rows in layer.rows()]
    tier = GpuHostTier(kv, num_host_blocks)
    order = torch.randperm(num_blocks - 1)[:num_host_blocks].add(1).tolist()
    hosts = torch.randperm(num_host_blocks).tolist()
    back = torch.randperm(num_blocks - 1)[:num_host_blocks].add(1).tolist()

    # When they are overwritten as soon as they are launched on their way, and come back
    tier.swap(list(zip(order, hosts, strict=True)), [])
    for layer in kv:
        layer.keys.zero_()
        layer.values.zero_()
    tier.swap([], list(zip(hosts, back, strict=True)))

    for now, then in zip([rows for layer in kv for rows in layer.rows()], before, strict=True):
        assert torch.equal(now[back], then[order])


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("uses_graphs", [True, False], ids=["graphs", "launches"])
def test_sequence_goes_on_after_its_blocks_were_away(tmp_path: Path, uses_graphs: bool, num_ahead: int) -> None:
    folder = save_model(FAMILY["llama"], tmp_path / "llama")
    model = load(folder, "triton")
    assert isinstance(model.forward, GpuForward)

    def tokens(swap_after: int | None) -> list[int]:
        assert isinstance(model.forward, GpuForward)
        runner = GpuRunner(model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE, uses_graphs=uses_graphs)
        runner.prepare()
        return greedy_tokens(runner, swap_after=swap_after, num_ahead=num_ahead)

    assert tokens(6) == tokens(None)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_generic_runner_swaps_too(tmp_path: Path, num_ahead: int) -> None:
    model = load(save_model(FAMILY["llama"], tmp_path / "llama"), "reference")

    def tokens(swap_after: int | None) -> list[int]:
        return greedy_tokens(ModelRunner(model, LIMITS, BLOCK_SIZE), swap_after=swap_after, num_ahead=num_ahead)

    assert tokens(6) == tokens(None)
