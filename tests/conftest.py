"""What every test may ask for: a real Redis, started once per session, and a pool name of one's own in it."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import settings

# Kernels run under Triton's interpreter, on tensors of the CPU. It is chosen when triton is imported, which
# transformers may do at any time; `make test-gpu` chooses the GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

from inflight.local.redis_server import PrivateRedis
from router.store.connection import connect
from router.store.keys import PoolKeys
from tests.store_pool import SETTINGS, START_MS, StorePool

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

_pool_numbers = itertools.count()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateRedis]:
    """A real Redis that nothing else uses."""
    with PrivateRedis.start(tmp_path_factory.mktemp("redis") / "redis.log") as server:
        yield server


@pytest.fixture(scope="session")
def redis_url(redis_server: PrivateRedis) -> str:
    """Its URL for a router: the user may do no more than docs/security.md says that a router needs."""
    return redis_server.url


@pytest.fixture(scope="session")
def redis_admin_url(redis_server: PrivateRedis) -> str:
    """Its URL for tests that look at, change or measure Redis itself."""
    return redis_server.admin_url


@pytest.fixture
def pool() -> str:
    """A pool that no other test of the session has used."""
    return f"pool-{next(_pool_numbers)}"


@pytest.fixture
async def store_pool(redis_url: str, redis_admin_url: str, pool: str) -> AsyncIterator[StorePool]:
    """A pool of the admission store, with a clock that stands still."""
    redis, routers_redis = connect(redis_admin_url, SETTINGS), connect(redis_url, SETTINGS)
    store_pool = StorePool(redis, routers_redis, PoolKeys(pool))
    await store_pool.set_clock(START_MS)
    yield store_pool
    await redis.aclose()
    await routers_redis.aclose()
