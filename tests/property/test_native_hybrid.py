"""Models with recurrent layers in C++: every form of their weights and every build gives the same bits however the
positions are divided into steps, near the logits of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    Lfm2MoeConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
)

from inflight.common.model_source import resolve_model
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.step.batch import pack
from tests.property.test_hybrid_models import BLOCK_SIZE, CONFIGS, NUM_BLOCKS, TOKENS, sequence_of
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.native_builds import INSTRUCTION_SETS
from tests.support.device.torch_threads import torch_threads

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

# With a dense layer, a correction that only chooses, and weights that are scaled; with a shared expert that has a gate.
WITH_EXPERTS: dict[str, PretrainedConfig] = {
    "lfm2_moe": Lfm2MoeConfig(
        **sizes(num_hidden_layers=4, hidden_size=60, moe_intermediate_size=40, routed_scaling_factor=1.5),
        layer_types=["conv", "full_attention", "conv", "conv"],
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        conv_bias=True,
    ),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **sizes(num_hidden_layers=3, hidden_size=60, moe_intermediate_size=40, head_dim=32),
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_experts=8,
        num_experts_per_tok=3,
        shared_expert_intermediate_size=72,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
    ),
}
WITH_EXPERTS["qwen3_next"] = Qwen3NextConfig(
    **sizes(num_hidden_layers=3, hidden_size=60, moe_intermediate_size=40, head_dim=32),
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_experts=8,
    num_experts_per_tok=3,
    shared_expert_intermediate_size=72,
    mlp_only_layers=[1],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
)
WITH_EXPERTS["granite_hybrid_moe"] = GraniteMoeHybridConfig(
    **CONFIGS["granite_hybrid-native"].to_dict()
    | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "position_embedding_type": None}
)
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype_name": "float32"},
    "bfloat16": {"dtype_name": "bfloat16"},
    "int8": {"dtype_name": "bfloat16", "weight_dtype": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype_name": "float32", "weight_dtype": "int4"},
}
# Distance of all logits from those of transformers in float32, relative to these: rounding of each form. With weights
# of 4 bits loading compares them, after it has rounded those of transformers alike.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "int8": 0.2}
BEST, *OTHERS = INSTRUCTION_SETS
CASES = [
    *(("lfm2-native", form, BEST) for form in ("float32", "int8")),
    *(("qwen3_5-native", form, BEST) for form in ("float32", "bfloat16", "int4")),
    *((name, "float32", BEST) for name in WITH_EXPERTS),
    *(
        pytest.param(name, form, build, marks=pytest.mark.slow)
        for build in OTHERS
        for name, form in (
            ("granite_hybrid-native", "float32"),
            ("lfm2-native", "bfloat16"),
            ("qwen3_5-native", "float32"),
        )
    ),
]
# The last ones begin a chunk of the gated delta net, or end one.
CHUNKS = ((3, 1, 1, 40, 18, 1, 64, 65), (64, 64, 1, 1, 62, 1), (63, 1, 1, 128))
LENGTH = sum(CHUNKS[0])


def logits_of(model: PagedModel, slot: int, chunks: tuple[int, ...]) -> Tensor:
    """Returns the logits of all positions of a prompt, beside another sequence that began before."""
    assert model.forward.states is not None
    ours, other = sequence_of("ours", TOKENS[:LENGTH], 1), sequence_of("other", TOKENS[150 : 150 + LENGTH], 1)
    ours.state_slot, other.state_slot = slot, 2
    ours.block_table, other.block_table = list(range(1, 14)), list(range(14, 27))
    logits, start = [], 0
    for chunk in chunks:
        rows = [PlanRow(other, start, 1, samples=True), PlanRow(ours, start, chunk, samples=True)]
        batch = pack(StepPlan.of(rows), BLOCK_SIZE)
        logits.append(model.logits(replace(batch, logit_rows=torch.arange(1, 1 + chunk))))
        start += chunk
    return torch.cat(logits)


@pytest.mark.parametrize(("name", "form", "instructions"), CASES)
def test_bits_do_not_depend_on_the_steps(name: str, form: str, instructions: str, tmp_path: Path) -> None:
    folder = save_model((CONFIGS | WITH_EXPERTS)[name], tmp_path / name, has_random_vectors=True)
    # Which numbers are computed does not change how threads share the work.
    with torch_threads(2 if form == "float32" else 1):
        model = load_model(
            resolve_model(str(folder)), device_name="cpu", backend_name="cpu", instructions=instructions, **FORMS[form]
        )
        assert isinstance(model.forward, NativeForward)
        assert model.forward.states is not None
        model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        model.forward.states.reserve(StateSizes(3, 0, 5))
        whole = logits_of(model, 0, (LENGTH,))
        for slot, chunks in enumerate(CHUNKS):
            found = logits_of(model, slot % 2, chunks)
            assert torch.equal(found, whole[: len(found)])
    if form not in TOLERANCE:
        return
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = network(torch.tensor([TOKENS[:LENGTH]])).logits[0]
    assert (whole - expected).norm() < TOLERANCE[form] * (expected - expected.mean(-1, keepdim=True)).norm()
