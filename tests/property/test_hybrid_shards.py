"""Shards of models with recurrent layers in one process: together they compute every bit of what the whole model
computes, in any chunks and behind checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GraniteMoeHybridConfig, Lfm2Config, PretrainedConfig, Qwen3_5TextConfig

from inflight.executor.checkpoint.shards import indivisible_reason
from inflight.executor.parallel.messages import Want, pack_step, unpack_step
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.scheduler.sequence import PlanRow, StateLoad, StateSave, StepPlan
from inflight.executor.step.batch import pack
from tests.property.test_hybrid_models import BLOCK_SIZE, TOKENS, sequence_of
from tests.property.test_shards import Ranks, read
from tests.support.checkpoints.tiny_models import save_model, sizes

pytestmark = pytest.mark.timeout(600)

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 128, "intermediate_size": 200}
FAMILY: dict[str, PretrainedConfig] = {
    "lfm2": Lfm2Config(
        **sizes(**HEADS, num_hidden_layers=3),
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=4,
        conv_bias=True,
        block_auto_adjust_ff_dim=False,
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **sizes(**HEADS, num_hidden_layers=3, head_dim=32, initializer_range=0.1),
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=16,
        linear_value_head_dim=48,
    ),
}
# Ranks have the same keys, and a norm covers heads of all of them.
FAMILY["granite"] = GraniteMoeHybridConfig(
    **sizes(**HEADS, num_hidden_layers=3, initializer_range=0.1),
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_local_experts=0,
    shared_intermediate_size=72,
    mamba_n_heads=8,
    mamba_n_groups=1,
    mamba_d_state=32,
    mamba_proj_bias=True,
)
# Four ranks have the same keys in pairs.
FAMILY["granite-groups"] = GraniteMoeHybridConfig(**FAMILY["granite"].to_dict() | {"mamba_n_groups": 2})
CHUNKS = (3, 1, 60, 1, 1, 64, 5)


def outputs(ranks: Ranks) -> Tensor:
    """Logits of all positions of a prompt in chunks; then of what follows a checkpoint of it, in another slot."""
    for decoder in ranks.decoders:
        assert decoder.states is not None
        decoder.states.reserve(StateSizes(2, 1, 0))
    ours = sequence_of("ours", TOKENS[: sum(CHUNKS)], 1)
    ours.state_slot, ours.block_table = 0, list(range(1, 11))
    logits, start = [], 0
    for chunk in CHUNKS:
        plan = StepPlan.of([PlanRow(ours, start, chunk, samples=True)])
        if start < 64 <= start + chunk:
            plan = replace(plan, state_saves=(StateSave(0, ours, 64, 0),))
        logits.append(computed(ranks, plan, chunk))
        start += chunk
    ours.state_slot = 1
    plan = StepPlan.of([PlanRow(ours, 64, start - 64, samples=True)])
    again = computed(ranks, replace(plan, state_loads=(StateLoad(0, 1, 64),)), start - 64)
    assert torch.equal(again, torch.cat(logits)[64:])
    return torch.cat(logits)


def computed(ranks: Ranks, plan: StepPlan, num_tokens: int) -> Tensor:
    """The logits of a step as workers get it."""
    batch = replace(pack(plan, BLOCK_SIZE), logit_rows=torch.arange(num_tokens))
    return ranks.logits(unpack_step(pack_step(batch, Want.LOGITS))[1])


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "float32") for family in FAMILY),
        *((family, "int8 weights") for family in ("lfm2", "qwen3_5", "granite")),
    ],
)
def test_shards_compute_every_bit_of_the_whole(tmp_path: Path, family: str, kind: str) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weights = read(save_model(FAMILY[family], tmp_path / "tiny", has_random_vectors=True), dtype)
    logits, slot_bytes = [], []
    for num_ranks in (1, 2, 4):
        assert indivisible_reason(weights.shape, num_ranks) is None
        ranks = Ranks(weights, dtype, num_ranks, has_int8=kind == "int8 weights")
        ranks.allocate(12, BLOCK_SIZE, dtype)
        logits.append(outputs(ranks))
        states = ranks.decoders[-1].states
        assert states is not None
        slot_bytes.append(states.slot_bytes(0))
    assert torch.equal(logits[1], logits[0])
    assert torch.equal(logits[2], logits[0])
    assert slot_bytes[2] < slot_bytes[1] < slot_bytes[0]


def test_refusal_names_what_cannot_be_divided(tmp_path: Path) -> None:
    config = Qwen3_5TextConfig(**FAMILY["qwen3_5"].to_dict() | {"linear_num_key_heads": 2})
    shape = read(save_model(config, tmp_path / "tiny"), torch.float32).shape
    assert indivisible_reason(shape, 2) is None
    assert indivisible_reason(shape, 4) == "2 heads of keys of gated delta nets cannot be divided by 4"
