"""The memory of slots for LoRA adapters on a CPU, in the layout of adapters.h."""

from __future__ import annotations

from common.kv_size import blocks_for
from inflight.tools.sizing.layer_sizes import BYTES_PER_NUMBER, LayerSizes

LANES, ALIGNMENT = 16, 64
# A rank's part of the columns of a projection is a multiple of the first, of gate and up of the second.
PART_COLUMNS, PART_INNER_COLUMNS = 32, 64


def adapter_slot_bytes(num_layers: int, inputs: LayerSizes, outputs: LayerSizes, max_rank: int, dtype: str) -> int:
    """Returns the memory of a slot for an adapter of all seven projections. `outputs` are the sizes that a rank has of
    the outputs; of one rank they are those of the inputs."""
    # The inputs of each product, and the outputs of the projections that it computes.
    products = (
        (inputs.hidden, (outputs.attention, outputs.kv, outputs.kv)),
        (inputs.attention, (outputs.hidden,)),
        (inputs.hidden, (outputs.inner, outputs.inner)),
        (inputs.inner, (outputs.hidden,)),
    )
    size = BYTES_PER_NUMBER[dtype]
    pair = 4 // size
    rank = _up(max_rank, pair)
    total = 0
    for depth, widths in products:
        total += sum(_up(_up(width, LANES) * rank * size, ALIGNMENT) for width in widths)
        ranks = _up(rank * len(widths), LANES)
        total += _up(ranks * _up(depth, pair) * size, ALIGNMENT) + _up(ranks * 4, ALIGNMENT)
    return num_layers * total


def outputs_of_rank(sizes: LayerSizes, kv: int, num_ranks: int) -> LayerSizes:
    """Returns the columns that the first rank has, which has the most; `kv` are those of its keys."""
    hidden, inner = (
        min(columns, _up(columns, num_ranks * multiple) // num_ranks)
        for columns, multiple in ((sizes.hidden, PART_COLUMNS), (sizes.inner, PART_INNER_COLUMNS))
    )
    return sizes if num_ranks == 1 else LayerSizes(hidden, sizes.attention // num_ranks, kv, inner)


def _up(number: int, multiple: int) -> int:
    return blocks_for(number, multiple) * multiple
