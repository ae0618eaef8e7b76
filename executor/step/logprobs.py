"""Log probabilities of sampled tokens, of the rows that report them: how likely the model took the token, and which
it took for likelier.

They are of the logits as the model gave them, before temperature and restrictions, as OpenAI's API and vLLM have them.
Computed where the logits are, and only in steps with such a row; read on the host with the step's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.scheduler.sequence import TokenLogprobs
from executor.step.sampling import numbers_of


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Of N rows: `chosen[N]` float32 is the token's, `top[N, K]` float32 and `top_ids[N, K]` int64 are the likeliest
    tokens', likeliest first. Row i is `rows[i][0]` of the rows that sample, and wants `rows[i][1]` of the K."""

    rows: Sequence[tuple[int, int]]
    chosen: Tensor
    top: Tensor
    top_ids: Tensor

    def start_copy(self) -> StepLogprobs:
        """On the host once the device has come to here in its stream."""
        return StepLogprobs(self.rows, *(_start_copy(values) for values in (self.chosen, self.top, self.top_ids)))

    def read(self) -> dict[int, TokenLogprobs]:
        """By row of those that sample. On the host, behind the end of the copy."""
        columns = zip(self.rows, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), strict=True)
        return {
            row: TokenLogprobs(chosen, tuple(ids[:num_top]), tuple(values[:num_top]))
            for (row, num_top), chosen, ids, values in columns
        }


def step_logprobs(
    logits: Tensor, sampled_ids: Tensor, rows: Sequence[tuple[int, int]], chosen_rows: Tensor | None = None
) -> StepLogprobs:
    """Of `logits[R, vocabulary]` and the ids `[R]` that were drawn from them. `rows` are pairs of a row and how many of
    the likeliest tokens it reports; `chosen_rows` are the rows on the device, where they are there already."""
    if chosen_rows is None:
        chosen_rows = _on_device([row for row, _ in rows], logits.device)
    some = numbers_of(logits.index_select(0, chosen_rows).float())
    total = torch.logsumexp(some, dim=1, keepdim=True)
    # A row without a number has no id; nothing is reported of it.
    chosen_ids = sampled_ids.index_select(0, chosen_rows).long().clamp(min=0)
    chosen = some.gather(1, chosen_ids[:, None]) - total
    top = some.topk(min(max(num_top for _, num_top in rows), some.shape[1]), dim=1)
    return StepLogprobs(rows, _sound(chosen[:, 0]), _sound(top.values - total), top.indices)


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Without waiting for the device: a copy from memory that is not pinned would end behind the steps launched."""
    if device.type != "cuda":
        return torch.tensor(numbers, device=device)
    return torch.tensor(numbers).pin_memory().to(device, non_blocking=True)


def _sound(logprobs: Tensor) -> Tensor:
    """Rounding makes no probability larger than 1, and what is no number is no probability at all."""
    return logprobs.nan_to_num(nan=float("-inf"), neginf=float("-inf")).clamp(max=0)


def _start_copy(values: Tensor) -> Tensor:
    if values.device.type != "cuda":
        return values
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return on_host.copy_(values, non_blocking=True)
