"""Log probabilities of sampled tokens or of a prompt's tokens, and of the likeliest tokens in their place, for rows
that report them.

They are of the model's logits, before temperature and restrictions, as in OpenAI's API and vLLM. They are computed
where the logits are, only in steps with such a row, and read on the host with the step's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from inflight.executor.device import to_device, to_host
from inflight.executor.scheduler.sequence import TokenLogprobs
from inflight.executor.step.sampling import numbers_of

# torch sums so few numbers on one thread.
SUMMED_AT_ONCE = 4096
# Rows whose log probabilities are computed at once. They take some 60 bytes for each of the vocabulary, a quarter of a
# gigabyte with Llama 3's, however many rows report.
ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Log probabilities of N rows: `chosen[N]` float32 of the chosen tokens and their `ranks[N]` int64, `top[N, K]`
    float32 and `top_ids[N, K]` int64 of the likeliest tokens, likeliest first. Row i is row `rows[i][0]` of the logits,
    and reports `rows[i][1]` of the K."""

    rows: Sequence[tuple[int, int]]
    chosen: Tensor
    ranks: Tensor
    top: Tensor
    top_ids: Tensor

    def start_copy(self) -> StepLogprobs:
        """Starts the copy to the host. It is complete once the device has reached this point of its stream."""
        columns = (self.chosen, self.ranks, self.top, self.top_ids)
        return StepLogprobs(self.rows, *(to_host(values) for values in columns))

    def read(self) -> dict[int, TokenLogprobs]:
        """Returns the values by row of the logits. Call it on the host, after the copy has ended."""
        tensors = (self.chosen, self.ranks, self.top_ids, self.top)
        columns = zip(self.rows, *(values.tolist() for values in tensors), strict=True)
        return {
            row: TokenLogprobs(chosen, tuple(ids[:num_top]), tuple(values[:num_top]), rank)
            for (row, num_top), chosen, rank, ids, values in columns
        }


def step_logprobs(
    logits: Tensor, chosen_ids: Tensor, rows: Sequence[tuple[int, int]], chosen_rows: Tensor | None = None
) -> StepLogprobs:
    """Computes the log probabilities of `logits[R, vocabulary]` and the ids `[R]` that were chosen in them. `rows` are
    pairs of a row and the number of likeliest tokens that it reports. `chosen_rows` are the rows on the device, if they
    are there already."""
    if chosen_rows is None:
        chosen_rows = to_device(torch.tensor([row for row, _ in rows]), logits.device)
    most_top = max(num_top for _, num_top in rows)
    parts = [
        _columns(logits.index_select(0, part).float(), chosen_ids.index_select(0, part), most_top)
        for part in chosen_rows.split(ROWS_AT_ONCE)
    ]
    return StepLogprobs(rows, *(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _columns(logits: Tensor, chosen_ids: Tensor, most_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the columns of `StepLogprobs` for some rows."""
    some = numbers_of(logits)
    total = _log_sums(some)
    # A row without a usable logit has no id; nothing is reported of it.
    chosen = some.gather(1, chosen_ids.long().clamp(min=0)[:, None])
    ranks = (some > chosen).sum(1) + 1
    top_ids = _likeliest(some, min(most_top, some.shape[1]))
    return _bounded((chosen - total)[:, 0]), ranks, _bounded(some.gather(1, top_ids) - total), top_ids


def _log_sums(logits: Tensor) -> Tensor:
    """Returns the logarithms `[N, 1]` of the sums of exponentials. torch divides the sum of one row among threads, but
    not that of several, so a row is summed in parts that are too short to be divided."""
    padded = pad(logits, (0, -logits.shape[1] % SUMMED_AT_ONCE), value=float("-inf"))
    return torch.logsumexp(torch.logsumexp(padded.unflatten(1, (-1, SUMMED_AT_ONCE)), 2), 1, keepdim=True)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Returns the ids `[N, count]` of the largest logits, the largest first, the lowest id first among equals. The
    order of equals that topk returns depends on `count`, which other rows decide about, too."""
    bits = (logits + 0.0).view(torch.int32).long()  # that of -0 is 0
    # Integers in the order of the numbers, and below them the ids in falling order.
    keys = (torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits) << 32) + torch.arange(logits.shape[1], 0, -1).to(bits)
    ids: Tensor = logits.shape[1] - (keys.topk(count, dim=1).values & 0xFFFF_FFFF)
    return ids


def _bounded(logprobs: Tensor) -> Tensor:
    """Clamps to 0, since rounding must not make a probability larger than 1, and maps NaN to -inf."""
    return logprobs.nan_to_num(nan=float("-inf"), neginf=float("-inf")).clamp(max=0)
