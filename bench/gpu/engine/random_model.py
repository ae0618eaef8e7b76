"""A model of a given shape with random weights, made on the device: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from inflight.executor.attention.backend import AttentionBackend, KvShape, LayerKv, Scoring
from inflight.executor.attention.transformers_hook import Layer
from inflight.executor.checkpoint.decoder_weights import read_decoder
from inflight.executor.checkpoint.quiet import quiet_transformers
from inflight.executor.gpu.decoder import GpuDecoder


@dataclass(frozen=True, slots=True, eq=False)
class RandomModel:
    """The network that transformers runs, and our forward on the same weights."""

    network: PreTrainedModel
    decoder: GpuDecoder
    backend: AttentionBackend
    kv_dtype: torch.dtype

    def allocate_kv(self, num_blocks: int, block_size: int) -> tuple[LayerKv, ...]:
        """KV for blocks 1 to `num_blocks`, and the spare block 0."""
        shape, device = KvShape(self.decoder.shape.num_kv_heads, self.decoder.shape.head_dim), self.decoder.device
        return tuple(
            self.backend.allocate(shape, num_blocks + 1, block_size, self.kv_dtype, device)
            for _ in range(self.decoder.shape.num_layers)
        )


def make_model(
    config: LlamaConfig, backend: AttentionBackend, dtype: torch.dtype, device: torch.device, *, is_fp8: bool = False
) -> RandomModel:
    """Draws the weights; the same in every run. With `is_fp8` the weights of layers, keys and values are in FP8, and
    the network has no weights of its own."""
    torch.manual_seed(0)
    with quiet_transformers(), device:
        made: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    network: PreTrainedModel = made.eval().requires_grad_(False)
    head_dim = int(config.head_dim or config.hidden_size // config.num_attention_heads)
    layer = Layer(KvShape(int(config.num_key_value_heads or 0), head_dim), Scoring(head_dim**-0.5))
    weights = read_decoder(network, [layer] * config.num_hidden_layers)
    assert not isinstance(weights, str), weights
    decoder = GpuDecoder(weights, backend, config.max_position_embeddings, has_fp8_weights=is_fp8)
    return RandomModel(network, decoder, backend, torch.float8_e4m3fn if is_fp8 else dtype)
