"""The weights of a LoRA adapter, by layer and matrix, and the shapes that they must have.

An adapter changes a weight W to `W + scale * B @ A`, with A `[rank, inputs]` and B `[outputs, rank]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from inflight.executor.checkpoint.decoder_weights import (
    NUM_ATTENTION_PROJECTIONS,
    OUTPUT_PROJECTION,
    DecoderShape,
)
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

    def names(self, layer: int) -> tuple[str | None, ...]:
        """Returns the module names of a layer's matrices, in the order of `PROJECTIONS`; None where an adapter may
        change none: experts, and the projections in front of a mixer."""
        shape = self.shape
        names: list[str | None] = list(shape.projections)
        if layer in shape.recurrent_layers:
            names[:NUM_ATTENTION_PROJECTIONS] = [None] * NUM_ATTENTION_PROJECTIONS
            names[OUTPUT_PROJECTION] = shape.mixer_output
        if shape.num_experts:
            names[NUM_ATTENTION_PROJECTIONS:] = [None] * (len(names) - NUM_ATTENTION_PROJECTIONS)
        return tuple(None if name is None else module_name(layer, name) for name in names)

    def modules(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yields the names of all layers, and the shape `(outputs, inputs)` of each matrix."""
        shape = self.shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        attention, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        queries = attention * (2 if shape.has_output_gate else 1)
        for layer in range(shape.num_layers):
            mixer = shape.mixer if layer in shape.recurrent_layers else None
            depth = attention if mixer is None else mixer.depth
            sizes = (
                *((queries, hidden), (kv, hidden), (kv, hidden), (hidden, depth)),
                *((inner, hidden), (inner, hidden), (hidden, inner)),
            )
            for name, size in zip(self.names(layer), sizes, strict=True):
                if name is not None:
                    yield name, size
