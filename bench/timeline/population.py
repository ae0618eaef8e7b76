"""A population of clients: tenants of different weights and limits, all classes, some with deadlines, some that
leave."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.timeline.traffic import SimRequest, brief, poisson_us, prompt_of
from inflight.router.ledger.types import TenantLimits

CLASS_WEIGHTS = (1, 6, 3)


@dataclass(frozen=True, slots=True)
class Population:
    """`deadline_fraction` of the requests say by when they want their first token; `gone_fraction` of the clients leave
    before their end."""

    num_tenants: int = 4
    rate_per_s: float = 5.0
    deadline_fraction: float = 0.1
    gone_fraction: float = 0.05

    def requests(self, seed: int, duration_s: float) -> Iterator[SimRequest]:
        """Everything that arrives in so long, by arrival."""
        rng = random.Random(f"{seed}/population")
        tenants = [(f"tenant{number:03}", limits_of(number)) for number in range(self.num_tenants)]
        # A few tenants send most of what comes.
        shares = [1 / (number + 1) for number in range(self.num_tenants)]
        for number, arrival_us in enumerate(poisson_us(self.rate_per_s, rng)):
            if arrival_us > duration_s * US_PER_S:
                return
            prompt_tokens, output_tokens, max_tokens = brief(rng)
            (tenant, limits), *_ = rng.choices(tenants, shares)
            request = SimRequest(
                number,
                f"q{number}",
                arrival_us,
                prompt_of(number, prompt_tokens),
                output_tokens,
                max_tokens,
                tenant,
                limits,
                priority_class=rng.choices((1, 2, 3), CLASS_WEIGHTS)[0],
            )
            yield self._with_patience(request, rng)

    def _with_patience(self, request: SimRequest, rng: random.Random) -> SimRequest:
        if rng.random() < self.deadline_fraction:
            request = replace(request, first_token_deadline_ms=rng.randrange(500, 20_000))
        if rng.random() < self.gone_fraction:
            request = replace(request, gone_after_us=rng.randrange(10 * US_PER_S))
        return request


def limits_of(number: int) -> TenantLimits:
    """Weights from 1 to 4; some may run only a few at once, some have a rate."""
    return TenantLimits(
        weight=1.0 + number % 4,
        max_running=8 if number % 5 == 4 else None,
        requests_per_s=2.0 if number % 7 == 6 else None,
        request_burst=5,
    )
