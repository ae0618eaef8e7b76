"""Model folders with random weights in the shapes of known models, made on the device: `python -m … FOLDER NAME …`.

The tokenizer reads bytes, and every id has a text of its own, so that streams carry as much text as those of a real
model do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from inflight.bench.fleet.tiny_model import END, write_tokenizer
from inflight.bench.gpu.coded_folders import write_fp8_blocks, write_mxfp4
from inflight.bench.gpu.roofline import SHAPES
from inflight.executor.checkpoint.quiet import quiet_transformers

CONTEXT_LENGTH = 8192
VOCABULARY_SIZE = 128_256
# Qwen3-30B-A3B with 12 of its 48 layers: layers cost the same, so a step of all takes about four times as long.
EXPERTS: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
# gpt-oss-20b with 6 of its 24 layers.
GPT_OSS: dict[str, Any] = {"num_hidden_layers": 6, "num_local_experts": 32}
LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)
LFM2: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 6656,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "layer_types": ["full_attention" if layer in LFM2_ATTENTION else "conv" for layer in range(16)],
}
# 18 gated delta nets and 6 layers of attention.
QWEN3_5: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
# Qwen3.6-35B-A3B with 8 of its 40 layers: 6 gated delta nets and 2 layers of attention.
QWEN3_6: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
# Nemotron 3 Nano with 13 of its 52 layers: 6 of Mamba 2, 5 of experts, 2 of attention.
NEMOTRON_3_NANO: dict[str, Any] = {
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}
# What a dry run makes of every shape.
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
TINY_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
TINY_RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TINY_QWEN3_6 = TINY_RECURRENT | TINY_EXPERTS | {"shared_expert_intermediate_size": 32}
TINY_NEMOTRON: dict[str, Any] = {
    "hybrid_override_pattern": "ME*",
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
}
IN_FP8 = ("experts-fp8", "qwen3.6-fp8")
NAMES = (*SHAPES, "experts", *IN_FP8, "gpt-oss", "lfm2-350m", "qwen3.5-0.8b", "nemotron-3-nano")


def write_model(folder: Path, name: str, *, is_tiny: bool) -> Path:
    """Makes the folder `name` in `folder` and returns it. The same call makes the same weights on the same device."""
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    texts = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    vocabulary = write_tokenizer(made, list(itertools.islice(texts, VOCABULARY_SIZE - 257)))
    config = _config(name, is_tiny=is_tiny)
    config.update({"vocab_size": len(vocabulary), "max_position_embeddings": CONTEXT_LENGTH})
    config.update({"bos_token_id": vocabulary[END], "eos_token_id": vocabulary[END], "pad_token_id": None})
    torch.manual_seed(0)
    with quiet_transformers(), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    network.save_pretrained(str(made), max_shard_size="4GB")
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": vocabulary[END]}))
    if name in IN_FP8:
        write_fp8_blocks(made)
    elif name == "gpt-oss":
        write_mxfp4(made)
    return made


def _config(name: str, *, is_tiny: bool) -> PretrainedConfig:
    if name in ("experts", "experts-fp8"):
        return Qwen3MoeConfig(**EXPERTS | (TINY | TINY_EXPERTS if is_tiny else {}))
    if name == "gpt-oss":
        return GptOssConfig(**GPT_OSS | (TINY | TINY_GPT_OSS if is_tiny else {}))
    if name == "lfm2-350m":
        return Lfm2Config(**LFM2 | (TINY | {"layer_types": ["conv", "full_attention"]} if is_tiny else {}))
    layer_types = {"layer_types": ["linear_attention", "full_attention"]}
    if name == "qwen3.5-0.8b":
        return Qwen3_5TextConfig(**QWEN3_5 | (TINY | TINY_RECURRENT | layer_types if is_tiny else {}))
    if name == "qwen3.6-fp8":
        return Qwen3_5MoeTextConfig(**QWEN3_6 | (TINY | TINY_QWEN3_6 | layer_types if is_tiny else {}))
    if name == "nemotron-3-nano":
        return NemotronHConfig(**NEMOTRON_3_NANO | (TINY | TINY_NEMOTRON if is_tiny else {}))
    return LlamaConfig(**SHAPES[name].config_fields | (TINY if is_tiny else {}))


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the named models; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inflight.bench.gpu.model_folders", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=NAMES)
    parser.add_argument("--tiny", action="store_true", help="of every shape, a model of two small layers")
    given = parser.parse_args(argv)
    for name in given.names:
        began_s = time.monotonic()
        made = write_model(given.folder, name, is_tiny=given.tiny)
        gigabytes = sum(file.stat().st_size for file in made.iterdir()) / 1e9
        print(f"{made}: {gigabytes:.1f} GB in {time.monotonic() - began_s:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
