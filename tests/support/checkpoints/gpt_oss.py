"""Tiny gpt-oss models, dense and in the layout of its MXFP4 checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.checkpoints.tiny_models import save_model, sizes

# A window that prompts exceed, and a limit that gates exceed.
WINDOW, LIMIT = 8, 0.5


def gpt_oss_config(**changes: Any) -> GptOssConfig:
    """A layer with a window and one without."""
    fields = sizes(num_local_experts=5, num_experts_per_tok=2, sliding_window=WINDOW, initializer_range=0.1)
    return GptOssConfig(**fields | {"swiglu_limit": LIMIT} | changes)


def save_gpt_oss(folder: Path, config: GptOssConfig | None = None) -> Path:
    """Makes a folder with random weights, biases and sinks."""
    dense = save_model(config or gpt_oss_config(), folder, has_random_vectors=True)
    path = dense / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if name.endswith("_proj_bias"):
            tensors[name] = 0.3 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path, {"format": "pt"})
    return dense


def save_mxfp4(folder: Path) -> Path:
    """Makes a folder whose experts are in MXFP4, and one beside it, `<name>-dense`, with the matrices that transformers
    makes of them. Returns the former."""
    dense = save_gpt_oss(folder.with_name(f"{folder.name}-dense"))
    weights = load_file(dense / "model.safetensors")
    stored: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(5)
    for name, weight in weights.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        num_experts, num_in, num_out = weight.shape
        groups = (num_experts, num_out, num_in // 32)
        blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, groups, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    fields = json.loads((dense / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text((dense / "generation_config.json").read_text())
    return folder
