"""The live board of a real router, with real executors, Redis and requests, in a real browser."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

import grpc.aio
import pytest
from playwright.async_api import Locator, expect

from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2
from tests.integration.test_hostile_clients import until
from tests.support.board.browser import CHROMIUM, NO_CHROMIUM, PATIENCE_MS, chromium, opened
from tests.support.stack.cluster import Brake, RunningRouter, run_cluster, token_request

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_CHROMIUM)

SETTINGS = RouterSettings(http_listen="127.0.0.1:0", no_executor_grace_s=60.0)
NUM_SEATS = 4
NUM_TOKENS = 24
STEP_PATIENCE_MS = 5000


async def answered(router: RunningRouter, number: int) -> None:
    """One request to its end."""
    request = token_request(
        [1, 2, 3, number % 5], NUM_TOKENS, request_id=f"request-{number}", tenant=f"tenant-{number % 2}"
    )
    call: grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
    call = router.stub.Generate(request)
    async for _ in call:
        pass


async def stepped_until(brake: Brake, seats: Locator, says: str) -> None:
    """One step of the executor after the other, until the page says so: news of a step may come with the next."""
    for _ in range(NUM_TOKENS // 2):
        brake.permit(1)
        with suppress(AssertionError):
            await expect(seats).to_have_attribute("aria-valuetext", re.compile(says), timeout=STEP_PATIENCE_MS)
            return
    raise AssertionError(f"{await seats.get_attribute('aria-valuetext')}, not {says}")


async def test_board_shows_real_requests_boarding_waiting_and_leaving(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, settings=SETTINGS) as cluster, chromium() as browser:
        router, executor = cluster.routers[0], cluster.executors[0]
        brake = executor.brake
        http = router.parts.http
        assert http is not None
        address = await http.start("127.0.0.1:0")
        async with opened(browser, f"http://{address}/") as (page, complaints):
            said = page.get_by_role("slider", name="Seats of executor-0")
            await expect(said).to_have_attribute("aria-valuetext", re.compile("^0 of 4"), timeout=PATIENCE_MS)
            # Given more requests than seats, and an executor that steps when it may
            brake.hold()
            calls = [asyncio.create_task(answered(router, number)) for number in range(NUM_SEATS + 3)]
            # One of them is in a step, and the engine takes the others in at its end
            await until(lambda: executor.scheduler.num_held + executor.engine._inbox.qsize() >= NUM_SEATS)
            # Then seats are taken, and the others wait in the queue
            await stepped_until(brake, said, "^4 of 4")
            await expect(page.locator("#figures")).to_contain_text("Queue3", timeout=PATIENCE_MS)
            await expect(page.locator("#tenants")).to_contain_text("tenant-1", timeout=PATIENCE_MS)
            # When the executor goes on
            brake.release()
            await asyncio.wait_for(asyncio.gather(*calls), 60)
            # Then all have left, and the charts have their latencies
            await expect(said).to_have_attribute("aria-valuetext", re.compile("^0 of 4"), timeout=PATIENCE_MS)
            await expect(page.locator("#queue")).to_have_text("The queue is empty.", timeout=PATIENCE_MS)
            assert router.parts.sampler is not None
            await router.parts.sampler.sample()
            first = page.get_by_role("img", name=re.compile(r"^TTFT, ms\. Now: p50 \d"))
            await expect(first).to_be_visible(timeout=PATIENCE_MS)
            bounds = page.locator(".bounds").first
            await expect(bounds).to_have_text(re.compile("nothing waited on the executor"), timeout=PATIENCE_MS)
            assert not complaints
        router.stats.close()
        await http.stop()
