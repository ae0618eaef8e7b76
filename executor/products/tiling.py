"""Tiling of products with matrices of codes. Pure: it depends on sizes that the host knows.

Nothing here was measured on a GPU. Steps of few tokens want many programs that read codes at once; those of more want
tiles whose decoded numbers are used by many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.executor.kernels.tiling import MIN_ROWS, power_of_two

# Tokens of the largest step that is multiplied tile by tile. Decoding a whole matrix takes about as long as
# multiplying it with 300 tokens at the rate of an H100, by its bandwidth and its rate of products.
LARGEST_STEP = 256
# Rows and columns that a program decodes at once.
DECODED_TILE = (64, 128)
# Programs for which columns are divided: two for each processor of the largest GPUs.
NUM_PROGRAMS = 256
MAX_SPLITS = 16
# Of a split: loads ahead need some tiles.
MIN_TILES_PER_SPLIT = 4


@dataclass(frozen=True, slots=True)
class ProductTiling:
    """Tokens, rows and columns of the matrix in a tile, and the number of programs that share its columns."""

    tokens: int
    rows: int
    columns: int
    splits: int
    num_warps: int
    num_stages: int

    def columns_per_split(self, num_columns: int) -> int:
        """Returns the columns of a split, a multiple of `columns`."""
        tiles = -(-num_columns // self.columns)
        return -(-tiles // self.splits) * self.columns


def product_tiling(num_tokens: int, num_rows: int, num_columns: int) -> ProductTiling:
    """Returns the tiling of a product of `[num_tokens, num_columns]` with a matrix `[num_rows, num_columns]`."""
    tokens = min(64, max(MIN_ROWS, power_of_two(num_tokens)))
    rows, columns, num_warps, num_stages = (64, 128, 4, 4) if tokens <= 32 else (128, 64, 8, 3)
    programs = -(-num_tokens // tokens) * -(-num_rows // rows)
    most = -(-num_columns // (columns * MIN_TILES_PER_SPLIT))
    splits = max(1, min(MAX_SPLITS, most, NUM_PROGRAMS // programs))
    return ProductTiling(tokens, rows, columns, splits, num_warps, num_stages)
