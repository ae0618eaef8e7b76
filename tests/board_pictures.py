"""Takes the board's pictures for the docs: a real stack of two executors with SmolLM2 under load, in a real browser.

    python -m tests.board_pictures docs/pictures

`make pictures` does so. Takes some minutes, most of them so that the charts have something to show.
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

from playwright.async_api import Browser, Page

from client.aio import Client
from client.requests import Priority
from client.stack.local import LocalStack
from client.stack.options import StackOptions
from client.stack.ports import free_ports
from tests.board_browser import chromium

NUM_CLIENTS = 36
EXECUTOR_ARGS = (
    *("--max-num-sequences", "12"),
    *("--num-standby-sequences", "2"),
    *("--max-tokens-in-paged-kv-cache", "4096"),
    *("--max-num-tokens", "256"),
)
PHRASE = "The bus stops at every corner of the old town, and at each stop somebody gets off and somebody boards. "
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


PICTURES = (
    Picture("board-light.png", 1280, 1960, "light"),
    Picture("board-dark.png", 1280, 1400, "dark"),
    Picture("board-phone.png", 390, 1100, "light", is_phone=True),
)


async def main(folder: Path, seconds: float) -> None:
    """Starts the stack, loads it for so long, and writes the pictures into the folder."""
    (port,) = free_ports("127.0.0.1", 1)
    http = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as run_dir:
        options = StackOptions(
            executors=2,
            executor_args=EXECUTOR_ARGS,
            router_args=("--http-listen", http),
            run_dir=Path(run_dir),
        )
        async with LocalStack(options) as stack, Client(stack.address) as client, chromium() as browser:
            load = [asyncio.create_task(_requests(client, number)) for number in range(NUM_CLIENTS)]
            try:
                await _take(browser, f"http://{http}/", PICTURES, folder, seconds)
            finally:
                for one in load:
                    one.cancel()
                await asyncio.wait(load)


async def _requests(client: Client, number: int) -> None:
    """One client: a request after the other, of many lengths."""
    lengths = random.Random(number)
    for round_number in itertools.count():
        tenant, priority = TENANTS[number % len(TENANTS)]
        prompt = f"{number}.{round_number} " + PHRASE * lengths.randint(1, 5)
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
    pages = [await _open(browser, url, picture) for picture in pictures]
    await asyncio.sleep(seconds)
    for picture, page in zip(pictures, pages, strict=True):
        await page.bring_to_front()
        await page.screenshot(path=folder / picture.name)
        print(f"{picture.name}: {(folder / picture.name).stat().st_size:,} bytes")


async def _open(browser: Browser, url: str, picture: Picture) -> Page:
    context = await browser.new_context(
        viewport={"width": picture.width, "height": picture.height},
        color_scheme=picture.theme,
        reduced_motion="reduce",
        device_scale_factor=1.5 if picture.is_phone else 1,
        is_mobile=picture.is_phone,
    )
    page = await context.new_page()
    await page.goto(url)
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=130.0, help="how long the stack is under load before")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(given.folder, given.seconds))
