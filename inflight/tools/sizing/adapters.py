"""The memory of slots for LoRA adapters on a CPU, in the layout of adapters.h."""

from __future__ import annotations

from common.kv_size import blocks_for
from inflight.tools.sizing.layer_sizes import BYTES_PER_NUMBER, LayerSizes

LANES, ALIGNMENT = 16, 64


def adapter_slot_bytes(num_layers: int, sizes: LayerSizes, max_rank: int, dtype: str) -> int:
    """Returns the memory of a slot for an adapter of all seven projections."""
    hidden, attention, kv, inner = sizes.hidden, sizes.attention, sizes.kv, sizes.inner
    # The inputs of each product, and the outputs of the projections that it computes.
    products = ((hidden, (attention, kv, kv)), (attention, (hidden,)), (hidden, (inner, inner)), (inner, (hidden,)))
    size = BYTES_PER_NUMBER[dtype]
    pair = 4 // size
    rank = _up(max_rank, pair)
    total = 0
    for inputs, outputs in products:
        total += sum(_up(_up(output, LANES) * rank * size, ALIGNMENT) for output in outputs)
        ranks = _up(rank * len(outputs), LANES)
        total += _up(ranks * _up(inputs, pair) * size, ALIGNMENT) + _up(ranks * 4, ALIGNMENT)
    return num_layers * total


def _up(number: int, multiple: int) -> int:
    return blocks_for(number, multiple) * multiple
