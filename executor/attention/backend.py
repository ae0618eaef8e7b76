"""Interface of an attention backend.

A backend owns the layout of a layer's KV: it allocates the KV, writes new keys and values into it and attends over it.
It keeps no state between calls. A block is filled from its first slot on. What it held for an earlier sequence, even
NaN, never reaches a result.

The KV of a layer has the model's dtype, or is int8 or FP8 with a scale for each token and KV head (`quantized`,
`inflight.executor.kernels.fp8`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inflight.executor.step.batch import StepBatch


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a layer keeps per token: `num_kv_heads` keys and as many values, each of `head_dim` numbers."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class LayerKv:
    """The KV of a layer, in its backend's layout. In every layout the blocks are consecutive, the spare one first.

    `scales` are those of int8 or FP8 keys and values, where the backend keeps them apart.
    """

    shape: KvShape
    keys: Tensor
    values: Tensor
    num_blocks: int
    scales: tuple[Tensor, ...] = ()

    @property
    def is_int8(self) -> bool:
        """Whether keys and values are int8 with scales."""
        return self.keys.dtype == torch.int8

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for tensor in (self.keys, self.values, *self.scales))

    def rows(self) -> tuple[Tensor, ...]:
        """Returns the memory of keys, values and scales as `[num_blocks, words]` int64, so that blocks can be moved in
        any layout."""
        return tuple(_rows(tensor, self.num_blocks) for tensor in (self.keys, self.values, *self.scales))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a query and a key make a score: `query · key * scale`, then `softcap * tanh(score / softcap)`.

    A query sees the `sliding_window` latest keys, its own included; None is all of them. With `has_sinks` the softmax
    has one more score for each head, which no value belongs to.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


class StepAttention(Protocol):
    """What computes the attention of a step whose keys and values are written."""

    def attend(
        self, queries: Tensor, kv: LayerKv, batch: StepBatch, scoring: Scoring, sinks: Tensor | None = None
    ) -> Tensor:
        """Computes causal attention of `queries[T, num_heads, head_dim]`, whose keys are written. Returns the same
        shape. `sinks` `[num_heads]` float32 are the scores that belong to no key, if `scoring` has them."""
        ...


class AttentionBackend(StepAttention, Protocol):
    """One implementation of paged attention. Queries, keys and values may have any strides."""

    name: str
    quantized_kv_dtypes: tuple[torch.dtype, ...]

    def allocate(
        self, shape: KvShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKv:
        """Allocates the KV of a layer, all zero. `dtype` is that of queries, keys and values, or one of
        `quantized_kv_dtypes`."""
        ...

    def write(self, kv: LayerKv, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        """Stores `keys` and `values`, both `[T, num_kv_heads, head_dim]`, in the slots of the batch."""
        ...


def _rows(tensor: Tensor, num_blocks: int) -> Tensor:
    # A block has at least 16 tokens, hence whole words, whatever the type.
    return tensor.view(num_blocks, -1).view(torch.int64)
