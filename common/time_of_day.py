"""Time of day, which differs between machines: for output to people and clients, never for a decision."""

from __future__ import annotations

import datetime
import time

_EPOCH = datetime.date(1970, 1, 1)


def unix_ms() -> int:
    """Returns the milliseconds since 1970 by this machine's clock."""
    return round(time.time() * 1000)


def unix_day() -> int:
    """Returns the days since 1970-01-01 UTC by this machine's clock."""
    return int(time.time() // 86_400)


def day_text(day: int) -> str:
    """Returns a day, in days since 1970-01-01, as YYYY-MM-DD."""
    return (_EPOCH + datetime.timedelta(days=day)).isoformat()


def parse_day(text: str) -> int:
    """Returns the days since 1970-01-01 of a day YYYY-MM-DD. Raises `ValueError`."""
    return (datetime.date.fromisoformat(text) - _EPOCH).days
