"""LoRA adapters with random weights for a Llama or an LFM2, in PEFT's format. Written without torch, which only
executors need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 4
# Large enough that no two adapters give the same tokens.
WEIGHT_SCALE = 0.2


def write_adapter(folder: Path, model_folder: Path, seed: int) -> None:
    """Writes an adapter for the model in `model_folder`. Each seed gives another configuration and other weights, so
    that the files of two seeds combined are an adapter of neither."""
    folder.mkdir(parents=True)
    shapes = _shapes(json.loads((model_folder / "config.json").read_text(encoding="utf-8")))
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK + seed,
        "target_modules": sorted({".".join(name.split(".")[3:]) for name in shapes}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
    for name, (outputs, inputs) in shapes.items():
        for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            weights = (rng.standard_normal(shape) * WEIGHT_SCALE).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = weights
    save_file(tensors, folder / "adapter_model.safetensors")


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns outputs and inputs of every projection of attention and of feed-forward layers."""
    hidden, inner, num_heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    attention, kv = num_heads * head_dim, config["num_key_value_heads"] * head_dim
    is_hybrid = config["model_type"] == "lfm2"
    output = "out_proj" if is_hybrid else "o_proj"
    block, *names = ("feed_forward", "w1", "w3", "w2") if is_hybrid else ("mlp", "gate_proj", "up_proj", "down_proj")
    of_attention = {"q_proj": (attention, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    of_attention[output] = (hidden, attention)
    feed_forward = dict(zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True))
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    return {
        f"model.layers.{layer}.{module}.{name}": shape
        for layer, kind in enumerate(kinds)
        for module, shapes in (("self_attn", {} if kind == "conv" else of_attention), (block, feed_forward))
        for name, shape in shapes.items()
    }
