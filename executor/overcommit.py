"""How much of the output that a sequence may have should be reserved for it. Pure.

The executor reports a quantile; routers reserve so much that a sequence stays within it with that likelihood. Too low,
and sequences are preempted and computed again; too high, and blocks stand empty. So the quantile follows the share of
tokens that are computed more than once. Where that hurts, it is 1 for a while (as under guaranteed_no_evict), twice as
long every time that it happens again soon after.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_QUANTILE = 0.5


@dataclass(frozen=True, slots=True)
class ReserveRules:
    """Shares are of the tokens computed; the shares are taken over `window_tokens`, more than the longest sequence that
    is usually lost at once. `target` is what overcommitting may cost; below half of it the quantile sinks by `sink`,
    above it half of what is missing to 1 is added. Above `unbearable` there is a fallback for `hold_tokens`."""

    first: float = 0.9
    target: float = 0.02
    unbearable: float = 0.10
    sink: float = 0.01
    window_tokens: int = 16_384
    hold_tokens: int = 65_536
    most_hold_tokens: int = 4_194_304


class ReserveController:
    """Takes in what is computed, as totals since the start: the sums of the windows that it judges."""

    def __init__(self, rules: ReserveRules | None = None) -> None:
        self._rules = rules or ReserveRules()
        self._bearable = self._rules.first
        self._num_computed = 0
        self._num_recomputed = 0
        self._num_held_tokens = 0
        self._hold_tokens = self._rules.hold_tokens

    @property
    def is_holding(self) -> bool:
        """Whether it has fallen back."""
        return self._num_held_tokens > 0

    @property
    def quantile(self) -> float:
        """How likely output should be to stay within what is reserved for it."""
        return 1.0 if self.is_holding else self._bearable

    def observe(self, num_computed: int, num_recomputed: int) -> None:
        """So many tokens were computed since the start, so many of them once more."""
        num_tokens = num_computed - self._num_computed
        if num_tokens >= self._rules.window_tokens:
            self._judge((num_recomputed - self._num_recomputed) / num_tokens, num_tokens)
            self._num_computed, self._num_recomputed = num_computed, num_recomputed

    def _judge(self, share: float, num_tokens: int) -> None:
        rules = self._rules
        if self.is_holding:
            # Those who board now are promised all that they need; what is still lost was promised before.
            self._num_held_tokens = max(0, self._num_held_tokens - num_tokens)
        elif share > rules.unbearable:
            self._bearable += (1 - self._bearable) / 2
            self._num_held_tokens = self._hold_tokens
            self._hold_tokens = min(2 * self._hold_tokens, rules.most_hold_tokens)
        elif share > rules.target:
            self._bearable += (1 - self._bearable) / 2
        elif share < rules.target / 2:
            self._bearable = max(LEAST_QUANTILE, self._bearable - rules.sink)
            # A window well below the target makes the next fallback shorter again, slowly.
            self._hold_tokens = max(rules.hold_tokens, self._hold_tokens - num_tokens)
