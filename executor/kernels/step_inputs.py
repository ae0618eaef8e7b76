"""Input of a step that the device completes, in Triton: the previous step's tokens, and new block table entries."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def resolve_kernel(token_ids, is_carried, carried_from, sampled_ids, count, TILE: tl.constexpr):
    """Writes the tokens that the previous step sampled into the input, 0 for `NO_TOKEN`. Grid: tiles of `count`
    sequences."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    carries = (rows < count) & (tl.load(is_carried + rows, mask=rows < count, other=0) != 0)
    sampled = tl.load(sampled_ids + tl.load(carried_from + rows, mask=carries, other=0), mask=carries, other=0)
    tl.store(token_ids + rows, tl.maximum(sampled, 0), mask=carries)


@triton.jit(do_not_specialize=["count"])
def follow_tables_kernel(tables, places, blocks, count, TILE: tl.constexpr):
    """Writes `blocks` at `places`, counted from the first entry of the first table. Grid: tiles of `count` entries."""
    entries = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = entries < count
    place = tl.load(places + entries, mask=mask, other=0)
    tl.store(tables + place, tl.load(blocks + entries, mask=mask, other=0), mask=mask)
