"""Rewrites a model folder in bfloat16: with matrices in FP8 blocks (Qwen), or with experts in MXFP4 (gpt-oss)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Layers' matrices that stay in bfloat16, as in the published checkpoints.
DENSE_IN_FP8 = (
    *("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "shared_expert_gate.weight"),
    *("in_proj_a.weight", "in_proj_b.weight"),
)
DENSE_IN_MXFP4 = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
BLOCK = 128
GROUP = 32
# An exponent with which random codes have about the spread of the weights that they replace: 2.9 * 2 ** -7.
EXPONENT = 120

Rewritten = Mapping[str, Tensor]


def write_fp8_blocks(folder: Path) -> None:
    """Rounds the matrices of layers to FP8, with a scale for each block of 128 x 128."""
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    _rewrite(folder, _in_fp8, quantization)


def write_mxfp4(folder: Path) -> None:
    """Replaces the experts' matrices by random codes of four bits with an exponent for each 32."""
    _rewrite(folder, _in_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": list(DENSE_IN_MXFP4)})


def _in_fp8(name: str, weight: Tensor) -> Rewritten:
    if weight.dim() != 2 or name.endswith(DENSE_IN_FP8):
        return {name: weight}
    rows, columns = weight.shape
    padding = 0, -columns % BLOCK, 0, -rows % BLOCK
    blocks = torch.nn.functional.pad(weight.float(), padding).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    numbers = (blocks / scale[:, None, :, None]).flatten(0, 1).flatten(1, 2)[:rows, :columns]
    return {name: numbers.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def _in_mxfp4(name: str, weight: Tensor) -> Rewritten:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: weight}
    num_experts, num_in, num_out = weight.shape
    groups = num_experts, num_out, num_in // GROUP
    blocks = torch.randint(0, 256, (*groups, GROUP // 2), dtype=torch.uint8, device=weight.device)
    scales = torch.full(groups, EXPONENT, dtype=torch.uint8, device=weight.device)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _rewrite(folder: Path, rewritten: Callable[[str, Tensor], Rewritten], quantization: Mapping[str, Any]) -> None:
    file_of: dict[str, str] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for path in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for name, weight in load_file(path, device=device).items():
            tensors |= rewritten(name, weight)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
        file_of |= dict.fromkeys(tensors, path.name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": dict(quantization)}))
