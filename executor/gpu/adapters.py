"""LoRA adapters on a GPU: their slots in its memory, and the changes of a layer's products.

The slots have fixed addresses and the grid of a step depends on its numbers of tokens and slots alone, so that a
captured step serves any adapters. A step without adapters launches the same kernels, whose programs then end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from inflight.common.model_files.layer_sizes import LayerSizes, gpu_adapter_rank, gpu_adapter_slot_bytes
from inflight.executor.adapters.weights import AdapterMatrix, AdapterWeights
from inflight.executor.checkpoint.decoder_weights import DecoderShape
from inflight.executor.gpu.row_groups import TILE_ROWS, RowGroups
from inflight.executor.kernels.adapters import expand_kernel, shrink_kernel

MAX_TILE_RANKS = 64
TILE_INPUTS = 64
TILE_OUTPUTS = 64
# Columns of A that one program computes, so that a few decodes occupy more of the GPU; and the most splits.
SPLIT_SIZE = 512
MAX_SPLITS = 8


class Product(IntEnum):
    """The matrix products of a layer that adapters change. Each is of adjacent entries of `PROJECTIONS`."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


# The entries of `PROJECTIONS` in each product.
PARTS = ((0, 1, 2), (3,), (4, 5), (6,))


@dataclass(frozen=True, slots=True)
class ProductSize:
    """The sizes of a product: its inputs, and the outputs of its first part and of each other one."""

    num_inputs: int
    first_width: int
    other_width: int
    num_parts: int

    @property
    def num_outputs(self) -> int:
        return self.first_width + (self.num_parts - 1) * self.other_width

    @property
    def split_size(self) -> int:
        """Columns of A of each split, a multiple of TILE_INPUTS."""
        num_splits = min(MAX_SPLITS, -(-self.num_inputs // SPLIT_SIZE))
        return -(-self.num_inputs // (num_splits * TILE_INPUTS)) * TILE_INPUTS

    @property
    def num_splits(self) -> int:
        return -(-self.num_inputs // self.split_size)


class AdapterSlots:
    """Memory for adapters of ranks up to `max_rank`: A and B of every layer and product, by slot. `sizes` are those of
    each layer's products that adapters change: not those of experts, nor the one in front of a mixer."""

    def __init__(
        self, shape: DecoderShape, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self._max_rank, self._rank = max_rank, gpu_adapter_rank(max_rank)
        self.sizes = tuple(_sizes(shape, layer) for layer in range(shape.num_layers))
        self._a, self._b = (
            [
                {
                    product: torch.zeros(num_slots, *of(size, self._rank), dtype=dtype, device=device)
                    for product, size in sizes.items()
                }
                for sizes in self.sizes
            ]
            for of in (_a_shape, _b_shape)
        )
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def load(self, slot: int, weights: AdapterWeights) -> None:
        """Copies an adapter into a slot, and returns when it is there. Steps may run meanwhile, but none of a sequence
        whose adapter was in this slot. Raises `ValueError`."""
        if weights.rank > self._max_rank:
            raise ValueError(f"an adapter of rank {weights.rank} does not fit a slot")
        # A stream of its own: the copies do not wait for the steps that are launched, nor those for the copies.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for layer, matrices in enumerate(weights.layers):
                for product in self.sizes[layer]:
                    self._load_product(slot, layer, product, [matrices[part] for part in PARTS[product]])
        if self._stream is not None:
            self._stream.synchronize()

    def _load_product(self, slot: int, layer: int, product: Product, parts: list[AdapterMatrix | None]) -> None:
        size = self.sizes[layer][product]
        target_a, target_b = self._a[layer][product][slot], self._b[layer][product][slot]
        a, b = torch.zeros(target_a.shape), torch.zeros(target_b.shape)
        for part, matrix in enumerate(parts):
            if matrix is not None:
                first = 0 if part == 0 else size.first_width + (part - 1) * size.other_width
                a[part * self._rank :][: matrix.rank] = matrix.a
                b[first : first + matrix.b.shape[0], : matrix.rank] = matrix.b.float() * matrix.scale
        target_a.copy_(a.to(target_a.dtype))
        target_b.copy_(b.to(target_b.dtype))

    def add(self, layer: int, product: Product, inputs: Tensor, outputs: Tensor, groups: RowGroups) -> None:
        """Adds the changes of a product to its `outputs[T, outputs]` in place, from `inputs[T, inputs]`."""
        if product not in self.sizes[layer]:
            return
        size, rank, count = self.sizes[layer][product], self._rank, groups.slots.shape[0]
        num_ranks, tile_ranks = size.num_parts * rank, min(MAX_TILE_RANKS, rank)
        partials = torch.empty(
            (size.num_splits, count * TILE_ROWS, num_ranks), dtype=torch.float32, device=inputs.device
        )
        shrink_kernel[(count, num_ranks // tile_ranks, size.num_splits)](
            *(inputs, self._a[layer][product], groups.rows, groups.slots, partials, inputs.stride(0), size.num_inputs),
            NUM_RANKS=num_ranks,
            SPLIT_SIZE=size.split_size,
            TILE_ROWS=TILE_ROWS,
            TILE_RANKS=tile_ranks,
            TILE_INPUTS=TILE_INPUTS,
        )
        widest = max(size.first_width, size.other_width)
        expand_kernel[(count, -(-widest // TILE_OUTPUTS), size.num_parts)](
            *(partials, self._b[layer][product], groups.rows, groups.slots, outputs, outputs.stride(0)),
            *(size.num_outputs, size.first_width, size.other_width),
            RANK=rank,
            NUM_RANKS=num_ranks,
            NUM_SPLITS=size.num_splits,
            TILE_ROWS=TILE_ROWS,
            TILE_RANKS=tile_ranks,
            TILE_OUTPUTS=TILE_OUTPUTS,
        )


def slot_bytes(shape: DecoderShape, max_rank: int, dtype: torch.dtype) -> int:
    """Returns the memory of a slot for adapters of ranks up to `max_rank`."""
    attention, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    mixer = 0 if shape.mixer is None else shape.mixer.depth
    sizes = LayerSizes(shape.hidden_size, attention, kv, shape.intermediate_size, mixer=mixer)
    return gpu_adapter_slot_bytes(
        shape.num_layers,
        sizes,
        max_rank,
        dtype.itemsize,
        has_experts=shape.num_experts > 0,
        num_recurrent=len(shape.recurrent_layers),
    )


def _sizes(shape: DecoderShape, layer: int) -> dict[Product, ProductSize]:
    """Returns the sizes of the products that adapters change."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    attention, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if shape.mixer is not None and layer in shape.recurrent_layers:
        sizes = {Product.OUTPUT: ProductSize(shape.mixer.depth, hidden, 0, 1)}
    else:
        sizes = {
            Product.QKV: ProductSize(hidden, attention, kv, 3),
            Product.OUTPUT: ProductSize(attention, hidden, 0, 1),
        }
    if not shape.num_experts:
        sizes |= {Product.GATE_UP: ProductSize(hidden, inner, inner, 2), Product.DOWN: ProductSize(inner, hidden, 0, 1)}
    return sizes


def _a_shape(size: ProductSize, rank: int) -> tuple[int, int]:
    return size.num_parts * rank, size.num_inputs


def _b_shape(size: ProductSize, rank: int) -> tuple[int, int]:
    return size.num_outputs, rank
