"""The number of examples of a property, scaled by the Hypothesis profile of the run."""

from __future__ import annotations

from hypothesis import settings

DEFAULT = 100  # of Hypothesis


def examples(num_examples: int) -> int:
    """Returns `num_examples` under the profiles `fixed` and `explore`, a quarter of them under `short`."""
    return num_examples * settings().max_examples // DEFAULT
