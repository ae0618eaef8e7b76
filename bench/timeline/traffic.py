"""Simulated requests, with everything that the simulator knows of them, including the length of their output.

A request's tokens follow from its number alone, so its output can be checked token by token on any executor.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from inflight.bench.timeline.timeline import US_PER_S
from inflight.router.ledger.types import DEFAULT_TENANT, NO_LIMITS, TenantLimits

STOP_ID = 0
VOCABULARY_SIZE = 50_021


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. It ends by itself after `output_tokens`, or at `max_tokens` where that comes first. With
    `reservation_tokens` its client sets no `max_tokens`, and so much output is reserved at a time.

    `prompt` names the tokens; `gone_after_us` is when its client loses patience, if it does.
    """

    number: int
    request_id: str
    arrival_us: int
    prompt: tuple[int, ...]
    output_tokens: int
    max_tokens: int
    tenant: str = DEFAULT_TENANT
    limits: TenantLimits = NO_LIMITS
    priority_class: int = 2
    first_token_deadline_ms: int | None = None
    prefix_hashes: tuple[str, ...] = ()
    gone_after_us: int | None = None
    reservation_tokens: int | None = None

    @property
    def num_output(self) -> int:
        return min(self.output_tokens, self.max_tokens)

    def num_blocks(self, block_size: int) -> int:
        """Returns the KV blocks that it can need."""
        return -(-(len(self.prompt) + self.max_tokens) // block_size)

    def token(self, offset: int) -> int:
        """Its output token at this offset; the last is a stop token where it ends by itself."""
        if offset == self.output_tokens - 1 and self.output_tokens < self.max_tokens:
            return STOP_ID
        return 1 + (self.number * 7919 + offset * 104_729) % (VOCABULARY_SIZE - 1)


def brief(rng: random.Random) -> tuple[int, int, int]:
    """Draws prompt tokens, output tokens and max_tokens of a small request."""
    return rng.randint(4, 48), min(24, max(1, round(rng.paretovariate(1.3)))), 24


def poisson_us(rate_per_s: float, rng: random.Random) -> Iterator[int]:
    """Arrival times of a Poisson process."""
    return accumulate(max(1, round(rng.expovariate(rate_per_s) * US_PER_S)) for _ in iter(int, 1))


def prompt_of(number: int, num_tokens: int) -> tuple[int, ...]:
    """Returns a prompt that shares nothing with another request's: its first token is its number."""
    return (number % (VOCABULARY_SIZE - 1) + 1, number // (VOCABULARY_SIZE - 1), *range(1, num_tokens - 1))[:num_tokens]
