"""How long a step takes, learned from the steps that were run. Pure: seconds come in, seconds and tokens go out.

    t = a + b * tokens + c * (contexts of the decodes) + d * (chunk * middle of its context, over the prefills)

The coefficients are those of least squares on the relative error, with old steps forgotten exponentially: what is kept
is the sum of outer products, one for steps with prefill and one for those without, so that an hour of decodes does not
wash out what is known of prompts. A weak pull towards zero settles what the steps leave open; nothing is ever negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor.scheduler.sequence import StepPlan

Floats = npt.NDArray[np.float64]

# About the last 200 steps of each kind count.
FORGETTING = 0.995
# What makes a feature about 1, so that the pull is as strong on each.
SCALE = np.array([1.0, 100.0, 10_000.0, 100_000.0])
# Of a squared relative error; weaker than a single step.
PULL = 1e-3
# A step that takes this many times what was expected says something about the machine, not about steps.
LARGEST_SURPRISE = 3.0
# Steps of each kind before an expectation is worth anything.
FEWEST_STEPS = 4
# The coefficients are solved for again after so many steps, while there are few of them after each.
STEPS_PER_SOLUTION = 8


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What decides how long a step takes."""

    num_tokens: int
    decode_context: int
    prefill_work: float = 0.0

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        """The load of a plan."""
        num_tokens = sum(plan.lengths)
        if plan.num_decodes == plan.num_rows:
            return cls(num_tokens, sum(plan.starts) + num_tokens)
        decode_context, prefill_work = 0, 0.0
        for start, length in zip(plan.starts, plan.lengths, strict=True):
            if length == 1:
                decode_context += start + 1
            else:
                prefill_work += length * (start + length / 2)
        return cls(num_tokens, decode_context, prefill_work)


class StepTime:
    """Learns from steps and says what others will take."""

    def __init__(self) -> None:
        # By whether there is prefill: sums of x xT and of x, for x the features divided by the seconds.
        self._products = np.zeros((2, len(SCALE), len(SCALE)))
        self._sums = np.zeros((2, len(SCALE)))
        self._num_steps = [0, 0]
        self._coefficients: Floats | None = None

    @property
    def knows_prefill(self) -> bool:
        """Whether enough steps with prefill have been seen."""
        return self._num_steps[1] >= FEWEST_STEPS

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Takes in a step."""
        if seconds <= 0:
            return
        kind = int(load.prefill_work > 0)
        if self._num_steps[kind] >= FEWEST_STEPS:
            expected = self.predict(load)
            seconds = min(seconds, LARGEST_SURPRISE * expected) if expected > 0 else seconds
        x = _features(load) / seconds
        self._products[kind] = FORGETTING * self._products[kind] + np.outer(x, x)
        self._sums[kind] = FORGETTING * self._sums[kind] + x
        self._num_steps[kind] += 1
        num_steps = self._num_steps[kind]
        if num_steps < 4 * STEPS_PER_SOLUTION or num_steps % STEPS_PER_SOLUTION == 0:
            self._coefficients = None

    def predict(self, load: StepLoad) -> float:
        """The seconds that a step takes; 0 before the first."""
        return float(_features(load) @ self._solved())

    def fitting_chunk(self, seconds: float, position: int) -> float:
        """How many prompt tokens from `position` on add so many seconds to a step; infinitely many if they seem
        free."""
        _, per_token, _, per_work = self._solved() / SCALE
        linear = per_token + per_work * position
        if per_work <= 0:
            return seconds / linear if linear > 0 else float("inf")
        # per_work / 2 * n^2 + linear * n = seconds
        return float((np.sqrt(linear**2 + 2 * per_work * seconds) - linear) / per_work)

    def _solved(self) -> Floats:
        """The coefficients of the scaled features. One below zero is left out and the others are solved for again."""
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
        """The weight of an average step, so that the pull does not depend on how fast the device is."""
        weight = float(self._products[:, 0, 0].sum())
        return weight / max(1, min(sum(self._num_steps), round(1 / (1 - FORGETTING)))) or 1.0


def _features(load: StepLoad) -> Floats:
    features: Floats = np.array([1.0, load.num_tokens, load.decode_context, load.prefill_work]) / SCALE
    return features
