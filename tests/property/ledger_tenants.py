"""The share of a tenant in plain Python: its virtual counter, rates and limits. Part of `ledger_model`."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf

from inflight.router.ledger.types import NO_LIMITS, TenantLimits

OUTPUT_WEIGHT = 2
SHARE_STEP = 0.05


def smoothed_share(share: float, output: int, reserved: int, step: float = SHARE_STEP) -> float:
    """How much of the reserved output is used, after one more output."""
    return share + step * (min(1, output / reserved) - share)


@dataclass(slots=True)
class Bucket:
    """What one may take at a rate, after GCRA: `full_ms` is when everything taken has come back."""

    full_ms: float = 0.0

    def wait_ms(self, now_ms: int, cost: int, burst: int, per_s: float | None) -> int:
        """Until so much may be taken: there is enough, or all there can be."""
        if per_s is None:
            return 0
        return max(0, ceil(self.full_ms - now_ms - (burst - min(cost, burst)) * 1000 / per_s))

    def take(self, now_ms: int, cost: int, per_s: float | None) -> None:
        """Takes it."""
        if per_s is not None:
            self.full_ms = max(now_ms, self.full_ms) + cost * 1000 / per_s


@dataclass(slots=True)
class Tenant:
    """A tenant by its latest limits. `counter` is what it was served, `output_share` what it uses of reservations,
    `correction` that of its estimates."""

    limits: TenantLimits = NO_LIMITS
    counter: float = 0.0
    is_active: bool = False
    output_share: float = 1.0
    correction: float = 1.0
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    used_ms: int = 0

    def refusal_by_rates(self, limits: TenantLimits, tokens: int, now_ms: int) -> tuple[str, int] | None:
        """The rate that refuses a request of so many tokens, and for how long."""
        wait_ms = self.requests.wait_ms(now_ms, 1, limits.request_burst, limits.requests_per_s)
        if wait_ms:
            return "tenant requests_per_s", wait_ms
        wait_ms = self.tokens.wait_ms(now_ms, tokens, limits.token_burst, limits.tokens_per_s)
        return ("tenant tokens_per_s", wait_ms) if wait_ms else None

    def expected_charge(self, prompt_tokens: int, reserved_tokens: int, output_tokens: int) -> float:
        """What a request will probably cost it."""
        output = max(1, self.output_share * reserved_tokens - output_tokens)
        return (prompt_tokens + OUTPUT_WEIGHT * output) / self.limits.weight

    def output_charge(self, reserved_tokens: int) -> float:
        """What so much more reserved output will probably cost it."""
        return OUTPUT_WEIGHT * self.output_share * reserved_tokens / self.limits.weight

    def return_tokens(self, tokens: int) -> None:
        """Gives back what was taken of the rate of tokens and not used."""
        if self.limits.tokens_per_s is not None:
            self.tokens.full_ms -= tokens * 1000 / self.limits.tokens_per_s

    def settle(self, charge: float | None, rated: int | None, computed: int, output: int, reserved: int) -> None:
        """Corrects what was charged and taken to what was used."""
        if charge is not None:
            self.counter = self.counter + (computed + OUTPUT_WEIGHT * output) / self.limits.weight - charge
        if rated is not None:
            self.return_tokens(max(0, rated - computed - output))
        if reserved > 0:
            self.output_share = smoothed_share(self.output_share, output, reserved)

    @property
    def max_running(self) -> float:
        """Sequences that it may have placed, and then no more."""
        return inf if self.limits.max_running is None else self.limits.max_running


def exceeded(limits: TenantLimits, requests: int, tokens: int, num_bytes: int) -> str | None:
    """The bound of the tenant's line that this much of it exceeds."""
    bounds = (
        ("tenant max_queue_requests", requests, limits.max_queue_requests),
        ("tenant max_queue_tokens", tokens, limits.max_queue_tokens),
        ("tenant max_queue_bytes", num_bytes, limits.max_queue_bytes),
    )
    return next((name for name, found, bound in bounds if bound is not None and found > bound), None)
