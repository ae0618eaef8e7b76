"""Executors of a model with one id: the newest start is used, and both sides say why the other is not."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest
from rich.console import Console

from inflight.catalogue import decode_capacity
from inflight.cli.status import capacity_view
from inflight.common.process import new_process_id
from inflight.v1 import inference_pb2
from tests.fuzz.served import HANG_S, check_unharmed
from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.stack.cluster import (
    Cluster,
    ExecutorShape,
    RunningRouter,
    run_router,
    start_executor,
    token_request,
    until_ready,
)


async def unused(router: RunningRouter) -> inference_pb2.GetCapacityResponse:
    """The capacity, as soon as it names an executor that is not used."""
    async with asyncio.timeout(HANG_S):
        while True:
            response: inference_pb2.GetCapacityResponse = await router.stub.GetCapacity(
                inference_pb2.GetCapacityRequest()
            )
            if response.unused:
                return response
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_older_first", [True, False])
async def test_of_two_executors_with_one_id_one_is_used_and_the_other_is_told_why(
    redis_url: str, pool: str, is_older_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    older = await start_executor("twin", pool, ExecutorShape(), generation=1)
    newer = await start_executor("twin", pool, ExecutorShape(), generation=2)
    order = [older, newer] if is_older_first else [newer, older]
    try:
        async with AsyncExitStack() as stack:
            routers = [
                await stack.enter_async_context(
                    run_router(f"{pool}-{number}", pool, redis_url, [one.address for one in addresses])
                )
                for number, addresses in enumerate((order, order[::-1]))
            ]
            for router in routers:
                response = await unused(router)
                (one,) = response.unused
                assert (one.executor_id, one.model, one.address) == ("twin", pool, older.address)
                assert f"the executor at {newer.address} has the same id" in one.reason
                console = Console(record=True, width=300)
                console.print(capacity_view(decode_capacity(response)))
                assert f"not used: twin of {pool} at {older.address}: the executor at" in console.export_text()
                await until_ready(router, 1)
                assert ids_of(await collect(router, token_request([1, 2], 9), HANG_S)) == expected_ids([1, 2], 9)
            await check_unharmed(Cluster([newer, older], routers))
        texts = [record.getMessage() for record in caplog.records]
        assert any(f"executor twin at {older.address} is not used: the executor at" in text for text in texts)
        for number in range(2):
            told = [text for text in texts if f"router {pool}-{number} does not use this executor: the" in text]
            assert len(told) == 1, texts
    finally:
        await older.stop()
        await newer.stop()


async def test_executor_at_two_addresses_is_linked_once(redis_url: str, pool: str) -> None:
    executor = await start_executor("one", pool, ExecutorShape())
    port = executor.address.rpartition(":")[2]
    try:
        async with run_router(pool, pool, redis_url, [executor.address, f"localhost:{port}"]) as router:
            (one,) = (await unused(router)).unused
            assert "it is linked already, at " in one.reason
            assert ids_of(await collect(router, token_request([1, 2], 9), HANG_S)) == expected_ids([1, 2], 9)
    finally:
        await executor.stop()


def test_default_ids_of_cloned_machines_differ() -> None:
    assert new_process_id("0.0.0.0:50061") != new_process_id("0.0.0.0:50061")
