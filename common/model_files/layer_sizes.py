"""Sizes of a decoder layer's projections, of their parts on ranks, and of adapters for them. Pure; executors and
`inflight size` use them."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_NUMBER = {"bfloat16": 2, "float32": 4}
# A rank's part of the columns of a projection is a multiple of the first, of gate and up of the second: `PART_COLUMNS`
# and `PART_INNER_COLUMNS` of decoder.h.
PART_COLUMNS = 32
PART_INNER_COLUMNS = 64
# The first of `LayerSizes.products`, which adapters change beside experts.
NUM_ATTENTION_PRODUCTS = 2
# Rows of the smallest matrix instruction of a GPU: `MIN_ROWS` of executor/kernels/tiling.py.
LEAST_GPU_RANK = 16


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Lengths of the rows between the projections of a layer: `attention` of all heads, `kv` of all KV heads. With
    `has_gates` the projection of queries yields as many gates as well."""

    hidden: int
    attention: int
    kv: int
    inner: int
    has_gates: bool = False

    def of_rank(self, num_ranks: int, kv: int) -> LayerSizes:
        """Returns the outputs that the first rank has, which has the most; `kv` are those of its keys."""
        if num_ranks == 1:
            return self
        hidden, inner = (
            min(columns, columns_of_rank(columns, num_ranks, multiple))
            for columns, multiple in ((self.hidden, PART_COLUMNS), (self.inner, PART_INNER_COLUMNS))
        )
        return LayerSizes(hidden, self.attention // num_ranks, kv, inner, self.has_gates)

    def products(self, outputs: LayerSizes) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Returns the inputs of each product, and the outputs of the projections that it computes. `outputs` are the
        sizes that a rank has of the outputs."""
        queries = outputs.attention * (2 if outputs.has_gates else 1)
        return (
            (self.hidden, (queries, outputs.kv, outputs.kv)),
            (self.attention, (outputs.hidden,)),
            (self.hidden, (outputs.inner, outputs.inner)),
            (self.inner, (outputs.hidden,)),
        )


def columns_of_rank(count: int, num_ranks: int, multiple: int) -> int:
    """Returns the most columns of `count` that a rank has. The last ranks may have fewer."""
    return -(-count // (num_ranks * multiple)) * multiple


def gpu_adapter_rank(max_rank: int) -> int:
    """Returns the rank of a slot on a GPU: a power of two, and as large as matrix instructions need."""
    return max(LEAST_GPU_RANK, 1 << (max_rank - 1).bit_length())


def gpu_adapter_slot_bytes(
    num_layers: int, sizes: LayerSizes, max_rank: int, number_bytes: int, *, has_experts: bool
) -> int:
    """Returns the memory of a slot on a GPU for an adapter of all seven projections, or of the four of attention beside
    experts, which have no adapters."""
    rank = gpu_adapter_rank(max_rank)
    products = sizes.products(sizes)[: NUM_ATTENTION_PRODUCTS if has_experts else None]
    numbers = sum(rank * (len(widths) * depth + sum(widths)) for depth, widths in products)
    return num_layers * numbers * number_bytes
