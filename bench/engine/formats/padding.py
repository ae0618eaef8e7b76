"""A Llama model with zeros beside its numbers, so that its rows consist of whole groups of a format."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from inflight.bench.engine.formats.encodings import WEIGHTS


def copy_padded(dense: Path, folder: Path, hidden_size: int) -> None:
    """Writes a model with another hidden size that computes the same.

    Queries get the same width, by heads of zeros. Zeros make a norm's mean square smaller, which its weights and its
    epsilon take back. Raises `ValueError` if that size does not consist of whole heads for each KV head.
    """
    config, weights = json.loads((dense / "config.json").read_text()), load_file(dense / WEIGHTS)
    before, head_dim = config["hidden_size"], config["head_dim"]
    repeats = config["num_attention_heads"] // config["num_key_value_heads"]
    num_kv_heads, rest = divmod(hidden_size, head_dim * repeats)
    if rest or num_kv_heads < config["num_key_value_heads"] or hidden_size < before:
        raise ValueError(
            f"hidden size {hidden_size} is not a multiple of {head_dim * repeats}, or is smaller than the model's"
        )
    sizes = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_kv_heads * repeats,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": config["rms_norm_eps"] * before / hidden_size,
    }
    queries, keys = hidden_size, num_kv_heads * head_dim
    # Rows and columns. None stays as it is.
    shapes: dict[str, tuple[int | None, int | None]] = {
        "q_proj": (queries, hidden_size),
        "k_proj": (keys, hidden_size),
        "v_proj": (keys, hidden_size),
        "o_proj": (hidden_size, queries),
        "gate_proj": (None, hidden_size),
        "up_proj": (None, hidden_size),
        "down_proj": (hidden_size, None),
        "embed_tokens": (None, hidden_size),
        "lm_head": (None, hidden_size),
    }
    padded: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim == 1:
            padded[name] = pad(weight * math.sqrt(before / hidden_size), (0, hidden_size - before))
            continue
        rows, columns = shapes[name.split(".")[-2]]
        padded[name] = pad(
            weight, (0, (columns or weight.shape[1]) - weight.shape[1], 0, (rows or len(weight)) - len(weight))
        )
    shutil.copytree(dense, folder)
    (folder / "config.json").write_text(json.dumps(config | sizes))
    save_file(padded, folder / WEIGHTS, {"format": "pt"})
