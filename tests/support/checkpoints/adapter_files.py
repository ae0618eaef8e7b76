"""Adapters in PEFT's format with random weights, for the tiny models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from inflight.executor.adapters.peft_files import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from inflight.executor.adapters.weights import AdapterLimits
from inflight.executor.checkpoint.decoder_weights import DecoderShape, Rope
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, sizes

TINY = sizes()
SHAPE = DecoderShape(
    num_layers=TINY["num_hidden_layers"],
    hidden_size=TINY["hidden_size"],
    num_heads=TINY["num_attention_heads"],
    num_kv_heads=TINY["num_key_value_heads"],
    head_dim=TINY["head_dim"],
    intermediate_size=TINY["intermediate_size"],
    vocabulary_size=VOCABULARY_SIZE,
    norm_epsilon=1e-6,
    attention_scale=0.25,
    sliding_windows=(None,) * TINY["num_hidden_layers"],
    ropes=(Rope((1.0,) * (TINY["head_dim"] // 2), 1.0),),
    layer_ropes=(0,) * TINY["num_hidden_layers"],
)
LIMITS = AdapterLimits(SHAPE, max_rank=16)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config(rank: int = 4, **changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(TARGETS)} | changes


def tensors(
    seed: int, rank: int = 4, targets: tuple[str, ...] = TARGETS, limits: AdapterLimits = LIMITS
) -> dict[str, Tensor]:
    """Returns A and B of the targets in every layer, large enough to change the tokens."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for module, (outputs, inputs) in limits.modules():
        if module.rpartition(".")[2] in targets:
            a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
            made |= {f"{PREFIX}{module}.lora_A.weight": a / 8, f"{PREFIX}{module}.lora_B.weight": b / 8}
    return made


def save_adapter(
    folder: Path, seed: int = 0, rank: int = 4, weights: Mapping[str, Tensor] | None = None, **changes: Any
) -> Path:
    """Writes the files of an adapter; `changes` are fields of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config(rank, **changes)))
    save_file(dict(tensors(seed, rank) if weights is None else weights), folder / WEIGHTS_FILE)
    return folder
