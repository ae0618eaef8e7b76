"""The weights of a LoRA adapter, by layer and matrix, and the shapes that they must have.

An adapter changes a weight W to `W + scale * B @ A`, with A `[rank, inputs]` and B `[outputs, rank]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from inflight.executor.checkpoint.decoder_weights import NUM_ATTENTION_PROJECTIONS, DecoderShape
from inflight.executor.checkpoint.shards import Shard


def module_name(layer: int, projection: str) -> str:
    """Returns the name of the module that has a projection of a layer."""
    return f"model.layers.{layer}.{projection}"


@dataclass(frozen=True, slots=True, eq=False)
class AdapterMatrix:
    """The change of one weight: `a[rank, inputs]` and `b[outputs, rank]`."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """For each layer the change of each of `PROJECTIONS`; None where the adapter has none. Without layers,
    `declared_rank` is the rank that its configuration names."""

    layers: tuple[tuple[AdapterMatrix | None, ...], ...]
    declared_rank: int = 0

    @property
    def rank(self) -> int:
        """The largest rank."""
        ranks = (matrix.rank for layer in self.layers for matrix in layer if matrix is not None)
        return max(ranks, default=self.declared_rank)

    def part_of(self, shard: Shard, shape: DecoderShape) -> AdapterWeights:
        """Returns what a rank of a model needs of the adapter: all of A, and its rows of B."""
        if shard.num_ranks == 1:
            return self
        outputs = shard.outputs(shape)
        return AdapterWeights(
            tuple(
                tuple(
                    None if matrix is None else replace(matrix, b=matrix.b[rows])
                    for matrix, rows in zip(layer, outputs, strict=True)
                )
                for layer in self.layers
            )
        )


@dataclass(frozen=True, slots=True)
class RankLimit:
    """The largest rank, of adapters whose weights another engine reads."""

    max_rank: int


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The model that adapters must be made for, and the largest rank."""

    shape: DecoderShape
    max_rank: int

    def modules(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yields the module names of the matrices, layer by layer in the order of `PROJECTIONS`, and the shape
        `(outputs, inputs)` of each. Experts and what recurrent layers have in place of attention have no adapters."""
        shape = self.shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        attention, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        queries = attention * (2 if shape.has_output_gate else 1)
        sizes = (
            *((queries, hidden), (kv, hidden), (kv, hidden), (hidden, attention)),
            *((inner, hidden), (inner, hidden), (hidden, inner)),
        )
        for layer in range(shape.num_layers):
            for place, (name, size) in enumerate(zip(shape.projections, sizes, strict=True)):
                is_left_out = (
                    layer in shape.recurrent_layers if place < NUM_ATTENTION_PROJECTIONS else shape.num_experts > 0
                )
                if not is_left_out:
                    yield module_name(layer, name), size
