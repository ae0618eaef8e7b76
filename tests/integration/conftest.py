"""A cluster of one router and one executor, a gateway in front of it, OpenAI's own client of that, and a record of what
executors are sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from inflight.executor.serving import service
from inflight.executor.serving.submission import SubmissionLimits, sequence_from_submit
from inflight.v1 import executor_pb2
from tests.support.stack.cluster import Cluster, run_cluster
from tests.support.stack.gateways import RunningGateway, run_gateway


@pytest.fixture
async def cluster(redis_url: str, pool: str) -> AsyncIterator[Cluster]:
    """The cluster, whose model has the pool's name."""
    async with run_cluster(redis_url, pool) as running:
        yield running


@pytest.fixture
async def gateway(cluster: Cluster) -> AsyncIterator[RunningGateway]:
    async with run_gateway(cluster.routers[0].address) as running:
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client, without retries."""
    async with gateway.openai() as opened:
        yield opened


@pytest.fixture
def submits(monkeypatch: pytest.MonkeyPatch) -> list[executor_pb2.Submit]:
    """What executors are sent."""
    received: list[executor_pb2.Submit] = []

    def record(submit: executor_pb2.Submit, limits: SubmissionLimits) -> Any:
        received.append(executor_pb2.Submit.FromString(submit.SerializeToString()))
        return sequence_from_submit(submit, limits)

    monkeypatch.setattr(service, "sequence_from_submit", record)
    return received
