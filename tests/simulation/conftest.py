"""The simulation asks of Redis what no router does: it publishes, and speaks RESP3."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def redis_url(redis_admin_url: str) -> str:
    """The URL of who may do everything."""
    return redis_admin_url
