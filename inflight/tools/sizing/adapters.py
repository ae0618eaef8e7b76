"""The memory of slots for LoRA adapters on a CPU, in the layout of adapters.h."""

from __future__ import annotations

from inflight.common.kv_size import blocks_for
from inflight.common.model_files.layer_sizes import BYTES_PER_NUMBER, NUM_ATTENTION_PRODUCTS, LayerSizes

LANES, ALIGNMENT = 16, 64


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
    for depth, widths in inputs.products(outputs)[: NUM_ATTENTION_PRODUCTS if has_experts else None]:
        total += sum(_up(_up(width, LANES) * rank * size, ALIGNMENT) for width in widths)
        ranks = _up(rank * len(widths), LANES)
        total += _up(ranks * _up(depth, pair) * size, ALIGNMENT) + _up(ranks * 4, ALIGNMENT)
    return num_layers * total


def _up(number: int, multiple: int) -> int:
    return blocks_for(number, multiple) * multiple
