"""The memory of slots for LoRA adapters on a CPU, in the layout of adapters.h."""

from __future__ import annotations

from inflight.common.kv_size import blocks_for
from inflight.common.model_files.layer_sizes import BYTES_PER_NUMBER, NUM_ATTENTION_PRODUCTS, LayerSizes

LANES, ALIGNMENT = 16, 64


def cpu_adapter_slot_bytes(
    num_layers: int,
    inputs: LayerSizes,
    outputs: LayerSizes,
    max_rank: int,
    dtype: str,
    *,
    has_experts: bool,
    num_recurrent: int = 0,
) -> int:
    """Returns the memory of a slot for an adapter of all seven projections, or of the four of attention beside experts,
    which have no adapters. Those `num_recurrent` of the layers that are recurrent have none of attention. `outputs` are
    the sizes that a rank has of the outputs; of one rank they are those of the inputs."""
    size = BYTES_PER_NUMBER[dtype]
    pair = 4 // size
    rank = _up(max_rank, pair)
    total = 0
    for number, (depth, widths) in enumerate(inputs.products(outputs)):
        is_attention = number < NUM_ATTENTION_PRODUCTS
        if has_experts and not is_attention:
            break
        ranks = _up(rank * len(widths), LANES)
        num_bytes = sum(_up(_up(width, LANES) * rank * size, ALIGNMENT) for width in widths)
        num_bytes += _up(ranks * _up(depth, pair) * size, ALIGNMENT) + _up(ranks * 4, ALIGNMENT)
        total += num_bytes * (num_layers - num_recurrent if is_attention else num_layers)
    return total


def _up(number: int, multiple: int) -> int:
    return blocks_for(number, multiple) * multiple
