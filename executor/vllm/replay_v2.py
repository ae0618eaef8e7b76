"""The logits processor of `replay.py` for vLLM's second model runner, whose processors change the whole batch at once.

vLLM imports this module in its own processes.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from inflight.executor.vllm.parameters import REPLAYED_OUTPUT


class ReplayedOutput(LogitsProcessor):  # type: ignore[misc]
    """Excludes every token but the next one of the output so far, until all of that has been generated."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        super().__init__(vllm_config, req_states)
        # By slot, the number of a request's place in vLLM's state. On the host, where the next position is known
        # without waiting for the device, because vLLM does not draft (`internals.allow_replay`).
        self._prompt_lengths = req_states.prompt_len.np
        self._replayed: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Takes the output so far of a request that enters a slot. Returns whether it has any."""
        replayed = (sampling_params.extra_args or {}).get(REPLAYED_OUTPUT)
        if replayed:
            self._replayed[req_idx] = replayed
        else:
            self._replayed.pop(req_idx, None)
        return bool(replayed)

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """`logits` is `[requests, vocabulary]`. It runs behind every other exclusion, which it takes back."""
        rows, token_ids = [], []
        if self._replayed:
            lengths = ctx.seq_lens_upper_bound_np.tolist()
            for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
                replayed = self._replayed.get(slot, ())
                # Negative while a part of the prompt is computed; its row is not used then.
                index = lengths[row] - int(self._prompt_lengths[slot])
                if 0 <= index < len(replayed):
                    rows.append(row)
                    token_ids.append(replayed[index])
        if rows:
            logits[rows] = -torch.inf
            logits[rows, token_ids] = 0.0
        return logits
