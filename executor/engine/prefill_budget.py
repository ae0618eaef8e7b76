"""How much of a step prompts may take, so that those in the middle of an answer are not held up. Pure.

A step with prefill may take `max_inter_token_ms`, or, when that is 0, twice what the decodes alone would: so the
slowest steps stay within twice the usual one. Where more sequences wait for their first token than decode, they count
for more, and there is no limit: large chunks are the faster way to a full batch, and a half-empty one helps nobody.
"""

from __future__ import annotations

from executor.engine.step_time import StepLoad, StepTime
from executor.scheduler.step_constraint import PrefillDemand

# Of twice, so that what steps vary by does not exceed it.
MARGIN = 0.95


class Pace:
    """Says how many prompt tokens the next step may take. Progress needs at least `least_tokens`."""

    def __init__(self, step_time: StepTime, max_inter_token_ms: float, least_tokens: int) -> None:
        self._step_time = step_time
        self._max_inter_token_s = max_inter_token_ms / 1000
        self._least_tokens = least_tokens

    def max_prefill_tokens(self, demand: PrefillDemand) -> int | None:
        """None is no limit."""
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
