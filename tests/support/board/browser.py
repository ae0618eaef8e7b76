"""A real browser for tests of pages: the machine's own Chromium without a screen; none is downloaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

CHROMIUM = Path("/usr/bin/chromium")
NO_CHROMIUM = "needs Chromium at /usr/bin/chromium"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# A page waits this long for what a test expects; the machine may be busy.
PATIENCE_MS = 60_000


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The browser."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


class Complaints(list[str]):
    """What a page complains of: errors, warnings, and what its Content-Security-Policy has kept from it."""

    def follow(self, page: Page) -> None:
        """Writes down what the page says from here on."""
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.append(str(error)))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.append(message.text)


@asynccontextmanager
async def opened(browser: Browser, url: str, **options: Any) -> AsyncIterator[tuple[Page, Complaints]]:
    """A page of its own, with what it complains of. `options` are those of a browser's context."""
    context = await browser.new_context(
        **{"viewport": {"width": 1100, "height": 700}, "reduced_motion": "reduce", **options}
    )
    context.set_default_timeout(PATIENCE_MS)
    try:
        page, complaints = await context.new_page(), Complaints()
        complaints.follow(page)
        await page.goto(url)
        yield page, complaints
    finally:
        await context.close()
