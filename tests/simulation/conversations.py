"""Chats of several turns: every prompt begins with the whole conversation so far, answers included."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.timeline.traffic import VOCABULARY_SIZE, SimRequest, poisson_us
from inflight.router.ledger.types import DEFAULT_TENANT
from inflight.router.request.ids import state_prefixes


@dataclass(frozen=True, slots=True)
class Conversations:
    """`rate_per_s` chats begin; each has `num_turns` turns, `pause_s` apart, which is longer than an answer takes."""

    rate_per_s: float
    num_turns: int
    pause_s: float
    system_tokens: int
    turn_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    state_grid_tokens: int
    """As in `DescribeResponse`."""

    def requests(self, seed: int, duration_s: float) -> Iterator[SimRequest]:
        """Yields all turns that begin within so long, by arrival."""
        begins = enumerate(poisson_us(self.rate_per_s, random.Random(f"{seed}/conversations")))
        chats = []
        for number, begin_us in begins:
            if begin_us > duration_s * US_PER_S:
                break
            chats.append(self._turns(number, begin_us, seed))
        for turn in heapq.merge(*chats, key=lambda turn: turn.arrival_us):
            if turn.arrival_us <= duration_s * US_PER_S:
                yield turn

    def _turns(self, chat: int, begin_us: int, seed: int) -> Iterator[SimRequest]:
        rng = random.Random(f"{seed}/chat/{chat}")
        prompt, arrival_us = tuple(range(1, self.system_tokens + 1)), begin_us
        for turn in range(self.num_turns):
            number = chat * self.num_turns + turn
            prompt += tuple(rng.randrange(1, VOCABULARY_SIZE) for _ in range(rng.randint(*self.turn_tokens)))
            num_output = rng.randint(*self.output_tokens)
            hashes = state_prefixes(prompt, (), self.state_grid_tokens, DEFAULT_TENANT.encode())
            limit = self.output_tokens[1] + 1
            request = SimRequest(number, f"chat{number}", arrival_us, prompt, num_output, limit, prefix_hashes=hashes)
            yield request
            arrival_us += round(self.pause_s * rng.uniform(0.8, 1.2) * US_PER_S)
            prompt += tuple(request.token(offset) for offset in range(num_output - 1))
