"""LoRA on the GPU forward pass in Triton's interpreter: kernels against torch, models against PEFT's merged ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from inflight.common.settings import load
from inflight.executor.adapters.errors import AdapterError
from inflight.executor.adapters.peft_files import PREFIX, parse, read_files
from inflight.executor.adapters.weights import AdapterLimits
from inflight.executor.device import DTYPES
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.adapters import AdapterSlots, slot_bytes
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.loader import load_executor
from inflight.executor.model.runner import ModelRunner
from inflight.executor.settings import ExecutorSettings
from inflight.tools.sizing.arithmetic import GIBIBYTE, Machine, MemoryOptions, pool_of
from inflight.tools.sizing.model_shape import read_model_shape
from tests.kernels.adapted import (
    CPU,
    NUM_SLOTS,
    NUM_TOKENS,
    adapted_requests,
    adapter_files,
    assert_rows_change_by_their_adapters,
    load_adapted,
    merged_tokens,
    random_weights,
)
from tests.kernels.test_gpu_runner import BLOCK_SIZE, LIMITS, NUM_BLOCKS, outputs
from tests.support.checkpoints.adapter_files import SHAPE, TARGETS, save_adapter, tensors
from tests.support.checkpoints.tiny_models import save_model, sizes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return adapter_files(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LlamaConfig(**sizes()), tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_change_by_their_adapters(dtype: torch.dtype) -> None:
    assert_rows_change_by_their_adapters(dtype)


def held_bytes(slots: AdapterSlots) -> int:
    return sum(tensor.nbytes for kind in (slots._a, slots._b) for layer in kind for tensor in layer.values())


def test_slot_takes_the_bytes_that_are_announced_and_no_higher_rank() -> None:
    slots = AdapterSlots(SHAPE, NUM_SLOTS, 20, torch.float32, CPU)
    assert held_bytes(slots) == NUM_SLOTS * slot_bytes(SHAPE, 20, torch.float32)
    with pytest.raises(ValueError, match="rank 21 does not fit"):
        slots.load(0, random_weights(SHAPE, 21, 0))


@pytest.mark.parametrize("max_rank", [1, 16, 20, 64])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_slots_take_the_bytes_that_are_predicted(dtype: str, max_rank: int, base: Path) -> None:
    slots = AdapterSlots(SHAPE, NUM_SLOTS, max_rank, DTYPES[dtype], CPU)
    machine = Machine(GIBIBYTE, True, 0.9, 0, MemoryOptions(max_adapters=NUM_SLOTS, max_adapter_rank=max_rank))
    assert pool_of(read_model_shape(str(base)), machine, dtype, BLOCK_SIZE).adapter_bytes == held_bytes(slots)


def test_slot_holds_nothing_of_the_adapter_before() -> None:
    used, fresh = (AdapterSlots(SHAPE, 1, 16, torch.float32, CPU) for _ in range(2))
    used.load(0, random_weights(SHAPE, 16, 0))
    for slots in (used, fresh):
        slots.load(0, random_weights(SHAPE, 2, 1, frozenset({0, 3, 6})))
    for kind in ("_a", "_b"):
        for mine, others in zip(getattr(used, kind), getattr(fresh, kind), strict=True):
            assert all(torch.equal(mine[product], others[product]) for product in mine)


@pytest.fixture(scope="module")
def together(base: Path, files: list[Path]) -> list[list[int]]:
    """What requests of all adapters and of the base yield in one batch."""
    model, decoder = load_adapted(base, files, "cpu", NUM_BLOCKS)
    return outputs(GpuRunner(decoder, model.kv, LIMITS, BLOCK_SIZE), adapted_requests())


@pytest.mark.filterwarnings("ignore")
def test_adapters_and_the_base_in_one_batch_say_what_each_says_alone_and_merged(
    base: Path, files: list[Path], together: list[list[int]]
) -> None:
    model, decoder = load_adapted(base, files, "cpu", NUM_BLOCKS)
    assert len({tuple(output) for output in together}) == len(together)
    for number in range(3):
        alone = adapted_requests((number,))
        assert outputs(GpuRunner(decoder, model.kv, LIMITS, BLOCK_SIZE), alone) == [together[number]]
    for number, adapter in ((1, 0), (3, 2), (4, 0)):
        (request,) = adapted_requests((number,))
        assert together[number] == merged_tokens(base, files[adapter], request.token_ids, NUM_TOKENS)


def test_generic_runner_says_the_same(base: Path, files: list[Path], together: list[list[int]]) -> None:
    model, _ = load_adapted(base, files, "cpu", NUM_BLOCKS)
    assert outputs(ModelRunner(model, LIMITS, BLOCK_SIZE), adapted_requests()) == together


def test_executor_serves_adapters_with_the_gpu_forward_pass(base: Path, files: list[Path]) -> None:
    flags = ["--model", str(base), "--device", "cpu", "--attention-backend", "triton", "--dtype", "float32"]
    flags += ["--adapter-folder", str(files[0].parent), "--max-adapters", "2", "--max-adapter-rank", "16"]
    flags += ["--max-tokens-in-paged-kv-cache", "256", "--max-num-sequences", "2", "--max-num-tokens", "16"]
    loaded = load_executor(load(ExecutorSettings, "inflight executor", flags))
    assert isinstance(loaded.model.forward, GpuForward)
    assert loaded.model.forward.decoder.num_adapter_slots == 2
    assert loaded.adapters is not None
    assert [one.rank for one in loaded.adapters.states()] == [4, 16, 3]


ATTENTION = TARGETS[:4]


@pytest.mark.filterwarnings("ignore")
def test_adapters_change_attention_beside_experts(tmp_path: Path) -> None:
    # Given an adapter of attention, and one that has a projection of an expert too
    config = Qwen3MoeConfig(**sizes(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))
    base = save_model(config, tmp_path / "model", has_random_vectors=True)
    weights, targets = tensors(0, targets=ATTENTION), list(ATTENTION)
    adapter = save_adapter(tmp_path / "attention", weights=weights, target_modules=targets)
    expert = f"{PREFIX}model.layers.0.mlp.experts.1.gate_proj.lora_A.weight"
    refused = save_adapter(
        tmp_path / "expert", weights=weights | {expert: torch.zeros(4, 64)}, target_modules=[*targets, "gate_proj"]
    )
    # When one is loaded
    model, decoder = load_adapted(base, [adapter], "cpu", NUM_BLOCKS)
    found = outputs(GpuRunner(decoder, model.kv, LIMITS, BLOCK_SIZE), adapted_requests((0, 1, 4)))
    # Then rows of it say what the merged model says, and its slots take the predicted memory
    for output, request in zip(found[1:], adapted_requests((1, 4)), strict=True):
        assert output == merged_tokens(base, adapter, request.token_ids, NUM_TOKENS)
    machine = Machine(GIBIBYTE, True, 0.9, 0, MemoryOptions(max_adapters=NUM_SLOTS, max_adapter_rank=16))
    assert decoder._adapters is not None
    assert pool_of(read_model_shape(str(base)), machine, "float32", BLOCK_SIZE).adapter_bytes == held_bytes(
        decoder._adapters
    )
    # And the other is refused by the name of the projection
    with pytest.raises(AdapterError, match="target_modules names 'gate_proj'"):
        parse(read_files(refused), AdapterLimits(decoder.shape, 16))
