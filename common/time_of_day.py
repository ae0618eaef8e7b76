"""Time of day, which differs between machines: for output to people and clients, never for a decision."""

from __future__ import annotations

import time


def unix_ms() -> int:
    """Returns the milliseconds since 1970 by this machine's clock."""
    return round(time.time() * 1000)
