"""Reference of the logits stage in torch: the changes of one row's logits before temperature and sampling.

The order, and the float32 operations of each change, are the same in C++ and Triton:

    bias            l + b for the ids of `logit_bias`
    repetition      l / r if l > 0, else l * r, for each id in prompt or output
    frequency       l - f * (times that the id is in the output)
    presence        l - p for each id in the output
    banned          -inf for ids that would complete a bad word (matched within the output) or an n-gram that is already
                    in prompt and output, and for stop tokens before `min_tokens`
    mask            -inf for ids that are not allowed

The first four follow Keskar et al. 2019 (repetition) and OpenAI's API (bias, frequency, presence); n-grams follow
Paulus et al. 2017 as transformers implements them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.executor.logits.row import LogitsRow, bits_of

NOTHING = float("-inf")


def process_row(logits: Tensor, row: LogitsRow) -> Tensor:
    """Returns the changed logits `[vocabulary]` float32. NaN must have been replaced."""
    logits = logits.float().clone()
    processors = row.processors
    if len(row.bias_ids):
        _at(logits, row.bias_ids, lambda some: some + torch.from_numpy(row.bias_values).to(some.device))
    if processors.repetition_penalty != 1.0:
        r = torch.tensor(processors.repetition_penalty, dtype=torch.float32, device=logits.device)
        _at(logits, np.unique(row.prompt_and_output), lambda some: torch.where(some > 0, some / r, some * r))
    if processors.frequency_penalty or processors.presence_penalty:
        ids, counts = np.unique(row.output, return_counts=True)
        f, p = np.float32(processors.frequency_penalty), np.float32(processors.presence_penalty)
        frequency = torch.from_numpy(f * counts.astype(np.float32)).to(logits.device)
        _at(logits, ids, lambda some: some - frequency - torch.tensor(p, device=some.device))
    banned = sorted(banned_ids(row))
    if banned:
        logits[banned] = NOTHING
    if row.mask is not None:
        allowed = torch.from_numpy(bits_of(row.mask, logits.shape[0])).to(logits.device)
        logits.masked_fill_(~allowed, NOTHING)
    return logits


def banned_ids(row: LogitsRow) -> set[int]:
    """Returns the ids that would complete a bad word or a repeated n-gram."""
    return {*_ends_of_bad_words(row), *_ends_of_ngrams(row)}


def _at(logits: Tensor, ids: npt.NDArray[np.int32], change: Callable[[Tensor], Tensor]) -> None:
    index = torch.from_numpy(ids.astype(np.int64)).to(logits.device)
    logits[index] = change(logits[index])


def _ends_of_bad_words(row: LogitsRow) -> Iterator[int]:
    output = row.output.tolist()
    for word in row.processors.bad_words:
        *begin, end = word
        if not begin or output[-len(begin) :] == begin:
            yield end


def _ends_of_ngrams(row: LogitsRow) -> Iterator[int]:
    size = row.processors.no_repeat_ngram_size
    ids = row.prompt_and_output.tolist()
    if size == 0:
        return
    begin = ids[len(ids) - size + 1 :] if size > 1 else []
    for i in range(len(ids) - size + 1):
        if ids[i : i + size - 1] == begin:
            yield ids[i + size - 1]
