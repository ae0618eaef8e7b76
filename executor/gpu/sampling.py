"""Greedy and free draws on the GPU, by the Triton kernels; the host waits for nothing.

Rows that restrict the draw (top_k, top_p) or ban more ids than there is room for go through `executor.sampling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from executor.gpu.kernels.sampling import choose_kernel, draw_kernel
from executor.gpu.tiling import power_of_two

# Vocabulary ids that a program looks at.
CHUNK = 2048


@dataclass(frozen=True, slots=True, eq=False)
class DrawRows:
    """How rows are drawn, all `[R]` int32 but `temperatures` float32 (0 is greedy) and `banned_ids[R, room]`.

    A seed is 64 bits, in two words. The first `num_banned` of a row's `banned_ids` cannot come out.
    """

    temperatures: Tensor
    seeds_low: Tensor
    seeds_high: Tensor
    output_indices: Tensor
    banned_ids: Tensor
    num_banned: Tensor


def draw(logits: Tensor, rows: DrawRows, token_ids: Tensor) -> None:
    """Puts the tokens drawn from `logits[R, vocabulary]` into `token_ids[R]`."""
    num_rows, vocabulary_size = logits.shape
    num_chunks = -(-vocabulary_size // CHUNK)
    best_values = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    draw_kernel[(num_rows, num_chunks)](
        *(logits, rows.temperatures, rows.seeds_low, rows.seeds_high, rows.output_indices),
        *(rows.banned_ids, rows.num_banned, best_values, best_ids),
        *(vocabulary_size, logits.stride(0), rows.banned_ids.stride(0)),
        CHUNK=CHUNK,
    )
    choose_kernel[(num_rows,)](best_values, best_ids, token_ids, num_chunks, PADDED_CHUNKS=power_of_two(num_chunks))
