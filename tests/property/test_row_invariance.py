"""A row's logits are the same bits alone, behind drafts, in a chunk and in a batch, with an adapter among rows of other
adapters or none, so that a token does not depend on how many others its step computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Gemma2Config, GraniteConfig, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from inflight.common.model_source import resolve_model
from inflight.executor.adapters.peft_files import parse, read_files
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.sequence import PlanRow, Sampling, StepPlan, Stopping
from inflight.executor.scheduler.sequence import Sequence as Request
from inflight.executor.step.batch import pack
from tests.property.test_quantized_decoder import load_quantized
from tests.support.checkpoints.adapter_files import LIMITS, TARGETS, save_adapter, tensors
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.examples import examples

BLOCK_SIZE = 16
NUM_BLOCKS = 64
NUM_ADAPTERS, MAX_RANK = 3, 16

FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype_name": "float32"},
    "bfloat16": {"dtype_name": "bfloat16"},
    "int8": {"dtype_name": "float32", "weight_dtype": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype_name": "bfloat16", "weight_dtype": "int4"},
    "quantized_a8": {"dtype_name": "bfloat16", "weight_dtype": "quantized_a8"},
}
# AMX multiplies bfloat16 KV with heads of a multiple of 32. A chunk of attention has 128 tokens.
LONG = {"max_position_embeddings": 512}
LONG_MODELS: dict[str, PretrainedConfig] = {
    "heads of 64": LlamaConfig(**sizes(**LONG, head_dim=64)),
    "heads of 128": LlamaConfig(**sizes(**LONG, head_dim=128, num_key_value_heads=1)),
    "window of 150": Gemma2Config(**sizes(**LONG, head_dim=64), query_pre_attn_scalar=64, sliding_window=150),
    "experts": Qwen3MoeConfig(
        **sizes(**LONG, head_dim=32), num_experts=6, num_experts_per_tok=3, moe_intermediate_size=80
    ),
    "scaled residual": GraniteConfig(**sizes(**LONG), residual_multiplier=0.22),
}
LONG_CASES = [
    *((name, "bfloat16") for name in LONG_MODELS),
    *(("heads of 64", "int4"), ("window of 150", "float32"), ("experts", "int8")),
    *(
        pytest.param(name, form, marks=pytest.mark.slow)
        for name, form in (("heads of 64", "float32"), ("heads of 64", "int8"), ("window of 150", "int8"))
    ),
]


@pytest.fixture(scope="module", params=sorted(FORMS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedModel]:
    folder = save_model(LlamaConfig(**sizes()), tmp_path_factory.mktemp("model") / "tiny")
    with torch_threads(2):
        with pytest.MonkeyPatch.context() as patch:
            if request.param == "quantized_a8":
                patch.setattr("inflight.executor.model.loader.load_network", load_quantized)
            loaded = load_model(resolve_model(str(folder)), device_name="cpu", **FORMS[request.param])
        assert isinstance(loaded.forward, NativeForward)
        loaded.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        loaded.forward.decoder.reserve_adapters(NUM_ADAPTERS, MAX_RANK)
        for slot in range(NUM_ADAPTERS):
            # Of different ranks, and one without some of the matrices
            targets = TARGETS[: 5 + slot]
            files = save_adapter(
                folder.parent / f"adapter{slot}",
                rank=3 + 5 * slot,
                weights=tensors(slot, 3 + 5 * slot, targets),
                target_modules=list(targets),
            )
            loaded.forward.decoder.load_adapter(slot, parse(read_files(files), LIMITS))
        yield loaded


def sequence_of(number: int, token_ids: Sequence[int], first_block: int, adapter_slot: int | None = None) -> Request:
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    made = Request(
        f"r{number}",
        1,
        list(token_ids),
        len(token_ids),
        Sampling(0.0, 0, 1.0, 0),
        Stopping(1, 0, frozenset()),
        num_blocks,
        None,
    )
    made.adapter_slot = adapter_slot
    made.block_table = list(range(first_block, first_block + num_blocks))
    return made


def one_by_one(model: PagedModel, ids: Sequence[int], first_block: int, adapter_slot: int | None = None) -> Tensor:
    """Logits `[len(ids), vocabulary]`, each position in a step of its own."""
    sequence = sequence_of(0, ids, first_block, adapter_slot)
    return torch.cat([model.logits(pack(plan_of(sequence, i, 1), BLOCK_SIZE)) for i in range(len(ids))])


def plan_of(sequence: Request, start: int, num_tokens: int) -> StepPlan:
    return StepPlan.of([PlanRow(sequence, start, num_tokens, True)])


@settings(max_examples=examples(20), deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=2, max_size=60), min_size=1, max_size=5),
    numbers=st.lists(st.integers(0, 8), min_size=5, max_size=5),
    slots=st.lists(st.sampled_from([None, *range(NUM_ADAPTERS)]), min_size=5, max_size=5),
)
def test_row_has_the_same_logits_alone_with_drafts_and_in_a_batch(
    model: PagedModel, texts: list[list[int]], numbers: list[int], slots: list[int | None]
) -> None:
    # Given sequences whose last tokens are drafts
    num_drafts = [min(number, len(ids) - 1) for number, ids in zip(numbers, texts, strict=False)]
    alone = [one_by_one(model, ids, 1, slot) for ids, slot in zip(texts, slots, strict=False)]

    # When the text before is computed in one step, and the drafts of all in another
    known, verifying = [], []
    for i, (ids, number) in enumerate(zip(texts, num_drafts, strict=True)):
        first = len(ids) - number - 1
        known.append((sequence_of(i, ids, 1 + 5 * i, slots[i]), first))
        drafting = sequence_of(i, ids, 1 + 5 * i, slots[i])
        drafting.token_ids = ids[: first + 1]
        verifying.append(PlanRow(drafting, first, number + 1, True, drafts=tuple(ids[first + 1 :])))
    chunks = [PlanRow(sequence, 0, first, True) for sequence, first in known if first]
    chunk_logits = model.logits(pack(StepPlan.of(chunks), BLOCK_SIZE)) if chunks else torch.empty(0)
    verifying.sort(key=lambda row: len(row.drafts) > 0)
    logits = model.logits(pack(StepPlan.of(verifying), BLOCK_SIZE))

    # Then each position has the bits that it has alone
    for row, chunk in zip(chunks, chunk_logits, strict=True):
        assert torch.equal(chunk, alone[int(row.sequence.request_id[1:])][row.num_tokens - 1])
    first_row = 0
    for row in verifying:
        expected = alone[int(row.sequence.request_id[1:])][row.start :]
        assert torch.equal(logits[first_row : first_row + row.num_tokens], expected)
        first_row += row.num_tokens


@pytest.mark.parametrize(("name", "form"), LONG_CASES)
def test_logits_do_not_depend_on_the_size_of_chunks(tmp_path: Path, name: str, form: str) -> None:
    ids = torch.randint(VOCABULARY_SIZE, (280,), generator=torch.Generator().manual_seed(5)).tolist()
    folder = save_model(LONG_MODELS[name], tmp_path / "tiny")
    models = []
    for num_threads in (1, 2):
        with torch_threads(num_threads):
            models.append(load_model(resolve_model(str(folder)), device_name="cpu", **FORMS[form]))
        assert isinstance(models[-1].forward, NativeForward)
        models[-1].allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    alone = one_by_one(models[0], ids, 1)
    for size in (2, 8, 33, 150, len(ids)):
        model = models[size > 8]
        found = torch.cat([all_logits(model, ids, start, size) for start in range(0, len(ids), size)])
        assert torch.equal(found, alone), f"chunks of {size}"


def all_logits(model: PagedModel, ids: Sequence[int], start: int, size: int) -> Tensor:
    """Logits of every position of a chunk, as if all but the first were drafts."""
    end = min(start + size, len(ids))
    sequence = sequence_of(0, ids, 1)
    sequence.token_ids = list(ids[: start + 1])
    row = PlanRow(sequence, start, end - start, True, drafts=tuple(ids[start + 1 : end]))
    return model.logits(pack(StepPlan.of([row]), BLOCK_SIZE))
