"""Sampling on the GPU by the Triton kernels. The host waits for nothing.

Rows that restrict the draw (min_p, top_k, top_p) get a threshold first, which costs the other rows nothing.

The best token of a row is the best of those of each chunk of the vocabulary, and its noise depends on its id alone. So
ranks that each have a part of the logits, and -inf for the others, need to exchange a value and an id per chunk only.
That is wrong for rows that restrict the draw, whose thresholds depend on all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from inflight.executor.kernels.restriction import restrict_kernel
from inflight.executor.kernels.sampling import choose_kernel, draw_kernel
from inflight.executor.kernels.tiling import power_of_two

# Vocabulary ids that a program processes.
CHUNK = 2048
# One program reads a whole row, so it has many threads. It lists the ids of as many tokens. With 8192 it would spill.
RESTRICTION_CHUNK = 4096
RESTRICTION_WARPS = 16


@dataclass(frozen=True, slots=True, eq=False)
class DrawRows:
    """Parameters of the draws: `temperatures` (0 is greedy), `top_ps` and `min_p_logs` (-inf is none) float32, the
    others int32; all `[R]` except `banned_ids` and `banned_starts[R + 1]`.

    A seed is 64 bits, in two words. The banned ids of row i are `banned_ids[banned_starts[i]:banned_starts[i + 1]]`.
    """

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_p_logs: Tensor
    seeds_low: Tensor
    seeds_high: Tensor
    output_indices: Tensor
    banned_ids: Tensor
    banned_starts: Tensor

    def part(self, first: int, last: int) -> DrawRows:
        """Returns the rows `[first, last)`."""
        columns = {field.name: getattr(self, field.name)[first:last] for field in fields(self)}
        return DrawRows(
            **columns | {"banned_ids": self.banned_ids, "banned_starts": self.banned_starts[first : last + 1]}
        )


def restrict(logits: Tensor, rows: DrawRows) -> tuple[Tensor, Tensor]:
    """Returns the thresholds of the rows. Tokens above the first are kept, and those equal to it up to the id in the
    second."""
    num_rows, vocabulary_size = logits.shape
    chunk = min(RESTRICTION_CHUNK, power_of_two(vocabulary_size))
    listed_ids = torch.empty((num_rows, chunk), dtype=torch.int32, device=logits.device)
    edges = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    restrict_kernel[(num_rows,)](
        *(logits, rows.temperatures, rows.top_ks, rows.top_ps, rows.min_p_logs),
        *(rows.banned_ids, rows.banned_starts, listed_ids, edges, last_ids),
        *(vocabulary_size, logits.stride(0)),
        CHUNK=chunk,
        num_warps=RESTRICTION_WARPS,
    )
    return edges, last_ids


def draw(
    logits: Tensor, rows: DrawRows, token_ids: Tensor, all_gather: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Writes the tokens drawn from `logits[R, vocabulary]` to `token_ids[R]`; `NO_TOKEN` for a row without a usable
    logit. With `all_gather` of `Ranks`, the best of any rank's logits is drawn."""
    num_rows, vocabulary_size = logits.shape
    edges, last_ids = restrict(logits, rows)
    num_chunks = -(-vocabulary_size // CHUNK)
    best_values = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    draw_kernel[(num_rows, num_chunks)](
        *(logits, rows.temperatures, rows.seeds_low, rows.seeds_high, rows.output_indices),
        *(rows.banned_ids, rows.banned_starts, edges, last_ids, best_values, best_ids),
        *(vocabulary_size, logits.stride(0)),
        CHUNK=CHUNK,
    )
    if all_gather is not None:
        best = torch.stack((best_values.view(torch.int32), best_ids), 1)
        # From [ranks, R, 2, chunks] to one row of chunks of all ranks.
        values, ids = all_gather(best).permute(2, 1, 0, 3).flatten(2).contiguous().unbind(0)
        best_values, best_ids, num_chunks = values.view(torch.float32), ids, values.shape[1]
    choose_kernel[(num_rows,)](
        *(best_values, best_ids, token_ids, num_chunks),
        PADDED_CHUNKS=power_of_two(num_chunks),
    )
