"""GGUF files, whose quantized matrices are read without a copy in the disk cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from inflight.common.model_files.gguf_header import GgufHeader, GgufTensor
from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.gguf_metadata import ROPE_TENSORS
from inflight.executor.checkpoint.quantized_weight import Matrix
from inflight.executor.formats.gguf_blocks import BLOCK_TYPES, quantized_weight
from inflight.executor.formats.network import empty_network, fill, placed

# Types that are not quantized, by their number in the file.
DENSE_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# `general.architecture` of networks whose tensors differ from those of transformers only in name, and in Llama's case
# in the order of rows.
ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3"})
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unsupported_reason(header: GgufHeader) -> str | None:
    """Returns why a file has to be imported by transformers, as a dense model; None if it can be read here."""
    if header.architecture not in ARCHITECTURES:
        return f"its architecture is {header.architecture}"
    for tensor in header.tensors:
        if tensor.name in ROPE_TENSORS:
            continue
        if _parameter(tensor.name) is None:
            return f"it has the tensor {tensor.name}"
        kind = BLOCK_TYPES.get(tensor.type_number)
        if kind is None and tensor.type_number not in DENSE_TYPES:
            return f"{tensor.name} is of type {tensor.type_name}"
        if kind is not None and len(tensor.shape) != 2:
            return f"{tensor.name} is quantized and not a matrix"
    return None


def load_gguf(
    header: GgufHeader, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Loads a file for which there is no `unsupported_reason`; see `placed`. `config` has the factors of rotary
    frequencies that are tensors of the file."""
    network = empty_network(config, dtype)
    fill(network, placed(_weights(header, config), device))
    return network


def _weights(header: GgufHeader, config: PretrainedConfig) -> Iterator[tuple[str, Matrix]]:
    for tensor in header.tensors:
        name = _parameter(tensor.name)
        if name is None:
            continue
        rows = _bytes(tensor)
        kind = BLOCK_TYPES.get(tensor.type_number)
        if kind is not None:
            _check_row(tensor, kind.num_numbers)
            rows = rows.view(tensor.shape[0], -1)
        matrix_rows = rows if kind is not None else _dense(tensor, rows)
        if header.architecture == "llama" and ".attn_q." in tensor.name:
            matrix_rows = _unpermuted(matrix_rows, config.num_attention_heads)
        elif header.architecture == "llama" and ".attn_k." in tensor.name:
            matrix_rows = _unpermuted(matrix_rows, config.num_key_value_heads)
        yield name, matrix_rows if kind is None else quantized_weight(kind, matrix_rows)


def _parameter(name: str) -> str | None:
    """Returns the parameter of transformers for a tensor of the file."""
    stem, _, leaf = name.rpartition(".")
    if stem.startswith("blk."):
        _, number, stem = stem.split(".", 2)
        return f"model.layers.{number}.{LAYER_NAMES[stem]}.{leaf}" if stem in LAYER_NAMES else None
    return f"{NAMES[stem]}.{leaf}" if stem in NAMES else None


def _bytes(tensor: GgufTensor) -> Tensor:
    # Not mapped, because what was read of a mapped file stays in the memory of the process.
    return torch.from_numpy(np.fromfile(tensor.file, np.uint8, tensor.num_bytes, offset=tensor.start))


def _dense(tensor: GgufTensor, content: Tensor) -> Tensor:
    return content.clone().view(DENSE_TYPES[tensor.type_number]).view(tensor.shape)


def _check_row(tensor: GgufTensor, num_numbers: int) -> None:
    if tensor.shape[1] % num_numbers:
        raise ModelError(f"{tensor.name} has rows of {tensor.shape[1]} numbers, not a multiple of {num_numbers}")


def _unpermuted(rows: Tensor, num_heads: int) -> Tensor:
    """Returns the rows of queries or keys in transformers' order: the halves of a head one after the other, where
    llama.cpp has them alternate."""
    num_rows = rows.shape[0]
    if num_rows % (2 * num_heads):
        raise ModelError(f"{num_rows} rows of queries or keys do not belong to {num_heads} heads")
    unpermuted: Tensor = rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2)
    return unpermuted.reshape(rows.shape)
