"""int8 KV of whole models: the same tokens however they are batched, the memory of a block, and the settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig

from inflight.common.kv_size import KvBudget, num_kv_blocks
from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.forward.native import NativeForward
from inflight.executor.loader import load_executor
from inflight.executor.main import identity
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.self_check import relative_distance
from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.settings import ExecutorSettings
from inflight.executor.step.batch import pack
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.greedy import generate_together
from tests.support.device.native_builds import BEST_FIRST
from tests.support.device.paged_cases import make_sequence

# The first test of a build may wait for the compiler.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

NUM_LAYERS = 3
CONFIG = LlamaConfig(**sizes(num_hidden_layers=NUM_LAYERS))
KV_HEADS, HEAD_DIM, BLOCK = 2, 16, 16
NUM_TOKENS = 150
NATIVE = {"backend_name": "cpu"}
PATHS: dict[str, dict[str, str]] = {
    "reference": {"dtype_name": "float32", "backend_name": "reference"},
    "native-float32": {"dtype_name": "float32"} | NATIVE,
    "native-bfloat16": {"dtype_name": "bfloat16"} | NATIVE,
    "native-int8-weights": {"dtype_name": "bfloat16", "weight_dtype": "int8"} | NATIVE,
    "transformers-bfloat16": {"dtype_name": "bfloat16", "forward_name": "transformers"} | NATIVE,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIG, tmp_path_factory.mktemp("models") / "tiny")


def load(folder: Path, **options: Any) -> PagedModel:
    return load_model(resolve_model(str(folder)), device_name="cpu", **{"kv_cache_dtype": "int8"} | options)


def prompt_ids(num_tokens: int = NUM_TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY_SIZE, (num_tokens,), generator=generator).tolist()


def logits_in_chunks(model: PagedModel, chunk_tokens: int, num_neighbours: int) -> Tensor:
    """Logits after every token of a prompt, computed in chunks beside the decodes of other sequences. The pool held not
    a number before."""
    num_blocks = -(-NUM_TOKENS // BLOCK)
    model.allocate_kv(num_blocks + num_neighbours, BLOCK)
    for kv in model.kv:
        for memory in (kv.keys, kv.values, *kv.scales):
            memory.view(torch.uint8).fill_(255)
    sequence = make_sequence(prompt_ids(), list(range(num_blocks, 0, -1)))
    neighbours = [make_sequence([5 + i] * BLOCK, [num_blocks + 1 + i]) for i in range(num_neighbours)]
    found = []
    for step, start in enumerate(range(0, NUM_TOKENS, chunk_tokens)):
        length = min(chunk_tokens, NUM_TOKENS - start)
        rows = [PlanRow(neighbour, step % BLOCK, 1, True) for neighbour in neighbours]
        rows.append(PlanRow(sequence, start, length, True))
        batch = pack(StepPlan.of(rows), BLOCK)
        found.append(model.logits(replace(batch, logit_rows=torch.arange(batch.num_tokens)[-length:])))
    return torch.cat(found)


@pytest.mark.parametrize("instructions", BEST_FIRST)
@pytest.mark.parametrize("path", ["native-float32", "native-bfloat16", "native-int8-weights"])
def test_logits_do_not_depend_on_chunks_and_batch(folder: Path, path: str, instructions: str) -> None:
    """Bit by bit: a token's own keys and values are rounded before they are read, in the step that wrote them too."""
    model = load(folder, instructions=instructions, kv_cache_skip_layers=[1], **PATHS[path])
    assert isinstance(model.forward, NativeForward)
    whole = logits_in_chunks(model, NUM_TOKENS, 0)
    assert whole.isfinite().all()
    for chunk_tokens, num_neighbours in ((1, 9), (7, 3), (129, 0)):
        assert torch.equal(logits_in_chunks(model, chunk_tokens, num_neighbours), whole), chunk_tokens


@pytest.mark.parametrize("path", PATHS)
def test_tokens_are_the_same_alone_and_together(folder: Path, path: str) -> None:
    model, prompts = load(folder, **PATHS[path]), [prompt_ids(count) for count in (40, 3, 70)]
    together = generate_together(model, prompts, num_tokens=12, chunk_tokens=11)
    assert together == [generate_together(model, [prompt], 12, chunk_tokens=64)[0] for prompt in prompts]


