"""The time of day, which differs between machines: for what people and clients are told, never for a decision."""

from __future__ import annotations

import time


def unix_ms() -> int:
    """Milliseconds since 1970 by this machine's clock."""
    return round(time.time() * 1000)
