"""Tiling of the products of experts into programs. Pure: it depends on sizes that the host knows.

No search runs at serve time, and nothing here was measured on a GPU. A weight is read once for each tile of rows, so
few rows have tiles of 16, the fewest of a matrix instruction. Memory bounds them, whatever a tile computes in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

# A step with fewer pairs has hardly two of one expert.
MOST_BY_PAIR = 1 / 4
# Rows of a tile, and the most pairs per expert, on average, of a step with such tiles.
ROW_TILES = ((16, 16), (64, 64))
MAX_ROWS = 128


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """Rows of a tile, columns of the matrix instruction and numbers of a row that are loaded at once. With `by_pair`
    each pair is a tile.

    Only the rows, and whether pairs are put in order, depend on the step.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    by_pair: bool = False

    def num_tiles(self, num_pairs: int, num_experts: int) -> int:
        """Returns the tiles of a launch: as many as any division of the pairs between experts fills."""
        if self.by_pair:
            return num_pairs
        most_begun = min(num_pairs, num_experts)
        return (num_pairs + most_begun * (self.rows - 1)) // self.rows


def expert_tiling(num_pairs: int, num_experts: int, element_bytes: int) -> ExpertTiling:
    """Returns the tiling of a step's pairs. Stages fit the shared memory of any GPU since sm_80."""
    by_pair = num_pairs <= num_experts * MOST_BY_PAIR
    rows = next((rows for rows, most in ROW_TILES if num_pairs <= most * num_experts), MAX_ROWS)
    if element_bytes > 2:
        # float32 is multiplied without matrix instructions, from registers.
        return ExpertTiling(min(rows, 64), 64, 32, 4, 2, by_pair)
    if rows == 16:
        return ExpertTiling(rows, 64, 128, 4, 4, by_pair)
    return ExpertTiling(rows, 128, 64, 4 if rows == 64 else 8, 3)
