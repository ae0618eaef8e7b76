"""What prompts want of the next step, and whom they would hold up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillDemand:
    """Who computes, and who waits to: `num_behind` sequences with a seat, or one to be had, want a first token. The
    first of them goes on at `position`."""

    num_decodes: int
    decode_context: int
    num_behind: int
    position: int
