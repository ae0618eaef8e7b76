"""Budget of prefill tokens in a step, which bounds the delay of running decodes. Pure.

A step with prefill may take `max_inter_token_ms`, or, when that is 0, twice the time of the decodes alone, so that the
slowest steps take at most twice the usual time. There is no limit while more sequences wait for their first token than
decode: large chunks fill the batch sooner.
"""

from __future__ import annotations

from executor.engine.step_time import StepLoad, StepTime
from executor.scheduler.step_constraint import PrefillDemand

# Factor on the doubled time, so that variance between steps does not exceed it.
MARGIN = 0.95


class PrefillBudget:
    """Limits the prompt tokens of the next step. A limit is at least `least_tokens`, so that prompts progress."""

    def __init__(self, step_time: StepTime, max_inter_token_ms: float, least_tokens: int) -> None:
        self._step_time = step_time
        self._max_inter_token_s = max_inter_token_ms / 1000
        self._least_tokens = least_tokens

    def max_prefill_tokens(self, demand: PrefillDemand) -> int | None:
        """Returns the limit; None is no limit."""
        if demand.num_behind == 0 or not self._step_time.knows_prefill:
            return None
        if demand.num_decodes == 0 or (self._max_inter_token_s == 0 and demand.num_behind > demand.num_decodes):
            return None
        decode_s = self._step_time.predict(StepLoad(demand.num_decodes, demand.decode_context))
        longest_s = self._max_inter_token_s or 2 * decode_s * MARGIN
        chunk = self._step_time.fitting_chunk(max(0.0, longest_s - decode_s), demand.position)
        if chunk == float("inf"):
            return None
        return max(self._least_tokens, int(chunk))
