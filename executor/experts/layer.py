"""A layer of experts on a GPU: a token's experts are chosen, pairs are put in order, and two grouped products follow.

The host never waits for the device, and every launch has a size that follows from the number of tokens, so a step can
be captured in a CUDA graph. A step of few tokens launches five kernels, any other six, and a shared expert its three
products more.

Of several ranks, each has some columns of both matrices of every expert. All ranks choose by the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.executor.checkpoint.decoder_weights import DecoderShape, LayerWeights
from inflight.executor.checkpoint.quantized_weight import Matrix
from inflight.executor.experts.products import Activation, GroupedProduct, Tiles
from inflight.executor.experts.tiling import expert_tiling
from inflight.executor.kernels.experts import add_experts_kernel
from inflight.executor.kernels.routing import choose_experts_kernel, order_pairs_kernel, score_experts_kernel
from inflight.executor.kernels.tiling import power_of_two
from inflight.executor.products.coded import CodedMatrix, coded_matrix

# Rows and scores of a tile: the least of a matrix instruction, so that few rows occupy more of the GPU.
SCORE_TILE = 16
# Bytes of a row that a program of scores loads at once.
SCORE_BYTES = 256
# Pairs that a program that puts them in order reads at once, by one warp for each of the first number.
MIN_SCAN, MAX_SCAN = 256, 4096
ADD_TILE = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The experts of each row `[T, experts per token]` int32, their weights in float32, and all scores."""

    experts: Tensor
    weights: Tensor
    scores: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayer:
    """The weights of a layer's experts. `router` is `[num_experts, hidden]`, with one row more if a shared expert has a
    gate, and `router_bias` has as many numbers. `correction` `[num_experts]` is float32."""

    shape: DecoderShape
    router: Tensor
    correction: Tensor | None
    gate_up: GroupedProduct
    down: GroupedProduct
    router_bias: Tensor | None = None

    @classmethod
    def of(cls, shape: DecoderShape, layer: LayerWeights) -> ExpertLayer:
        """Takes over the weights of a layer with experts."""
        (gate_up,), down, router, bias = layer.gate_up_parts, layer.down, layer.router, layer.router_bias
        assert router is not None
        if layer.shared_gate is not None:
            router = torch.cat((router, layer.shared_gate.to(router.dtype)))
            bias = None if bias is None else torch.cat((bias, bias.new_zeros(1)))
        count, activation = shape.num_experts, Activation.of(shape)
        return cls(
            shape=shape,
            router=router,
            correction=None if layer.router_correction is None else layer.router_correction.float(),
            gate_up=GroupedProduct(_form(gate_up), count, activation, layer.gate_up_bias, layer.gate_up_order),
            down=GroupedProduct(_form(down), count, None, layer.down_bias, layer.down_order),
            router_bias=bias,
        )

    def compute(self, hidden: Tensor, shared: Tensor | None, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what experts yield for `hidden[T, hidden]`, plus `shared`, what a shared expert yields without its
        gate; of several ranks this one's columns. `whole` returns all columns of pairs' inner activations."""
        choice = self.choose(hidden)
        tiles = self.order(choice.experts, hidden.element_size())
        inner = whole(self.gate_up.multiply(hidden, tiles))
        return self._add(self.down.multiply(inner, tiles, choice.weights), shared, choice)

    def choose(self, hidden: Tensor) -> Choice:
        """Chooses the experts of every row."""
        shape, routing = self.shape, self.shape.routing
        num_rows, num_scores, num_chosen = hidden.shape[0], self.router.shape[0], shape.num_experts_per_token
        scores = torch.empty((num_rows, num_scores), dtype=torch.float32, device=hidden.device)
        score_experts_kernel[(-(-num_rows // SCORE_TILE), -(-num_scores // SCORE_TILE))](
            *(
                hidden,
                self.router,
                self.router if self.router_bias is None else self.router_bias,
                scores,
                num_rows,
                hidden.stride(0),
                hidden.shape[1],
                num_scores,
            ),
            HAS_BIAS=self.router_bias is not None,
            TILE_ROWS=SCORE_TILE,
            TILE_SCORES=SCORE_TILE,
            TILE_SIZE=SCORE_BYTES // self.router.element_size(),
            num_stages=4,
        )
        experts = torch.empty((num_rows, num_chosen), dtype=torch.int32, device=hidden.device)
        weights = torch.empty((num_rows, num_chosen), dtype=torch.float32, device=hidden.device)
        choose_experts_kernel[(num_rows,)](
            *(scores, scores if self.correction is None else self.correction, experts, weights),
            *(num_scores, routing.scale),
            NUM_EXPERTS=shape.num_experts,
            NUM_CHOSEN=num_chosen,
            PADDED_CHOSEN=power_of_two(num_chosen),
            NUM_GROUPS=routing.num_groups,
            NUM_CHOSEN_GROUPS=routing.num_chosen_groups,
            PADDED_GROUPS=power_of_two(routing.num_groups),
            PADDED_MEMBERS=power_of_two(shape.num_experts // routing.num_groups),
            HAS_SIGMOID=routing.has_sigmoid,
            HAS_CORRECTION=self.correction is not None,
            NORMALIZES=shape.normalizes_experts,
            num_warps=1,
        )
        return Choice(experts, weights, scores)

    def order(self, experts: Tensor, element_bytes: int) -> Tiles:
        """Puts the pairs of a step into tiles."""
        num_experts, num_pairs = self.shape.num_experts, experts.numel()
        tiling = expert_tiling(num_pairs, num_experts, element_bytes)
        if tiling.by_pair:
            return Tiles(tiling, num_pairs, experts.view(-1), experts)
        num_tiles = tiling.num_tiles(num_pairs, num_experts)
        tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=experts.device)
        pairs = torch.empty(num_tiles * tiling.rows, dtype=torch.int32, device=experts.device)
        scan = max(MIN_SCAN, min(MAX_SCAN, power_of_two(num_pairs)))
        order_pairs_kernel[(num_experts,)](
            *(experts, pairs, tile_experts, num_pairs, num_tiles),
            NUM_EXPERTS=num_experts,
            PADDED_EXPERTS=power_of_two(num_experts + 1),
            TILE_ROWS=tiling.rows,
            SCAN=scan,
            num_warps=scan // MIN_SCAN,
        )
        return Tiles(tiling, num_pairs, tile_experts, pairs)

    def _add(self, products: Tensor, shared: Tensor | None, choice: Choice) -> Tensor:
        """Returns the sums of each row's products, and of what a shared expert yields."""
        num_rows, size = choice.experts.shape[0], products.shape[1]
        outputs = torch.empty((num_rows, size), dtype=products.dtype, device=products.device)
        add_experts_kernel[(num_rows, -(-size // ADD_TILE))](
            *(products, products if shared is None else shared, choice.scores, outputs, size, choice.scores.shape[1]),
            NUM_CHOSEN=choice.experts.shape[1],
            HAS_SHARED=shared is not None,
            HAS_GATE=self.router.shape[0] > self.shape.num_experts,
            TILE=ADD_TILE,
        )
        return outputs


def _form(matrix: Matrix) -> Tensor | CodedMatrix:
    """Returns the matrices of all experts as products read them."""
    return matrix.contiguous() if isinstance(matrix, Tensor) else coded_matrix(matrix)
