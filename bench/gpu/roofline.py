"""The least that a step must move and compute, and its time on a GPU with measured limits. Pure.

    a decode step reads     every weight but the embedding's, and the keys and values of every context
    a prefill computes      two operations for each weight of the layers and each token, and attention

Caches, launches and activations are left out, so no step can be faster and every share of a limit is honest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ELEMENT_BYTES = 2  # bfloat16
SCALE_BYTES = 4  # of a key or a value in FP8


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of the Llama family, in numbers."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocabulary_size: int
    has_tied_embeddings: bool

    @property
    def config_fields(self) -> dict[str, Any]:
        """The sizes by the names of transformers' `LlamaConfig`."""
        return {
            "vocab_size": self.vocabulary_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "tie_word_embeddings": self.has_tied_embeddings,
        }

    @property
    def layer_weights(self) -> int:
        """Weights of all layers; norms are too few to count."""
        projections = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (projections + 3 * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Weights of the output layer."""
        return self.hidden_size * self.vocabulary_size

    @property
    def num_parameters(self) -> int:
        """Weights in all, an embedding of its own included."""
        return self.layer_weights + self.head_weights * (1 if self.has_tied_embeddings else 2)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def fp8_kv_bytes_per_token(self) -> int:
        """The same in FP8, with a scale for each key and value."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim + SCALE_BYTES)

    @property
    def kv_bytes_per_layer_and_token(self) -> int:
        """Keys and values of one token in one layer."""
        return self.kv_bytes_per_token // self.num_layers


LLAMA_3_8B = ModelShape("Llama-3-8B", 4096, 32, 32, 8, 128, 14336, 128_256, has_tied_embeddings=False)
LLAMA_3_1B = ModelShape("Llama-3.2-1B", 2048, 16, 32, 8, 64, 8192, 128_256, has_tied_embeddings=True)
SHAPES = {"8b": LLAMA_3_8B, "1b": LLAMA_3_1B}


def decode_bytes(shape: ModelShape, num_sequences: int, context: int, *, is_fp8: bool = False) -> int:
    """What a step of decodes reads at least. In FP8 are the weights of layers, and keys and values."""
    if is_fp8:
        weights = shape.layer_weights + shape.head_weights * ELEMENT_BYTES
        return weights + num_sequences * context * shape.fp8_kv_bytes_per_token
    weights = (shape.layer_weights + shape.head_weights) * ELEMENT_BYTES
    return weights + num_sequences * context * shape.kv_bytes_per_token


def prefill_operations(shape: ModelShape, num_tokens: int) -> int:
    """Floating-point operations of a prompt, one row of logits included; token i attends to i + 1 keys."""
    pairs = num_tokens * (num_tokens + 1) // 2
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    return 2 * (shape.layer_weights * num_tokens + shape.head_weights) + attention


@dataclass(frozen=True, slots=True)
class Limits:
    """What the GPU was measured to do: a copy's bytes read and written, and matrix products in bfloat16."""

    copy_bytes_per_s: float
    matrix_operations_per_s: float

    def decode_s(self, shape: ModelShape, num_sequences: int, context: int, *, is_fp8: bool = False) -> float:
        """Returns the memory limit of a decode step."""
        return decode_bytes(shape, num_sequences, context, is_fp8=is_fp8) / self.copy_bytes_per_s

    def prefill_s(self, shape: ModelShape, num_tokens: int) -> float:
        """Returns the matrix limit of a prompt."""
        return prefill_operations(shape, num_tokens) / self.matrix_operations_per_s
