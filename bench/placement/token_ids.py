"""Token ids for prompts of SmolLM2 that are only compared, not read."""

from __future__ import annotations

from collections.abc import Iterable

# Ids of SmolLM2 that are no special tokens, as many as a prime number, so that every shift of a trace differs.
FIRST_ID, NUM_IDS = 17, 48_989


def token_ids(numbers: Iterable[int]) -> list[int]:
    """Returns an id for each number; equal ones for numbers that differ by a multiple of `NUM_IDS`."""
    return [FIRST_ID + number % NUM_IDS for number in numbers]
