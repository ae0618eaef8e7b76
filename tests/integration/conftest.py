"""A cluster of one router and one executor, a gateway in front of it, and OpenAI's own client of that."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.cluster import Cluster, run_cluster
from tests.gateways import RunningGateway, run_gateway


@pytest.fixture
async def cluster(redis_url: str, pool: str) -> AsyncIterator[Cluster]:
    """The cluster, whose model has the pool's name."""
    async with run_cluster(redis_url, pool) as running:
        yield running


@pytest.fixture
async def gateway(cluster: Cluster) -> AsyncIterator[RunningGateway]:
    """The gateway."""
    async with run_gateway(cluster.routers[0].address) as running:
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client, without retries."""
    async with gateway.openai() as opened:
        yield opened
