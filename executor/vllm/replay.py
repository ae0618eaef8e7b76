"""A logits processor of vLLM that makes a request generate given tokens first.

vLLM imports this module in its own processes, where it runs the model; `internals.py` names it to vLLM. With it vLLM
continues output that began elsewhere: its grammar, its penalties and its random numbers see the output so far as output
of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from inflight.executor.vllm.parameters import REPLAYED_OUTPUT


class ReplayedOutput(AdapterLogitsProcessor):  # type: ignore[misc]
    """Excludes every token but the next one of the output so far, until all of that has been generated."""

    def is_argmax_invariant(self) -> bool:
        """Greedy rows change, too."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """Returns what changes a row of logits of a request; None if it has no output so far."""
        replayed = (params.extra_args or {}).get(REPLAYED_OUTPUT)
        return functools.partial(_exclude_others, replayed) if replayed else None


def _exclude_others(replayed: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """`logits` is a row of the batch, `[vocabulary]`. It runs behind every other exclusion, which it takes back."""
    if len(output_ids) < len(replayed):
        logits.fill_(-torch.inf)
        logits[replayed[len(output_ids)]] = 0.0
    return logits
