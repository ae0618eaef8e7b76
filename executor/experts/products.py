"""Products of the pairs of a step with the matrices of their experts.

`GroupedProduct` is the seam for formats of weights: a format is a class here that has the matrices of all experts, and
the way in which `grouped_kernel` reads a tile of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inflight.executor.experts.tiling import ExpertTiling
from inflight.executor.kernels.experts import grouped_kernel


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """The pairs of a step in tiles, as `kernels.routing` describes them. `experts` are those of the tiles, which are
    the pairs if `tiling.by_pair`; `pairs` is unused then."""

    tiling: ExpertTiling
    num_pairs: int
    experts: Tensor
    pairs: Tensor


class GroupedProduct(Protocol):
    """One of the two matrices of every expert, in some format."""

    @property
    def num_outputs(self) -> int:
        """Columns that this rank computes; of gates and what they gate one half."""
        ...

    def multiply(self, inputs: Tensor, tiles: Tiles, weights: Tensor | None = None) -> Tensor:
        """Multiplies the row of each pair by the matrix of its expert, and returns `[pairs, num_outputs]`: the products
        times the `weights` `[pairs]` in float32, or without weights activation(gate) * up of the products.

        `inputs` `[rows, size]` have a row for every pair, or for every token, of which a pair `p` reads
        `p // (pairs of a token)`.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DenseProduct:
    """Matrices `[experts, outputs, size]` in the dtype of the activations. With `has_gate` the first half of the
    outputs are gates of the second."""

    matrices: Tensor
    has_gate: bool = False
    has_gelu: bool = False

    @property
    def num_outputs(self) -> int:
        return self.matrices.shape[1] // (2 if self.has_gate else 1)

    def multiply(self, inputs: Tensor, tiles: Tiles, weights: Tensor | None = None) -> Tensor:
        assert self.has_gate == (weights is None)
        tiling, num_outputs = tiles.tiling, self.num_outputs
        outputs = torch.empty((tiles.num_pairs, num_outputs), dtype=inputs.dtype, device=inputs.device)
        tile_outputs = tiling.columns // (2 if self.has_gate else 1)
        grouped_kernel[(tiles.experts.shape[0], -(-num_outputs // tile_outputs))](
            *(inputs, self.matrices, tiles.pairs, tiles.experts, outputs if weights is None else weights, outputs),
            *(inputs.stride(0), inputs.shape[1], num_outputs),
            PAIRS_PER_ROW=tiles.num_pairs // inputs.shape[0],
            BY_PAIR=tiling.by_pair,
            HAS_GATE=self.has_gate,
            HAS_GELU=self.has_gelu,
            TILE_ROWS=tiling.rows,
            TILE_OUTPUTS=tile_outputs,
            TILE_SIZE=tiling.depth,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        return outputs
