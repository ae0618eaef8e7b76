"""The memory of slots for LoRA adapters on a CPU, in the layout of adapters.h."""

from __future__ import annotations

from inflight.common.kv_size import blocks_for
from inflight.common.model_files.layer_sizes import BYTES_PER_NUMBER, LayerSizes

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
    """Returns the memory of a slot for an adapter of all projections that may have one. `num_recurrent` of the layers
    are recurrent. `outputs` are the sizes that a rank has of the outputs; of one rank they are those of the inputs."""
    size = BYTES_PER_NUMBER[dtype]
    pair = 4 // size
    rank = _up(max_rank, pair)
    total = 0
    for count, depth, widths in inputs.adapted_products(outputs, num_layers, num_recurrent, has_experts=has_experts):
        ranks = _up(rank * len(widths), LANES)
        num_bytes = sum(_up(_up(width, LANES) * rank * size, ALIGNMENT) for width in widths)
        num_bytes += _up(ranks * _up(depth, pair) * size, ALIGNMENT) + _up(ranks * 4, ALIGNMENT)
        total += count * num_bytes
    return total


def _up(number: int, multiple: int) -> int:
    return blocks_for(number, multiple) * multiple
