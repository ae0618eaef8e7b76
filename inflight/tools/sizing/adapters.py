"""The memory of slots for LoRA adapters: on a CPU in the layout of adapters.h, on a GPU in that of executor/gpu."""

from __future__ import annotations

from common.kv_size import blocks_for
from inflight.tools.sizing.layer_sizes import BYTES_PER_NUMBER, LayerSizes

LANES, ALIGNMENT = 16, 64
# Rows of the smallest matrix instruction of a GPU.
LEAST_GPU_RANK = 16


def cpu_adapter_slot_bytes(num_layers: int, sizes: LayerSizes, max_rank: int, dtype: str) -> int:
    """Returns the memory of a slot for an adapter of all seven projections."""
    size = BYTES_PER_NUMBER[dtype]
    pair = 4 // size
    rank = _up(max_rank, pair)
    total = 0
    for inputs, outputs in _products(sizes):
        total += sum(_up(_up(output, LANES) * rank * size, ALIGNMENT) for output in outputs)
        ranks = _up(rank * len(outputs), LANES)
        total += _up(ranks * _up(inputs, pair) * size, ALIGNMENT) + _up(ranks * 4, ALIGNMENT)
    return num_layers * total


def gpu_adapter_slot_bytes(num_layers: int, sizes: LayerSizes, max_rank: int, dtype: str) -> int:
    """Returns the memory of a slot for an adapter of all seven projections. Its rank is a power of two."""
    rank = max(LEAST_GPU_RANK, 1 << (max_rank - 1).bit_length())
    numbers = sum(rank * (len(outputs) * inputs + sum(outputs)) for inputs, outputs in _products(sizes))
    return num_layers * numbers * BYTES_PER_NUMBER[dtype]


def _products(sizes: LayerSizes) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns the inputs of each product, and the outputs of the projections that it computes."""
    hidden, attention, kv, inner = sizes.hidden, sizes.attention, sizes.kv, sizes.inner
    return (hidden, (attention, kv, kv)), (attention, (hidden,)), (hidden, (inner, inner)), (inner, (hidden,))


def _up(number: int, multiple: int) -> int:
    return blocks_for(number, multiple) * multiple
