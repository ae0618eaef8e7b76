"""Division of a decoder's weights between the ranks of a tensor-parallel executor.

Every matrix is divided by columns, which are the rows of a weight `[out, in]`: queries, keys and values by heads, the
others by ranges. A rank computes its columns from whole rows of activations, so no sum is split, and every number has
the same bits as with one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from executor.checkpoint.decoder_weights import DecoderShape, DecoderWeights, LayerWeights

# `PART_COLUMNS` and `PART_INNER_COLUMNS` of decoder.h.
PART_COLUMNS = 32
PART_INNER_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the weights that a rank has."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, rank: int) -> Shard:
        """Returns the shard of another rank."""
        return replace(self, rank=rank)

    def columns(self, count: int, multiple: int = PART_COLUMNS) -> slice:
        """Returns the rank's range of columns. All ranges are equal, except that the last ones may be smaller or
        empty."""
        if self.num_ranks == 1:
            return slice(0, count)
        part = -(-count // (self.num_ranks * multiple)) * multiple
        first = min(count, self.rank * part)
        return slice(first, min(count, first + part))

    def shape(self, shape: DecoderShape) -> DecoderShape:
        """Returns the shape with the heads of this rank only."""
        return replace(
            shape, num_heads=shape.num_heads // self.num_ranks, num_kv_heads=shape.num_kv_heads // self.num_ranks
        )

    def embedding(self, weights: DecoderWeights) -> Tensor:
        """Returns the columns of the embedding `[vocabulary, columns]`."""
        return weights.embedding[:, self.columns(weights.shape.hidden_size)]

    def head(self, weights: DecoderWeights) -> Tensor:
        """Returns the rank's tokens of the output layer."""
        return weights.head[self.columns(weights.shape.vocabulary_size)]

    def qkv(self, shape: DecoderShape, fused: Tensor) -> Tensor:
        """Returns queries, keys and values of the rank's heads, of a fused weight or bias."""
        if self.num_ranks == 1:
            return fused
        counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        kinds = fused.split([count * shape.head_dim for count in counts])
        return torch.cat([kind.chunk(self.num_ranks)[self.rank] for kind in kinds])

    def gate_up(self, shape: DecoderShape, fused: Tensor) -> Tensor:
        """Returns the rank's columns of the gate and of the up projection."""
        if self.num_ranks == 1:
            return fused
        columns = self.columns(shape.intermediate_size, PART_INNER_COLUMNS)
        return torch.cat([half[columns] for half in fused.chunk(2)])

    def hidden(self, shape: DecoderShape, weight: Tensor) -> Tensor:
        """Returns the rank's columns of a matrix that is added to the residual stream."""
        return weight[self.columns(shape.hidden_size)]


WHOLE = Shard()


def indivisible_reason(weights: DecoderWeights, num_ranks: int) -> str | None:
    """Returns why the weights cannot be divided between so many ranks; None if they can."""
    shape = weights.shape
    sizes = [n for n in range(1, shape.num_kv_heads + 1) if shape.num_heads % n == 0 and shape.num_kv_heads % n == 0]
    if num_ranks not in sizes:
        possible = ", ".join(map(str, sizes))
        return (
            f"{shape.num_heads} heads and {shape.num_kv_heads} KV heads cannot be divided by {num_ranks}; "
            f"sizes that work: {possible}"
        )
    if shape.num_experts:
        return "its layers have experts"
    norm = weights.layers[0].query_norm
    if norm is not None and norm.numel() != shape.head_dim:
        return "its norms of queries and keys cover all heads"
    return None


def digest_of(weights: DecoderWeights) -> str:
    """Returns a checksum of all numbers, to tell models with equal configurations apart. It reads them once, and is no
    protection against forgery."""
    digest = hashlib.sha256(repr(weights.shape).encode())
    for tensor in _tensors(weights):
        words = tensor.detach().contiguous().flatten().view(torch.int16)
        positions = words.view(-1, 2) if words.numel() % 2 == 0 else words[:, None]
        digest.update(repr((tuple(tensor.shape), positions.sum(0, dtype=torch.int64).tolist())).encode())
    return digest.hexdigest()[:16]


def _tensors(weights: DecoderWeights) -> Iterator[Tensor]:
    yield from (weights.embedding, weights.head, weights.final_norm)
    for layer in weights.layers:
        yield from _layer_tensors(layer)


def _layer_tensors(layer: LayerWeights) -> Iterator[Tensor]:
    for field in fields(layer):
        value = getattr(layer, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, nn.Linear):
                yield part.weight
            elif part is not None:
                yield part
