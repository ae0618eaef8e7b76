"""Checks that token ids are within a model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import FieldViolation


def first_outside(ids: Sequence[int], vocabulary_size: int) -> int | None:
    """Returns the index of the first id that the model does not have."""
    if max(ids, default=0) < vocabulary_size:
        return None
    return next(i for i, token_id in enumerate(ids) if token_id >= vocabulary_size)


def outside_violation(field: str, token_id: int, vocabulary_size: int) -> FieldViolation:
    """Makes the violation for an id that the model does not have."""
    return FieldViolation(
        field,
        f"token id {token_id} is outside the model's vocabulary of {vocabulary_size} ids (0 to {vocabulary_size - 1})",
    )
