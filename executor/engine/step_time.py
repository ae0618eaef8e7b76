"""Model of the duration of a step, fitted to the steps that were run. Pure: times in seconds.

    t = a + b * tokens + c * (contexts of the decodes) + d * (chunk * middle of its context, over the prefills)

The coefficients minimise the squared relative error, with old steps forgotten exponentially. Only sums of outer
products are kept, one for steps with prefill and one for those without, so that an hour of decodes does not erase what
is known of prompts. A weak pull towards zero determines what the steps leave open. No coefficient is negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inflight.executor.scheduler.sequence import StepPlan
from inflight.executor.scheduler.step_constraint import PrefillCost

Floats = npt.NDArray[np.float64]

# About the last 200 steps of each kind count.
FORGETTING = 0.995
# Scales that bring each feature to about 1, so that the pull acts equally on each.
SCALE = np.array([1.0, 100.0, 10_000.0, 100_000.0])
# Weight of the pull, of a squared relative error; less than that of a single step.
PULL = 1e-3
# A step is counted as at most this many times its prediction. Longer ones reflect the machine, not the step.
LARGEST_SURPRISE = 3.0
# Steps of each kind before a prediction is useful.
FEWEST_STEPS = 4
# Expected time of a token before that: longer than a model of 8 billion parameters takes on one core.
UNKNOWN_TOKEN_S = 0.25
# The coefficients are solved for after each of the first steps, later once in this many.
STEPS_PER_SOLUTION = 8


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Features of a step that determine its duration."""

    num_tokens: int
    decode_context: int
    prefill_work: float = 0.0

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        num_tokens = sum(plan.lengths)
        if plan.num_decodes == plan.num_rows:
            return cls(num_tokens, sum(plan.starts) + num_tokens)
        decode_context, prefill_work = 0, 0.0
        for row, (start, length) in enumerate(zip(plan.starts, plan.lengths, strict=True)):
            if length == 1 or row in plan.drafts:
                # The KV is read once for all drafts.
                decode_context += start + length
            else:
                prefill_work += length * (start + length / 2)
        return cls(num_tokens, decode_context, prefill_work)


class StepTime:
    """Fits the model and predicts the duration of steps."""

    def __init__(self) -> None:
        # By whether there is prefill: sums of x xT and of x, for x the features divided by the seconds.
        self._products = np.zeros((2, len(SCALE), len(SCALE)))
        self._sums = np.zeros((2, len(SCALE)))
        self._num_steps = [0, 0]
        # The least time of a step with prefill per token of it, which includes what does not depend on the tokens. None
        # before the first.
        self.longest_token_s: float | None = None
        self._coefficients: Floats | None = None

    @property
    def knows_prefill(self) -> bool:
        """Whether enough steps with prefill have been observed."""
        return self._num_steps[1] >= FEWEST_STEPS

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Adds a step to the fit."""
        if seconds <= 0:
            return
        kind = int(load.prefill_work > 0)
        if self._num_steps[kind] >= FEWEST_STEPS:
            expected = self.predict(load)
            seconds = min(seconds, LARGEST_SURPRISE * expected) if expected > 0 else seconds
        if kind:
            self.longest_token_s = min(self.longest_token_s or math.inf, seconds / load.num_tokens)
        x = _features(load) / seconds
        self._products[kind] = FORGETTING * self._products[kind] + np.outer(x, x)
        self._sums[kind] = FORGETTING * self._sums[kind] + x
        self._num_steps[kind] += 1
        num_steps = self._num_steps[kind]
        if num_steps < 4 * STEPS_PER_SOLUTION or num_steps % STEPS_PER_SOLUTION == 0:
            self._coefficients = None

    def predict(self, load: StepLoad) -> float:
        """Returns the predicted seconds of a step; 0 before the first."""
        return float(_features(load) @ self._solved())

    def expect(self, load: StepLoad) -> float:
        """Returns the seconds that a step may be expected to take. That is the prediction, once enough steps of its
        kind have been observed."""
        is_known = self._num_steps[int(load.prefill_work > 0)] >= FEWEST_STEPS
        return self.predict(load) if is_known else UNKNOWN_TOKEN_S * load.num_tokens

    def by_tokens(self, decode_context: int) -> Callable[[int], float]:
        """Returns the predicted seconds of a step without prefill by its tokens."""
        token_s = self.prefill_cost().token_s
        least_s = self.predict(StepLoad(0, decode_context))
        return lambda num_tokens: least_s + token_s * num_tokens

    def prefill_cost(self) -> PrefillCost:
        """Returns what prompt tokens add to a step, so that it and the decodes add up to `predict`."""
        _, token_s, context_s, work_s = (self._solved() / SCALE).tolist()
        return PrefillCost(token_s, work_s, context_s)

    def _solved(self) -> Floats:
        """Returns the coefficients of the scaled features. A negative one is dropped and the others are solved for
        again."""
        if self._coefficients is None:
            products = self._products.sum(0) + PULL * self._pull_unit() * np.eye(len(SCALE))
            sums = self._sums.sum(0)
            kept = np.arange(len(SCALE))
            coefficients = np.zeros(len(SCALE))
            while len(kept):
                solution = np.linalg.solve(products[np.ix_(kept, kept)], sums[kept])
                if (solution >= 0).all():
                    coefficients[kept] = solution
                    break
                kept = np.delete(kept, solution.argmin())
            self._coefficients = coefficients
        return self._coefficients

    def _pull_unit(self) -> float:
        """Returns the weight of an average step, so that the pull does not depend on the speed of the device."""
        weight = float(self._products[:, 0, 0].sum())
        return weight / max(1, min(sum(self._num_steps), round(1 / (1 - FORGETTING)))) or 1.0


def _features(load: StepLoad) -> Floats:
    features: Floats = np.array([1.0, load.num_tokens, load.decode_context, load.prefill_work]) / SCALE
    return features
