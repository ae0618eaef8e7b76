"""Errors of adapters. Needs no torch, so that what serves sequences can catch them without it."""

from __future__ import annotations


class AdapterError(ValueError):
    """An adapter that cannot be served. The text names the field or tensor."""


class AdapterGoneError(AdapterError):
    """An adapter whose files were replaced or removed."""


class UnknownAdapterError(Exception):
    """No adapter has this hash."""


class NoSlotError(Exception):
    """Sequences hold as many other adapters as there are slots."""
