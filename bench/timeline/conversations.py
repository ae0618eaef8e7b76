"""Chats of several turns: every prompt begins with the whole conversation so far, answers included."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.timeline.traffic import VOCABULARY_SIZE, SimRequest, poisson_us
from inflight.router.ledger.types import DEFAULT_TENANT
from inflight.router.request.ids import prefix_hashes, state_prefixes


@dataclass(frozen=True, slots=True)
class Conversations:
    """`rate_per_s` chats begin; each has `num_turns` turns, `pause_s` apart, which is longer than an answer takes."""

    rate_per_s: float = 4.0
    num_turns: int = 6
    pause_s: float = 6.0
    system_tokens: int = 64
    turn_tokens: tuple[int, int] = (32, 256)
    output_tokens: tuple[int, int] = (20, 300)
    block_size: int = 16
    num_systems: int = 1
    """Chats share one of so many beginnings of `system_tokens`, the first ones more often."""
    state_grid_tokens: int = 0
    """As in `DescribeResponse`."""

    def requests(self, seed: int, duration_s: float, *, names_prefixes: bool) -> list[SimRequest]:
        """Returns all turns that begin within so long, by arrival."""
        turns = heapq.merge(
            *(self._turns(number, begin_us, seed) for number, begin_us in self._begins(seed, duration_s)),
            key=lambda turn: turn[0],
        )
        return [
            self._request(number, arrival_us, prompt, num_output, names_prefixes)
            for arrival_us, number, prompt, num_output in turns
            if arrival_us <= duration_s * US_PER_S
        ]

    def _begins(self, seed: int, duration_s: float) -> Iterator[tuple[int, int]]:
        rng = random.Random(f"{seed}/conversations")
        for number, begin_us in enumerate(poisson_us(self.rate_per_s, rng)):
            if begin_us > duration_s * US_PER_S:
                return
            yield number, begin_us

    def _turns(self, chat: int, begin_us: int, seed: int) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
        """→ arrival, number of the request, prompt, output tokens."""
        rng = random.Random(f"{seed}/chat/{chat}")
        system = min(int(rng.paretovariate(0.5)), self.num_systems) if self.num_systems > 1 else 1
        prompt, arrival_us = tuple(range(system, self.system_tokens + system)), begin_us
        for turn in range(self.num_turns):
            number = chat * self.num_turns + turn
            asked = rng.randint(*self.turn_tokens)
            prompt += tuple(rng.randrange(1, VOCABULARY_SIZE) for _ in range(asked))
            num_output = rng.randint(*self.output_tokens)
            yield arrival_us, number, prompt, num_output
            arrival_us += round(self.pause_s * rng.uniform(0.8, 1.2) * US_PER_S)
            request = self._request(number, 0, prompt, num_output, False)
            prompt += tuple(request.token(offset) for offset in range(num_output - 1))

    def _request(
        self, number: int, arrival_us: int, prompt: tuple[int, ...], num_output: int, names_prefixes: bool
    ) -> SimRequest:
        hashes: tuple[str, ...] = ()
        if names_prefixes and self.state_grid_tokens:
            hashes = state_prefixes(prompt, (), self.state_grid_tokens, DEFAULT_TENANT.encode())
        elif names_prefixes:
            hashes = prefix_hashes(prompt, self.block_size, b"")
        limit = self.output_tokens[1] + 1
        return SimRequest(number, f"chat{number}", arrival_us, prompt, num_output, limit, prefix_hashes=hashes)
