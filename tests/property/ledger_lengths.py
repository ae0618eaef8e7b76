"""Learned output lengths in plain Python, and the blocks reserved for them. Part of `ledger_model`."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from inflight.router.ledger.types import Demand

NUM_BINS, BINS_PER_DOUBLING = 25, 3
MAX_COUNT, MIN_COUNT = 512, 32
ALL_TENANTS = ""


def size_of(max_tokens: int) -> int:
    """The power of two that holds so many."""
    size = 1
    while size < max_tokens:
        size *= 2
    return size


def bound_of(size: int, number: int) -> float:
    """The longest output that bin `number`, of 1 to NUM_BINS, counts."""
    return float(size * 2 ** ((number - NUM_BINS) / BINS_PER_DOUBLING))


def bin_of(size: int, tokens: int) -> int:
    """The first bin that counts outputs of this length; there are none of 0."""
    return next((n for n in range(1, NUM_BINS) if max(1, tokens) <= bound_of(size, n) * (1 + 1e-9)), NUM_BINS)


@dataclass(slots=True)
class Histogram:
    """Counts of outputs by bin; old ones count less and less."""

    count: float = 0.0
    bins: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)

    def add(self, number: int) -> None:
        """Counts one more."""
        if self.count >= MAX_COUNT:
            self.count /= 2
            self.bins = [one / 2 for one in self.bins]
        self.count += 1
        self.bins[number - 1] += 1


@dataclass(slots=True)
class Lengths:
    """A histogram for each tenant and size, and for each size."""

    histograms: dict[tuple[str, int], Histogram] = field(default_factory=dict)

    def learn(self, tenant: str, max_tokens: int, output_tokens: int) -> None:
        """Takes in a completion."""
        size = size_of(max_tokens)
        for name in (tenant, ALL_TENANTS):
            self.histograms.setdefault((name, size), Histogram()).add(bin_of(size, output_tokens))

    def forget(self, tenant: str) -> None:
        """Nothing was heard of the tenant for long."""
        self.histograms = {key: one for key, one in self.histograms.items() if key[0] != tenant}

    def likely_output(self, tenant: str, max_tokens: int, output_tokens: int, quantile: float) -> int:
        """What `quantile` of the outputs stay within that were at least as long as this one is."""
        size = size_of(max_tokens)
        known = [self.histograms.get((name, size), Histogram()) for name in (tenant, ALL_TENANTS)]
        histogram = next((one for one in known if one.count >= MIN_COUNT), None)
        if histogram is None:
            return max_tokens
        first = bin_of(size, output_tokens + 1) if output_tokens else 1
        longer = {number: histogram.bins[number - 1] for number in range(first, NUM_BINS + 1)}
        num_longer = sum(longer.values())
        if num_longer == 0:
            return max_tokens
        beyond = num_longer
        for number, count in longer.items():
            beyond -= count
            if beyond <= (1 - quantile) * num_longer + 1e-9:
                return min(max_tokens, max(ceil(bound_of(size, number)), output_tokens + 1))
        return max_tokens

    def needed_blocks(self, demand: Demand, output_tokens: int, quantile: float) -> int:
        """The blocks to reserve where `quantile` of the outputs are to fit; a block more than they fill."""
        if quantile >= 1 or demand.max_tokens == 0:
            return demand.blocks
        tokens = demand.prompt_tokens + self.likely_output(demand.tenant, demand.max_tokens, output_tokens, quantile)
        return min(demand.blocks, demand.sequences * (ceil(tokens / demand.block_size) + 1))
