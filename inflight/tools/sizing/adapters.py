"""The memory of slots for LoRA adapters: on a CPU in the layout of adapters.h, on a GPU in that of executor/gpu."""

from __future__ import annotations

from inflight.common.kv_size import blocks_for
from inflight.tools.sizing.layer_sizes import BYTES_PER_NUMBER, LayerSizes

LANES, ALIGNMENT = 16, 64
# Rows of the smallest matrix instruction of a GPU.
LEAST_GPU_RANK = 16
# A rank's part of the columns of a projection is a multiple of the first, of gate and up of the second.
PART_COLUMNS, PART_INNER_COLUMNS = 32, 64
# The first of `_products`.
NUM_ATTENTION_PRODUCTS = 2


def cpu_adapter_slot_bytes(
    num_layers: int, inputs: LayerSizes, outputs: LayerSizes, max_rank: int, dtype: str, *, has_experts: bool
) -> int:
    """Returns the memory of a slot for an adapter of all seven projections, or of the four of attention beside experts,
    which have no adapters. `outputs` are the sizes that a rank has of the outputs; of one rank they are those of the
    inputs."""
    size = BYTES_PER_NUMBER[dtype]
    pair = 4 // size
    rank = _up(max_rank, pair)
    total = 0
    for depth, widths in _products(inputs, outputs)[: NUM_ATTENTION_PRODUCTS if has_experts else None]:
        total += sum(_up(_up(width, LANES) * rank * size, ALIGNMENT) for width in widths)
        ranks = _up(rank * len(widths), LANES)
        total += _up(ranks * _up(depth, pair) * size, ALIGNMENT) + _up(ranks * 4, ALIGNMENT)
    return num_layers * total


def gpu_adapter_slot_bytes(num_layers: int, sizes: LayerSizes, max_rank: int, dtype: str) -> int:
    """Returns the memory of a slot for an adapter of all seven projections. Its rank is a power of two."""
    rank = max(LEAST_GPU_RANK, 1 << (max_rank - 1).bit_length())
    numbers = sum(rank * (len(widths) * depth + sum(widths)) for depth, widths in _products(sizes, sizes))
    return num_layers * numbers * BYTES_PER_NUMBER[dtype]


def outputs_of_rank(sizes: LayerSizes, kv: int, num_ranks: int) -> LayerSizes:
    """Returns the columns that the first rank has, which has the most; `kv` are those of its keys."""
    hidden, inner = (
        min(columns, _up(columns, num_ranks * multiple) // num_ranks)
        for columns, multiple in ((sizes.hidden, PART_COLUMNS), (sizes.inner, PART_INNER_COLUMNS))
    )
    return sizes if num_ranks == 1 else LayerSizes(hidden, sizes.attention // num_ranks, kv, inner)


def _products(inputs: LayerSizes, outputs: LayerSizes) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns the inputs of each product, and the outputs of the projections that it computes."""
    return (
        (inputs.hidden, (outputs.attention, outputs.kv, outputs.kv)),
        (inputs.attention, (outputs.hidden,)),
        (inputs.hidden, (outputs.inner, outputs.inner)),
        (inputs.inner, (outputs.hidden,)),
    )


def _up(number: int, multiple: int) -> int:
    return blocks_for(number, multiple) * multiple
