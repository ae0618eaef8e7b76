"""Beam search over the likeliest next tokens. Pure: the caller asks for these and passes them in.

The rules are those of `generate(num_beams=…)` in transformers. At each step every running beam is continued by its
likeliest tokens, of which the best `(1 + number of end tokens) * beams` candidates over all beams are kept. Of these,
the best `beams` that have not ended run on, and those that have ended and are among the best `beams` are finished, with
the score

    sum of log probabilities / number of output tokens ** length_penalty

The search ends when no running beam can improve on the finished ones, as `early_stopping` judges it, or at
`max_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Literal

from inflight.events import Logprob

EarlyStopping = bool | Literal["never"]

# Likeliest tokens that a request can report.
MAX_CANDIDATES = 20


@dataclass(frozen=True, slots=True)
class Beam:
    """An output, with its end token if it has one. `logprob` is the sum of its tokens' log probabilities."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    text: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a search, named as in transformers. `early_stopping`: True ends it with enough finished beams,
    False when the best running beam is worse than these at its present length, "never" when it is at any length.

    Raises:
        ValueError: a value is not allowed.
    """

    beams: int
    max_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping
    end_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.beams < 1 or self.num_candidates > MAX_CANDIDATES:
            per_beam = self.num_candidates // self.beams if self.beams else 2
            most, num_ends = MAX_CANDIDATES // per_beam, len(self.end_token_ids)
            raise ValueError(f"beams: is {self.beams}; must be 1 to {most} with {num_ends} end tokens")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: is {self.max_tokens}; must be at least 1")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty: is {self.length_penalty}; must be a number")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f'early_stopping: is {self.early_stopping!r}; must be True, False or "never"')

    @property
    def num_candidates(self) -> int:
        """The candidates of a step, and the likeliest tokens that it needs of each beam."""
        return max(2, 1 + len(self.end_token_ids)) * self.beams


@dataclass(frozen=True, slots=True)
class _Running:
    token_ids: tuple[int, ...]
    logprob: float


class BeamSearch:
    """One search. While there are `running` outputs, `step` takes the likeliest next tokens of each."""

    def __init__(self, params: BeamParams) -> None:
        self._params = params
        self._running = [_Running((), 0.0)]
        # Best first.
        self._finished: list[Beam] = []

    @property
    def running(self) -> tuple[tuple[int, ...], ...]:
        """The outputs to continue; none after the end."""
        return tuple(one.token_ids for one in self._running)

    @property
    def num_candidates(self) -> int:
        """The likeliest tokens that a step needs of each output."""
        return self._params.num_candidates

    @property
    def finished(self) -> tuple[Beam, ...]:
        """The finished beams, best first; at most as many as beams."""
        return tuple(self._finished)

    def step(self, likeliest: Sequence[Sequence[Logprob]]) -> None:
        """Continues every running output. `likeliest` are the `num_candidates` likeliest tokens after each."""
        params = self._params
        continued = (
            _Running((*one.token_ids, token.token_id), one.logprob + token.logprob)
            for one, tokens in zip(self._running, likeliest, strict=True)
            for token in tokens
            if token.logprob > -math.inf
        )
        candidates = nlargest(params.num_candidates, continued, key=lambda one: one.logprob)
        ended = [one for one in candidates[: params.beams] if self._has_ended(one)]
        merged = [*self._finished, *map(self._scored, ended)]
        self._finished = sorted(merged, key=lambda beam: -beam.score)[: params.beams]
        self._running = [one for one in candidates if not self._has_ended(one)][: params.beams]
        if self._is_over():
            self._running = []

    def _has_ended(self, one: _Running) -> bool:
        return one.token_ids[-1] in self._params.end_token_ids or len(one.token_ids) == self._params.max_tokens

    def _scored(self, one: _Running) -> Beam:
        return Beam(one.token_ids, one.logprob, one.logprob / len(one.token_ids) ** self._params.length_penalty)

    def _is_over(self) -> bool:
        """Returns whether no running output can become one of the best."""
        params = self._params
        if not self._running:
            return True
        if len(self._finished) < params.beams:
            return False
        best = self._running[0]
        is_longer_better = params.early_stopping == "never" and params.length_penalty > 0
        length = params.max_tokens if is_longer_better else len(best.token_ids)
        return params.early_stopping is True or best.logprob / length**params.length_penalty <= self._finished[-1].score