@pytest.mark.parametrize("path", ["native-float32", "native-bfloat16", "transformers-bfloat16"])
def test_logits_are_near_those_of_the_reference(folder: Path, path: str) -> None:
    """A last bit of a key may round to the next int8, which is why they are not the same."""
    reference = load(folder, **PATHS["reference"])
    expected = logits_in_chunks(reference, 32, 0)
    tolerance = 0.01 if path == "native-float32" else 0.2
    assert relative_distance(logits_in_chunks(load(folder, **PATHS[path]), 32, 0), expected) < tolerance


def test_sliding_windows_are_kept(tmp_path: Path) -> None:
    folder = save_model(MistralConfig(**sizes(sliding_window=20)), tmp_path / "tiny")
    found, expected = (
        logits_in_chunks(load(folder, **PATHS[path]), 150, 0) for path in ("native-float32", "reference")
    )
    assert relative_distance(found, expected) < 0.01


@pytest.mark.parametrize("backend_name", ["cpu", "reference"])
@pytest.mark.parametrize(("dtype_name", "number_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_block_has_a_byte_for_each_number_and_a_float32_scale_for_each_token_and_head(
    folder: Path, backend_name: str, dtype_name: str, number_bytes: int
) -> None:
    int8_bytes = 2 * KV_HEADS * BLOCK * (HEAD_DIM + 4)
    plain_bytes = 2 * KV_HEADS * BLOCK * HEAD_DIM * number_bytes

    def bytes_of(**options: Any) -> int:
        return load(folder, dtype_name=dtype_name, backend_name=backend_name, **options).forward.layout.bytes_per_block(
            BLOCK
        )

    assert bytes_of() == NUM_LAYERS * int8_bytes
    assert bytes_of(kv_cache_skip_layers=[0, 2]) == int8_bytes + 2 * plain_bytes
    assert bytes_of(kv_cache_dtype=dtype_name) == bytes_of(kv_cache_dtype="auto") == NUM_LAYERS * plain_bytes


def test_memory_of_a_head_of_64_has_1_88_times_as_many_blocks() -> None:
    """SmolLM2-135M: 30 layers with 3 KV heads of 64."""
    bfloat16, int8 = (2 * 30 * 3 * 16 * num_bytes for num_bytes in (2 * 64, 64 + 4))
    assert (bfloat16, int8) == (368_640, 195_840)
    budget = KvBudget(0, 1 << 30, 0.9)
    assert [num_kv_blocks(budget, 16, size) for size in (bfloat16, int8)] == [2620, 4933]


PROCESS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_tokens_in_paged_kv_cache": 160}


@pytest.mark.parametrize(
    ("settings", "described"),
    [
        ({}, "float32"),
        ({"kv_cache_dtype": "float32"}, "float32"),
        ({"kv_cache_dtype": "int8"}, "int8"),
        ({"weight_dtype": "int8"}, "float32"),
        ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": "0,2"}, "int8 except float32 in layers 0,2"),
    ],
)
def test_routers_are_told_the_type(folder: Path, settings: dict[str, Any], described: str) -> None:
    process = ExecutorSettings(**PROCESS, model=str(folder), **settings)
    description = identity(process, load_executor(process)).description
    assert (description.dtype, description.kv_cache_dtype) == ("float32", described)
    assert description.weight_dtype == settings.get("weight_dtype", "float32")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype 'fp4' is unknown; use auto, bfloat16, float32, int8, fp8"),
        ({"kv_cache_dtype": "fp8"}, "fp8 needs the triton backend on a GPU, and the attention backend is cpu on cpu"),
        (
            {"kv_cache_dtype": "bfloat16"},
            "kv_cache_dtype 'bfloat16' is not the model's dtype; use auto, float32, int8, fp8",
        ),
        ({"kv_cache_skip_layers": [1, 3]}, "kv_cache_dtype_skip_layers: the model has layers 0 to 2, not 3"),
        (
            {"kv_cache_dtype": "auto", "kv_cache_skip_layers": [1]},
            "kv_cache_dtype_skip_layers needs kv_cache_dtype int8 or fp8",
        ),
    ],
)
def test_types_that_do_not_fit_are_refused_with_the_reason(folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load(folder, **{"dtype_name": "float32"} | options)


def test_kernels_of_a_gpu_refuse_int8_kv(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ModelError, match="kv_cache_dtype int8 needs a CPU, and the attention backend is triton"):
        load(folder, backend_name="triton")
