"""Products of the pairs of a step with the matrices of their experts, dense or of codes as a checkpoint has them.

Formats of codes are those of `products.coded`, whose decoder `grouped_kernel` calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.executor.checkpoint.decoder_weights import CLAMPED, GELU_TANH, SQUARED_RELU, DecoderShape
from inflight.executor.experts.tiling import ExpertTiling
from inflight.executor.kernels.experts import grouped_kernel
from inflight.executor.products.coded import CodedMatrix

# The constants of matrices that are not of codes.
DENSE: dict[str, Any] = {
    "KIND": None,
    "SCALE_KIND": None,
    "BESIDE": None,
    "HAS_FACTORS": False,
    "GROUP": 1,
    "ROW_BLOCK": 1,
}


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """The pairs of a step in tiles, as `kernels.routing` describes them. `experts` are those of the tiles, which are
    the pairs if `tiling.by_pair`; `pairs` is unused then."""

    tiling: ExpertTiling
    num_pairs: int
    experts: Tensor
    pairs: Tensor


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation of gates, and what they gate: see `DecoderShape`. Without `limit` it is SiLU or, with `has_gelu`,
    GELU approximated by tanh. Without gates it is the square of ReLU."""

    has_gates: bool = True
    has_gelu: bool = False
    factor: float = 1.0
    limit: float | None = None

    @classmethod
    def of(cls, shape: DecoderShape) -> Activation:
        """Returns the activation of a model."""
        if shape.activation == CLAMPED:
            return cls(factor=shape.gate_factor, limit=shape.gate_limit)
        return cls(shape.activation != SQUARED_RELU, shape.activation == GELU_TANH)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedProduct:
    """One of the two matrices of every expert: `matrix` `[experts, outputs, size]` in the dtype of the activations, or
    of codes `[experts * outputs, size]`, whose columns have the `order` of `ExpertMatrices`. With an `activation` that
    has gates the first half of the outputs are gates of the second. `bias` is `[experts, outputs]`."""

    matrix: Tensor | CodedMatrix
    num_experts: int
    activation: Activation | None = None
    bias: Tensor | None = None
    order: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """Columns that this rank computes; of gates and what they gate one half."""
        return self._num_rows // self.num_experts // (2 if self._has_gates else 1)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrices."""
        return self.matrix.nbytes if isinstance(self.matrix, Tensor) else self.matrix.num_bytes

    def multiply(self, inputs: Tensor, tiles: Tiles, weights: Tensor | None = None) -> Tensor:
        """Multiplies the row of each pair by the matrix of its expert, adds the bias, and returns `[pairs,
        num_outputs]`: the products times the `weights` `[pairs]` in float32, or without weights their activation.

        `inputs` `[rows, size]` have a row for every pair, or for every token, of which a pair `p` reads
        `p // (pairs of a token)`.
        """
        tiling, num_outputs, activation = tiles.tiling, self.num_outputs, self.activation or Activation()
        assert (self.activation is None) == (weights is not None)
        outputs = torch.empty((tiles.num_pairs, num_outputs), dtype=inputs.dtype, device=inputs.device)
        tile_outputs = tiling.columns // (2 if self._has_gates else 1)
        tensors, num_scales, constants = self._form()
        grouped_kernel[(tiles.experts.shape[0], -(-num_outputs // tile_outputs))](
            *(
                inputs,
                *tensors,
                inputs if self.order is None else self.order,
                inputs if self.bias is None else self.bias,
            ),
            *(tiles.pairs, tiles.experts, outputs if weights is None else weights, outputs),
            *(inputs.stride(0), inputs.shape[1], num_outputs, self._num_rows, num_scales),
            **constants,
            HAS_ORDER=self.order is not None,
            HAS_BIAS=self.bias is not None,
            PAIRS_PER_ROW=tiles.num_pairs // inputs.shape[0],
            BY_PAIR=tiling.by_pair,
            HAS_GATE=self._has_gates,
            HAS_GELU=activation.has_gelu,
            IS_SQUARED=not activation.has_gates,
            GATE_FACTOR=activation.factor,
            GATE_LIMIT=activation.limit,
            TILE_ROWS=tiling.rows,
            TILE_OUTPUTS=tile_outputs,
            TILE_SIZE=tiling.depth,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        return outputs

    @property
    def _has_gates(self) -> bool:
        return self.activation is not None and self.activation.has_gates

    @property
    def _num_rows(self) -> int:
        """Rows of the matrices of all experts."""
        matrix = self.matrix
        return matrix.shape[0] * matrix.shape[1] if isinstance(matrix, Tensor) else matrix.shape[0]

    def _form(self) -> tuple[tuple[Tensor, ...], int, dict[str, Any]]:
        """Returns the kernel's arguments for the matrices: tensors, rows of scales, and constants."""
        if isinstance(self.matrix, Tensor):
            return (self.matrix,) * 4, 0, DENSE
        return self.matrix.tensors, self.matrix.scales.shape[1], self.matrix.constants
