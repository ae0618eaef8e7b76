"""The prediction of an oracle: how long the first token of a request would take on an executor of the simulation.

It reads what no router can know: which blocks of the prompt the executor holds or is about to compute, how many tokens
of each prompt there are left, how long every output will be, and what a step costs. It does not know of requests that
have not arrived.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass, field

from inflight.bench.simulation.sim_executor import SimExecutor
from inflight.bench.timeline.traffic import SimRequest
from inflight.executor.scheduler.prefix_cache import chain_hashes


@dataclass(slots=True)
class Commitment:
    """A request that was given to an executor and has not ended."""

    request: SimRequest
    hashes: ReadOnlyList[bytes]
    """Of all full blocks of the prompt."""
    num_uncached: int
    """Prompt tokens that were neither cached nor about to be when it was given."""
    num_output: int = 0
    """Tokens that it has."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What giving a request to an executor costs, in seconds. `others_s` is the sum of what it delays others by."""

    first_token_s: float
    others_s: float
    num_uncached: int

    @property
    def cost_s(self) -> float:
        return self.first_token_s + self.others_s


@dataclass(slots=True)
class ExecutorBacklog:
    """What one executor was given, in order."""

    executor: SimExecutor
    inside: dict[str, Commitment] = field(default_factory=dict)

    def predict(self, request: SimRequest, hashes: ReadOnlyList[bytes], now_s: float) -> Prediction:
        """Returns what giving the request to this executor now would cost."""
        shape = self.executor.shape
        left = self._prompts_left()
        decodes = [one for one in self.inside.values() if one.num_output]
        num_uncached = self.num_uncached(request, hashes)
        context = sum(len(one.request.prompt) + one.num_output for one in decodes)
        step_s = shape.cost.step_s + shape.cost.token_s * len(decodes) + shape.cost.context_s * context
        busy_s = max(0.0, self.executor.device.free_s - now_s)

        def prefill_s(num_tokens: int) -> float:
            num_steps = -(-num_tokens // max(1, shape.max_num_tokens - len(decodes)))
            return num_steps * step_s + num_tokens * shape.cost.token_s

        # The executor computes prompts that have less left first.
        ahead = sum(num_left for num_left in left.values() if num_left <= num_uncached)
        passed = [num_left for num_left in left.values() if num_left > num_uncached]
        own_s = prefill_s(ahead + num_uncached)
        seat_s = self._seat_s(left, step_s) + prefill_s(num_uncached)
        return Prediction(busy_s + max(own_s, seat_s), len(passed) * num_uncached * shape.cost.token_s, num_uncached)

    def num_uncached(self, request: SimRequest, hashes: ReadOnlyList[bytes]) -> int:
        """Returns the prompt tokens that are neither cached nor about to be."""
        pool = self.executor.scheduler.pool
        reusable = hashes[: (len(request.prompt) - 1) // pool.block_size]
        num_found = _num_leading(reusable, pool.is_findable)
        for one in self.inside.values():
            if not one.num_output and len(one.hashes) > num_found and len(reusable) > num_found:
                num_found = max(num_found, _num_common(reusable, one.hashes))
        return len(request.prompt) - num_found * pool.block_size

    def add(self, request: SimRequest, hashes: ReadOnlyList[bytes], prediction: Prediction) -> None:
        """Records that the request was given to this executor."""
        self.inside[request.request_id] = Commitment(request, hashes, prediction.num_uncached)

    def _prompts_left(self) -> Mapping[str, int]:
        """Returns the prompt tokens that each request without a first token has left."""
        left = {one.request.request_id: one.num_uncached for one in self.inside.values() if not one.num_output}
        for sequence in self.executor.told():
            if sequence.request_id in left and sequence.num_computed:
                left[sequence.request_id] = sequence.num_uncomputed
        return left

    def _seat_s(self, left: Mapping[str, int], step_s: float) -> float:
        """Returns the time until a seat is free for one more request: those before it take their seats in order, and
        each of them keeps its own until its output is complete."""
        num_seats = self.executor.shape.num_seats
        num_over = len(self.inside) - num_seats
        if num_over < 0:
            return 0.0
        tokens_left = [one.request.num_output - one.num_output for one in self.inside.values()]
        free_at = sorted(tokens_left[:num_seats])
        for tokens in tokens_left[num_seats:]:
            free_at[0] += tokens
            free_at.sort()
        prompt_s = sum(left.values()) * self.executor.shape.cost.token_s
        return free_at[0] * step_s + min(prompt_s, free_at[0] * self.executor.shape.max_num_tokens * step_s)


def hashes_of(request: SimRequest, block_size: int) -> ReadOnlyList[bytes]:
    """Returns the names that executors give to the blocks of the request's prompt."""
    return chain_hashes(request.prompt, block_size, request.tenant.encode())


def _num_leading(hashes: ReadOnlyList[bytes], is_in: Callable[[bytes], bool]) -> int:
    return bisect_left(range(len(hashes)), True, key=lambda index: not is_in(hashes[index]))


def _num_common(hashes: ReadOnlyList[bytes], other: ReadOnlyList[bytes]) -> int:
    shorter = min(len(hashes), len(other))
    return bisect_left(range(shorter), True, key=lambda index: hashes[index] != other[index])
