"""Takes the board's pictures for the docs in a real browser.

    python -m tests.support.board.pictures docs/pictures

`make pictures` does so. Most are of a real stack of two executors with SmolLM2, idle and under load, and take some
minutes so that the charts have something to show. Those of twenty executors are of a scene, with made-up figures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser, Page, expect
from starlette.applications import Starlette

from inflight import AsyncClient
from inflight.common.http.port import HttpPort
from inflight.local.options import StackOptions
from inflight.local.ports import free_ports
from inflight.local.stack import LocalStack
from inflight.requests import Priority
from inflight.router.auth.caller import AnonymousAuthenticator
from inflight.router.dashboard.feed import Feeds
from inflight.router.dashboard.routes import dashboard_routes
from tests.support.board.browser import PATIENCE_MS, chromium
from tests.support.board.scenes import ScriptedStatistics, full_fleet, watching_of

NUM_CLIENTS = 36
EXECUTOR_ARGS = (
    *("--max-num-sequences", "12"),
    *("--num-standby-sequences", "2"),
    *("--max-tokens-in-paged-kv-cache", "4096"),
    *("--max-num-tokens", "256"),
)
PHRASE = "The bus stops at every corner of the old town, and at each stop passengers get off and others get on. "
TENANTS: tuple[tuple[str, Priority], ...] = (
    ("acme", "interactive"),
    ("globex", "standard"),
    ("data-science", "standard"),
    ("initech", "batch"),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: its file, and the screen that it is taken on."""

    name: str
    width: int
    height: int
    theme: Literal["light", "dark"]
    is_phone: bool = False
    # Opens the timeline of a request that has ended.
    has_timeline: bool = False


IDLE = (Picture("board-idle.png", 1440, 1000, "light"),)
LOADED = (
    Picture("board-light.png", 1440, 1500, "light"),
    Picture("board-dark.png", 1440, 900, "dark"),
    Picture("board-phone.png", 390, 1400, "light", is_phone=True),
    Picture("board-request.png", 1100, 640, "light", has_timeline=True),
)
FULL = (
    Picture("board-full.png", 1920, 1200, "light"),
    Picture("board-full-dark.png", 1440, 900, "dark"),
    Picture("board-phone-full.png", 390, 2400, "dark", is_phone=True),
)


async def main(folder: Path, seconds: float, *, is_scene_only: bool = False) -> None:
    """Writes all pictures into the folder, or those of the scene, which need no stack."""
    async with chromium() as browser:
        await _take_scene(browser, folder)
        if not is_scene_only:
            await _take_stack(browser, folder, seconds)


async def _take_scene(browser: Browser, folder: Path) -> None:
    """Twenty executors of 256 seats, full."""
    scene = full_fleet(20, 256)
    feeds = Feeds(ScriptedStatistics(scene.message()))
    http = HttpPort(Starlette(routes=dashboard_routes(feeds, AnonymousAuthenticator(), watching_of(scene))))
    address = await http.start("127.0.0.1:0")
    try:
        await _take(browser, f"http://{address}/", FULL, folder, 2.0)
    finally:
        feeds.close()
        await http.stop()


async def _take_stack(browser: Browser, folder: Path, seconds: float) -> None:
    """Starts the stack, loads it for so long, and takes it idle and under load."""
    (port,) = free_ports("127.0.0.1", 1)
    http = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as run_dir:
        options = StackOptions(
            executors=2,
            executor_args=EXECUTOR_ARGS,
            router_args=("--http-listen", http),
            run_dir=Path(run_dir),
        )
        async with LocalStack(options) as stack, AsyncClient(stack.address) as client:
            await _take(browser, f"http://{http}/", IDLE, folder, 12.0)
            load = [asyncio.create_task(_requests(client, number)) for number in range(NUM_CLIENTS)]
            try:
                await _take(browser, f"http://{http}/", LOADED, folder, seconds)
            finally:
                for one in load:
                    one.cancel()
                await asyncio.wait(load)


async def _requests(client: AsyncClient, number: int) -> None:
    """One client: a request after the other, of many lengths."""
    lengths = random.Random(number)
    for round_number in itertools.count():
        tenant, priority = TENANTS[number % len(TENANTS)]
        prompt = PHRASE * lengths.randint(1, 5) + f"{number}.{round_number}"
        await client.complete(
            prompt,
            tenant=tenant,
            priority=priority,
            max_tokens=lengths.randint(16, 120),
            ignore_eos=True,
            temperature=0.8,
            seed=number,
        )


async def _take(browser: Browser, url: str, pictures: Sequence[Picture], folder: Path, seconds: float) -> None:
    """Waits for so long, and takes each picture of a page that is opened for it: charts are full from the beginning."""
    await asyncio.sleep(seconds)
    for picture in pictures:
        page = await _open(browser, url, picture)
        await page.screenshot(path=folder / picture.name)
        print(f"{picture.name}: {(folder / picture.name).stat().st_size:,} bytes")
        await page.context.close()


async def _open(browser: Browser, url: str, picture: Picture) -> Page:
    context = await browser.new_context(
        viewport={"width": picture.width, "height": picture.height},
        color_scheme=picture.theme,
        reduced_motion="reduce",
        is_mobile=picture.is_phone,
    )
    page = await context.new_page()
    await page.goto(url)
    await expect(page.locator("#connection")).to_have_text("live", timeout=PATIENCE_MS)
    await expect(page.locator(".bus").first).to_be_visible(timeout=PATIENCE_MS)
    if picture in LOADED:
        await page.get_by_label("Last").select_option("5 min")
    if picture.has_timeline:
        await page.get_by_label("Show").select_option("ended")
        await page.locator("#requests button").first.click()
    await page.wait_for_timeout(4000)  # some messages, so that rates are known
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=130.0, help="how long the stack is under load before")
    parser.add_argument(
        "--scene-only", action="store_true", help="take those of twenty executors only, without a stack"
    )
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(given.folder, given.seconds, is_scene_only=given.scene_only))
