"""Model folders with random weights, small enough to make in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

VOCABULARY_SIZE = 96
# Ends of the names of what routers add for the choice of experts.
CORRECTIONS = ("correction_bias", "expert_bias")


def sizes(**changes: Any) -> dict[str, Any]:
    """Keyword arguments that most configurations take: 2 layers, 4 heads on 2 KV heads of 16."""
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        # Large enough that attention matters to the logits.
        "initializer_range": 0.2,
    } | changes


def save_model(config: PretrainedConfig, folder: Path, seed: int = 0, *, has_random_vectors: bool = False) -> Path:
    """Makes a folder with config.json and random weights. Norms and biases, with those of routers for the choice of
    experts, are random only if that is asked for."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Any = AutoModelForCausalLM.from_config(config)
        if has_random_vectors:
            corrections = [buffer for name, buffer in network.named_buffers() if name.endswith(CORRECTIONS)]
            for vector in [*(weight for weight in network.parameters() if weight.ndim == 1), *corrections]:
                vector.requires_grad_(False).add_(0.2 * torch.randn_like(vector))
    network.save_pretrained(str(folder))
    return folder
