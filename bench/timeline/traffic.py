"""Simulated requests, with everything that the simulator knows of them, including the length of their output.

A request's tokens follow from its number alone, so its output can be checked token by token on any executor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.workloads.shapes import SHAPES
from inflight.router.ledger.types import DEFAULT_TENANT, NO_LIMITS, TenantLimits

STOP_ID = 0
VOCABULARY_SIZE = 50_021


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. It ends by itself after `output_tokens`, or at `max_tokens` where that comes first. With
    `reservation_tokens` its client sets no `max_tokens`, and so much output is reserved at a time.

    `prompt` names the tokens; `gone_after_us` is when its client loses patience, if it does. A deadline that it does
    not tell is judged afterwards only.
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
    tells_deadline: bool = True
    prefix_hashes: tuple[str, ...] = ()
    gone_after_us: int | None = None
    reservation_tokens: int | None = None

    @property
    def ledger_deadline_ms(self) -> int | None:
        """The deadline that the service is told."""
        return self.first_token_deadline_ms if self.tells_deadline else None

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


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long a request is. `max_tokens` is what its client asks for; its output is what it gets."""

    name: str
    draw: Callable[[random.Random], tuple[int, int, int]] = field(compare=False)
    """→ prompt tokens, output tokens, max_tokens."""


def published(name: str, headroom: float = 1.0) -> Lengths:
    """Returns a published shape. `headroom` is how many times its output's upper end clients ask for."""
    shape = SHAPES[name]

    def draw(rng: random.Random) -> tuple[int, int, int]:
        output = rng.randint(*shape.output_tokens)
        limit = output if headroom == 1.0 else round(shape.output_tokens[1] * headroom)
        return rng.randint(*shape.prompt_tokens), output, limit

    return Lengths(name, draw)


def heavy_tailed(max_tokens: int = 1024, median_output: float = 90.0) -> Lengths:
    """Lognormal prompts, Pareto outputs: most answers are short, a few long, and all ask for `max_tokens`."""

    def draw(rng: random.Random) -> tuple[int, int, int]:
        prompt = round(min(2048.0, max(8.0, rng.lognormvariate(5.3, 0.9))))
        output = round(min(float(max_tokens), median_output / 2 ** (1 / 1.6) * rng.paretovariate(1.6)))
        return prompt, max(1, output), max_tokens

    return Lengths("heavy-tailed", draw)


def brief(rng: random.Random) -> tuple[int, int, int]:
    """Small requests for runs where admission counts and not the tokens."""
    return rng.randint(4, 48), min(24, max(1, round(rng.paretovariate(1.3)))), 24


BRIEF = Lengths("brief", brief)


def poisson_us(rate_per_s: float, rng: random.Random) -> Iterator[int]:
    """Arrival times of a Poisson process."""
    return accumulate(max(1, round(rng.expovariate(rate_per_s) * US_PER_S)) for _ in iter(int, 1))


def prompt_of(number: int, num_tokens: int) -> tuple[int, ...]:
    """Returns a prompt that shares nothing with another request's: its first token is its number."""
    return (number % (VOCABULARY_SIZE - 1) + 1, number // (VOCABULARY_SIZE - 1), *range(1, num_tokens - 1))[:num_tokens]


def one_by_one(
    lengths: Lengths, arrivals_us: Sequence[int], rng: random.Random, prefix: str = "q", **same: object
) -> list[SimRequest]:
    """Returns a request for each arrival; `same` is what all of them have in common."""
    requests = []
    for number, arrival_us in enumerate(arrivals_us):
        num_prompt, output, limit = lengths.draw(rng)
        requests.append(
            SimRequest(
                number,
                f"{prefix}{number}",
                arrival_us,
                prompt_of(number, num_prompt),
                output,
                limit,
                **same,  # type: ignore[arg-type]
            )
        )
    return requests
