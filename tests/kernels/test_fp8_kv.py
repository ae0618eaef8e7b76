"""FP8 KV of the Triton kernels, under Triton's interpreter: rounding, attention, whole models and the host tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.attention.backend import KvShape, Scoring
from inflight.executor.attention.quantized import check_backend
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.layers import rope_write, rotation_table
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.tools.sizing.arithmetic import Machine, MemoryOptions, pool_of
from inflight.tools.sizing.model_shape import read_model_shape
from tests.kernels.fp8_kv import assert_attends_to_fp8, poisoned, rounded, stored
from tests.support.device.greedy import generate_together
from tests.support.device.paged_cases import Spec, make_case
from tests.support.device.swapping import BLOCK_SIZE, LIMITS, NUM_BLOCKS, greedy_tokens

pytestmark = pytest.mark.usefixtures("one_seed_and_thread")


def load(folder: Path, kv_cache_dtype: str = "fp8", skip_layers: tuple[int, ...] = ()) -> PagedModel:
    return load_model(
        resolve_model(str(folder)),
        dtype_name="float32",
        backend_name="triton",
        device_name="cpu",
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_skip_layers=skip_layers,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    # Given heads of any size, also with numbers far smaller than the largest, and a head of zeros
    case, shape = make_case([Spec(40, 40)], 16), KvShape(3, 80)
    keys, values = (torch.randn(2, 40, 3, 80) * 2.0 ** torch.randint(-40, 20, (2, 40, 3, 1))).to(dtype)
    keys[0] *= 2.0 ** torch.randint(-25, 0, (3, 80))
    values[1, 0] = 0
    kv = poisoned(shape, case.num_blocks + 1)
    TritonAttention().write(kv, keys, values, case.history)
    for found, exact in zip(stored(kv, case.history.slot_mapping), (keys, values), strict=True):
        assert torch.equal(found, rounded(exact))


def test_projection_writes_what_is_rounded_from_the_plain_kv() -> None:
    # Given the same projection, written in its own dtype and as FP8
    case, shape, num_heads = make_case([Spec(5, 5)], 16), KvShape(3, 20), 3
    qkv = torch.randn(5, (num_heads + 2 * 3) * 20)
    table = rotation_table(torch.rand(10), 1.0, 64)
    plain = TritonAttention().allocate(shape, case.num_blocks + 1, 16, torch.float32, torch.device("cpu"))
    fp8 = poisoned(shape, case.num_blocks + 1)
    slots = case.history.slot_mapping
    queries = [rope_write(qkv.clone(), None, case.batch.positions, slots, table, kv, 1e-5) for kv in (plain, fp8)]
    assert torch.equal(*queries)
    places = slots // 16, slice(None), slots % 16
    for found, exact in zip(stored(fp8, slots), (plain.keys[places], plain.values[places]), strict=True):
        assert torch.equal(found, rounded(exact))


@pytest.mark.parametrize("scoring", [Scoring(0.2), Scoring(0.2, 20), Scoring(0.3, None, 30.0)], ids=str)
def test_attention_is_that_over_the_rounded_numbers(scoring: Scoring) -> None:
    specs = (Spec(1, 1), Spec(1, 65), Spec(9, 9), Spec(5, 70))
    assert_attends_to_fp8(specs, KvShape(2, 20), 2, scoring=scoring)


def test_attention_in_half_precision_and_over_several_splits_is_near() -> None:
    assert_attends_to_fp8((Spec(1, 300), Spec(1, 30)), KvShape(1, 16), 2, dtype=torch.float16)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_head_with_a_number_that_is_none_spoils_its_own_sequence_only(broken: float) -> None:
    backend, case = TritonAttention(), make_case([Spec(1, 20), Spec(1, 30)], 16)
    keys, values = torch.randn(2, case.history.num_tokens, 1, 16)
    keys[5, 0, 3] = broken
    kv = poisoned(KvShape(1, 16), case.num_blocks + 1)
    backend.write(kv, keys, values, case.history)
    outputs = backend.attend(torch.randn(2, 1, 16), kv, case.batch, Scoring(1))
    assert outputs[0].isnan().all()
    assert outputs[1].isfinite().all()


def test_tokens_are_the_same_alone_together_and_after_their_blocks_were_away(folder: Path) -> None:
    model = load(folder)
    assert isinstance(model.forward, GpuForward)
    decoder = model.forward.decoder
    prompts = [[5, 9, 3, 77, 41, 8, 2, 30], [14]]
    together = generate_together(model, prompts, num_tokens=3, chunk_tokens=5)
    assert together == [generate_together(model, [prompt], 3, chunk_tokens=5)[0] for prompt in prompts]
    # When the blocks of a sequence are swapped out and in again, between steps
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    runs = [
        greedy_tokens(GpuRunner(decoder, model.kv, LIMITS, BLOCK_SIZE), swap_after=swap_after, num_ahead=1)
        for swap_after in (None, 6)
    ]
    assert runs[0] == runs[1]


def test_block_has_a_byte_for_each_number_and_a_float32_scale_for_each_token_and_head(two_layers: Path) -> None:
    fp8_bytes, plain_bytes = 2 * 2 * 16 * (16 + 4), 2 * 2 * 16 * 16 * 4
    model, mixed = load(two_layers), load(two_layers, skip_layers=(0,))
    assert (model.forward.layout.bytes_per_block(16), model.description.kv_cache_dtype) == (2 * fp8_bytes, "fp8")
    assert mixed.forward.layout.bytes_per_block(16) == fp8_bytes + plain_bytes
    assert mixed.description.kv_cache_dtype == "fp8 except float32 in layers 0"
    predicted = pool_of(
        read_model_shape(str(two_layers)),
        Machine(1 << 30, True, 0.9, 0, MemoryOptions(kv_cache_dtype="fp8")),
        "float32",
        16,
    )
    assert predicted.bytes_per_block == 2 * fp8_bytes


def test_gpu_without_fp8_conversions_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    device, kv_dtypes = torch.device("cuda"), [torch.bfloat16, torch.float8_e4m3fn]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_backend(kv_dtypes, TritonAttention(), device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ModelError, match=r"fp8 needs a GPU of compute capability 8\.9 or later, and this one has 8\.0"):
        check_backend(kv_dtypes, TritonAttention(), device)
