"""The times at which the tokens of one request came, as they come; becomes its outcome."""

from __future__ import annotations

from bench.measures import Outcome


class TokenTimes:
    """Collects from sending to the end. Tokens that come together count as coming at equal distances."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._last_s = sent_s
        self._gaps_ms: list[float] = []
        self.num_tokens = 0

    @property
    def first_s(self) -> float | None:
        """When the first token came."""
        return self._first_s

    @property
    def last_s(self) -> float:
        """When the newest token came; before the first one, when the request was sent."""
        return self._last_s

    def take(self, now_s: float, number: int) -> None:
        """So many tokens came now; none change nothing."""
        if number == 0:
            return
        if self._first_s is None:
            self._first_s = now_s
            self._gaps_ms += [0.0] * (number - 1)
        else:
            self._gaps_ms += [(now_s - self._last_s) * 1e3 / number] * number
        self._last_s = now_s
        self.num_tokens += number

    def outcome(self, ended_s: float, error: str | None = None) -> Outcome:
        """How the request went."""
        return Outcome(self._sent_s, self._first_s, ended_s, self.num_tokens, tuple(self._gaps_ms), error)
