"""Sizes of a decoder layer's projections, of their parts on ranks, and of adapters for them. Pure; executors and
`inflight size` use them."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_NUMBER = {"bfloat16": 2, "float32": 4}
# A rank's part of the columns of a projection is a multiple of the first, of gate and up of the second: `PART_COLUMNS`
# and `PART_INNER_COLUMNS` of decoder.h.
PART_COLUMNS = 32
PART_INNER_COLUMNS = 64
# Rows of the smallest matrix instruction of a GPU: `MIN_ROWS` of executor/kernels/tiling.py.
LEAST_GPU_RANK = 16


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Lengths of the rows between the projections of a layer: `attention` of all heads, `kv` of all KV heads, `mixer`
    of what a recurrent layer yields. With `has_gates` the projection of queries yields as many gates as well."""

    hidden: int
    attention: int
    kv: int
    inner: int
    has_gates: bool = False
    mixer: int = 0

    def of_rank(self, num_ranks: int, kv: int) -> LayerSizes:
        """Returns the outputs that the first rank has, which has the most; `kv` are those of its keys."""
        if num_ranks == 1:
            return self
        hidden, inner = (
            min(columns, columns_of_rank(columns, num_ranks, multiple))
            for columns, multiple in ((self.hidden, PART_COLUMNS), (self.inner, PART_INNER_COLUMNS))
        )
        return LayerSizes(hidden, self.attention // num_ranks, kv, inner, self.has_gates)

    def adapted_products(
        self, outputs: LayerSizes, num_layers: int, num_recurrent: int, *, has_experts: bool
    ) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """Returns the products that adapters change: in how many layers, the inputs, and the outputs of the projections
        that it computes. `outputs` are the sizes that a rank has of the outputs. Experts have no adapters, and of the
        projections of recurrent layers the last one has some."""
        queries = outputs.attention * (2 if outputs.has_gates else 1)
        num_attention = num_layers - num_recurrent
        of_mixing = (
            (num_attention, self.hidden, (queries, outputs.kv, outputs.kv)),
            (num_attention, self.attention, (outputs.hidden,)),
            (num_recurrent, self.mixer, (outputs.hidden,)),
        )
        if has_experts:
            return of_mixing
        of_feed_forward = (self.hidden, (outputs.inner, outputs.inner)), (self.inner, (outputs.hidden,))
        return (*of_mixing, *((num_layers, *one) for one in of_feed_forward))


def columns_of_rank(count: int, num_ranks: int, multiple: int) -> int:
    """Returns the most columns of `count` that a rank has. The last ranks may have fewer."""
    return -(-count // (num_ranks * multiple)) * multiple


def gpu_adapter_rank(max_rank: int) -> int:
    """Returns the rank of a slot on a GPU: a power of two, and as large as matrix instructions need."""
    return max(LEAST_GPU_RANK, 1 << (max_rank - 1).bit_length())


def gpu_adapter_slot_bytes(
    num_layers: int,
    sizes: LayerSizes,
    max_rank: int,
    number_bytes: int,
    *,
    has_experts: bool,
    num_recurrent: int = 0,
) -> int:
    """Returns the memory of a slot on a GPU for an adapter of all projections that may have one. `num_recurrent` of the
    layers are recurrent."""
    products = sizes.adapted_products(sizes, num_layers, num_recurrent, has_experts=has_experts)
    numbers = sum(count * (len(widths) * depth + sum(widths)) for count, depth, widths in products)
    return gpu_adapter_rank(max_rank) * numbers * number_bytes
