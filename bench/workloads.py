"""The shapes of traffic that `inflight bench` sends. Pure: name, seed and scale give the same requests everywhere.

The shapes are the published ones: *mixed* traffic, *short* and *long* answers, *prefill* (long prompts, hardly any
answer) and *chat* (prompts in groups that share their beginning, arriving one by one).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

DEFAULT_SEED = 0

# Most tokens of the request that holds an executor until a workload has arrived; it is cancelled long before.
GATE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranges are inclusive, in tokens. `arrivals_per_s` None sends everything at once."""

    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    group_size: int = 1
    shared_prompt_tokens: int = 0
    arrivals_per_s: float | None = None


SHAPES = {
    "mixed": Shape(48, (32, 256), (50, 800)),
    "short": Shape(96, (32, 128), (8, 99)),
    "long": Shape(24, (32, 128), (500, 1000)),
    "prefill": Shape(32, (512, 1500), (4, 16)),
    "chat": Shape(64, (64, 512), (20, 300), group_size=4, shared_prompt_tokens=128, arrivals_per_s=2.0),
}


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: what is sent, when after the start, and how many tokens come back."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival."""

    name: str
    requests: tuple[PlannedRequest, ...]

    @property
    def output_tokens(self) -> int:
        """Tokens that come back in all."""
        return sum(request.output_tokens for request in self.requests)

    @property
    def arrives_at_once(self) -> bool:
        """Whether every request is sent at the start."""
        return all(request.arrival_s == 0 for request in self.requests)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens of the longest request."""
        return max(len(request.prompt_ids) + request.output_tokens for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that are sent in all."""
        return sum(len(request.prompt_ids) for request in self.requests)


def build_workload(
    name: str,
    *,
    vocabulary_size: int,
    scale: float = 1.0,
    num_requests: int | None = None,
    seed: int = DEFAULT_SEED,
    variant: int = 0,
) -> Workload:
    """The requests of a shape. `scale` shrinks prompts and outputs alike; `num_requests` replaces the shape's.

    Variants differ in the token ids alone, so that a run cannot find the KV of an earlier one in the prefix cache.
    """
    shape = SHAPES[name]
    # One source each, so that no length depends on how many ids came before it.
    lengths, ids, times = (random.Random(f"{name}/{seed}/{use}") for use in ("lengths", f"ids/{variant}", "times"))
    arrivals = _arrivals(shape, times)
    prefix: tuple[int, ...] = ()
    requests = []
    for index in range(num_requests or shape.num_requests):
        if index % shape.group_size == 0:
            prefix = _token_ids(ids, _scaled(shape.shared_prompt_tokens, scale), vocabulary_size)
        length = max(1, _scaled(lengths.randint(*shape.prompt_tokens), scale))
        own = _token_ids(ids, max(0, length - len(prefix)), vocabulary_size)
        output_tokens = max(1, _scaled(lengths.randint(*shape.output_tokens), scale))
        requests.append(PlannedRequest((prefix + own)[:length], output_tokens, next(arrivals)))
    return Workload(name, tuple(requests))


def _arrivals(shape: Shape, rng: random.Random) -> itertools.accumulate[float] | itertools.repeat[float]:
    """Arrival times: all 0, or a Poisson process."""
    if shape.arrivals_per_s is None:
        return itertools.repeat(0.0)
    rate = shape.arrivals_per_s
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


def _token_ids(rng: random.Random, num_tokens: int, vocabulary_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocabulary_size) for _ in range(num_tokens))


def _scaled(num_tokens: int, scale: float) -> int:
    return round(num_tokens * scale)
