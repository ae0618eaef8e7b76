"""The dashboard in a real browser: the router's routes, a scripted source of statistics, Chromium.

One browser for all tests. A test shows a message and waits until the page says what the message says.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect
from starlette.applications import Starlette

from inflight.common.http.port import HttpPort
from inflight.router.auth.authenticator import Authentication
from inflight.router.auth.caller import AnonymousAuthenticator, Authenticator, Caller
from inflight.router.dashboard.feed import Feeds
from inflight.router.dashboard.history import MODEL_FIELDS, ModelSample, row_of
from inflight.router.dashboard.routes import UsageReader, dashboard_routes
from inflight.router.dashboard.watching import Watching
from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2, types_pb2
from tests.support.board.browser import CHROMIUM, NO_CHROMIUM, PATIENCE_MS, Complaints, chromium, opened
from tests.support.board.scenes import Rider, Scene, ScriptedStatistics, full_bus, watching_of
from tests.support.stack.credentials import key_entry

KEY = "key-of-acme-" + "a" * 32
# What Chromium reports of a router that stops. While it stops, it refuses new watchers with status 503.
LOST_CONNECTION = re.compile(
    r"ERR_(CONNECTION_REFUSED|INCOMPLETE_CHUNKED_ENCODING|CONNECTION_RESET|EMPTY_RESPONSE)|status of 503"
)

expect.set_options(timeout=PATIENCE_MS)

pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_CHROMIUM),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass
class Served:
    """A board that is served, and its source."""

    source: ScriptedStatistics
    feeds: Feeds
    http: HttpPort
    address: str

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{self.address}/"

    async def stop(self) -> None:
        """As a router stops."""
        self.feeds.close()
        await self.http.stop()


async def serve(
    *messages: inference_pb2.GetStatsResponse,
    authenticator: Authenticator | None = None,
    listen: str = "127.0.0.1:0",
    watching: Watching | None = None,
    usage: UsageReader | None = None,
) -> Served:
    source = ScriptedStatistics(*messages)
    feeds = Feeds(source)
    routes = dashboard_routes(feeds, authenticator or AnonymousAuthenticator(), watching, usage)
    http = HttpPort(Starlette(routes=routes))
    return Served(source, feeds, http, await http.start(listen))


@asynccontextmanager
async def board(
    *messages: inference_pb2.GetStatsResponse,
    authenticator: Authenticator | None = None,
    watching: Watching | None = None,
    usage: UsageReader | None = None,
) -> AsyncIterator[Served]:
    served = await serve(*messages, authenticator=authenticator, watching=watching, usage=usage)
    try:
        yield served
    finally:
        await served.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


def is_live(page: Page, word: str = "live") -> Any:
    return expect(page.locator("#connection")).to_have_text(word)


async def seats_word(page: Page, bus: int = 0) -> str:
    """What the first bus says of its seats."""
    word = await page.get_by_role("slider").nth(bus).get_attribute("aria-valuetext")
    assert word is not None
    return word


async def picture(page: Page) -> bytes:
    """Returns the first bus as it is painted, once nothing moves."""
    box = page.locator(".seats canvas").first
    before = b""
    while (now := await box.screenshot(animations="disabled")) != before:
        before = now
    return now


def rider(number: int, tenant: str = "acme", **fields: int) -> Rider:
    fields = {"prompt": 100, "output": 60, "computed": 120, "answered": 20, "seat": number} | fields
    return Rider(number, tenant, types_pb2.PRIORITY_CLASS_STANDARD, arrived_ms=0, **fields)


def scene_with(riders: Sequence[Rider], seats: int = 8) -> Scene:
    scene = Scene(1, seats, 200, arrivals_per_step=0)
    scene.buses[0].riders = [dataclasses.replace(one) for one in riders]
    return scene


async def test_router_without_executors_says_so(browser: Browser) -> None:
    message = inference_pb2.GetStatsResponse(router_id="router-7", timestamp_ms=1)
    async with board(message) as served, opened(browser, served.url) as (page, complaints):
        await is_live(page)
        await expect(page.locator("#router-id")).to_have_text("router-7")
        await expect(page.locator("#no-bus")).to_be_visible()
        await expect(page.locator("#queue")).to_have_text("The queue is empty.")
        await expect(page.locator(".nothing:visible")).to_have_count(8)
        assert not complaints


async def test_seats_fill_and_empty_as_sequences_board_and_leave(browser: Browser) -> None:
    scene = scene_with([])
    async with (
        board(scene.message()) as served,
        opened(browser, served.url) as (page, complaints),
    ):
        seats = page.get_by_role("slider", name="Seats of executor-0")
        await expect(seats).to_have_attribute("aria-valuetext", re.compile("^0 of 8 seats taken"))
        empty = await picture(page)
        # When two board
        scene.buses[0].riders = [rider(0), rider(5, "globex", computed=40, answered=0)]
        served.source.show(scene.message())
        await expect(seats).to_have_attribute("aria-valuetext", re.compile("^2 of 8 seats taken, 1 in prefill"))
        taken = await picture(page)
        assert taken != empty
        await expect(page.locator("#tenants")).to_have_text(re.compile("acme.*globex", re.DOTALL))
        # And leave
        scene.buses[0].riders = []
        served.source.show(scene.message())
        await expect(seats).to_have_attribute("aria-valuetext", re.compile("^0 of 8 seats taken"))
        assert await picture(page) == empty
        assert not complaints


async def test_passengers_are_seen_boarding_and_leaving(browser: Browser) -> None:
    scene = scene_with([rider(0)])
    async with (
        board(scene.message()) as served,
        opened(browser, served.url, reduced_motion="no-preference") as (page, complaints),
    ):
        await is_live(page)
        one = await picture(page)
        scene.buses[0].riders = [rider(3, "globex")]
        served.source.show(scene.message())
        await expect(page.locator("#tenants")).to_have_text(re.compile("globex"))
        assert await picture(page) != one
        assert not complaints


async def test_seat_tells_who_sits_there_to_keys_and_pointer(browser: Browser) -> None:
    scene = scene_with([rider(0), rider(1, "globex", computed=40, answered=0), rider(2, "")])
    async with board(scene.message()) as served, opened(browser, served.url) as (page, complaints):
        await is_live(page)
        seats = page.get_by_role("slider", name="Seats of executor-0")
        await seats.focus()
        await expect(seats).to_have_attribute(
            "aria-valuetext", re.compile("^Seat 1: acme · decode · 100 prompt tokens, 20 output")
        )
        await page.keyboard.press("ArrowDown")
        looked_at = page.locator(".looked-at")
        await expect(looked_at).to_have_text(
            re.compile("^Seat 2: globex · prefill · 40 of 100 prompt tokens computed.*request-1")
        )
        await page.keyboard.press("End")
        await expect(looked_at).to_have_text("Seat 8: free")
        await page.keyboard.press("Escape")
        await expect(looked_at).to_have_text(re.compile("^Select a seat"))
        await seats.blur()
        await seats.hover(position={"x": 40, "y": 42})
        await expect(looked_at).to_have_text(re.compile("^Seat 1: acme"))
        assert not complaints


async def test_usage_of_today_is_summed_by_tenant_and_follows_the_model(browser: Browser) -> None:
    def line(model: str, tenant: str, busy_s: float, output: int, cost: float | None) -> inference_pb2.UsageLine:
        used = types_pb2.ResourceUsage(busy_ns=round(busy_s * 1e9), output_tokens=output)
        return inference_pb2.UsageLine(model=model, tenant=tenant, is_system=not tenant, used=used, cost=cost)

    lines = [
        *(line("tiny", "acme", 3.0, 1200, 0.25), line("tiny", "acme", 4.5, 300, None)),
        *(line("tiny", "globex", 90.0, 7, 12.5), line("other", "globex", 1.0, 1, None), line("tiny", "", 0.5, 0, None)),
    ]

    async def usage(caller: Caller, request: inference_pb2.GetUsageRequest) -> inference_pb2.GetUsageResponse:
        return inference_pb2.GetUsageResponse(lines=lines, currency="EUR")

    scene = Scene(2, 2)
    scene.buses[0].model, scene.buses[1].model = "tiny", "other"
    async with board(scene.message(), usage=usage) as served, opened(browser, served.url) as (page, complaints):
        rows = page.locator("#costs tbody tr")
        await expect(rows).to_have_text(
            [
                re.compile(r"globex91\.0 s812\.50"),
                re.compile(r"acme7\.50 s1,5000\.25"),
                re.compile(r"\(system\)500 ms0–"),
            ]
        )
        await page.get_by_label("Model").select_option("other")
        await expect(rows).to_have_text([re.compile(r"globex1\.00 s1–")])
        assert not complaints


async def test_queue_blocks_constraints_and_figures_are_told(browser: Browser) -> None:
    scene = Scene(2, 8, 120, arrivals_per_step=1.0)
    scene.run(60)
    message = scene.message()
    async with board(message) as served, opened(browser, served.url) as (page, complaints):
        await is_live(page)
        queue = page.get_by_role("table", name="Requests in the queue, by tenant and class")
        for waiting in message.queues:
            row = queue.get_by_role("row", name=re.compile(waiting.tenant))
            await expect(row).to_contain_text(f"{waiting.num_tokens:,}")
            await expect(row.locator(".amount")).to_have_text(f"{waiting.num_requests:,}")
        blocks = page.get_by_role("img", name="KV blocks of executor-0")
        used = message.executors[0].iterations[-1].kv_cache_stats.used_num_blocks
        await expect(page.locator(".bus").first).to_contain_text(f"{used} in use of 120")
        await expect(blocks).to_have_attribute("aria-label", re.compile(r"globex \d+.*reserved, not used \d+.*of 120"))
        await expect(page.locator(".bounds").first).to_contain_text(
            re.compile(r"%\s*no free KV blocks for the next sequence")
        )
        num_waiting = sum(one.num_requests for one in message.queues)
        await expect(page.locator("#figures")).to_contain_text(f"Queue{num_waiting}")
        assert not complaints


async def test_charts_go_on_with_new_samples_and_show_them_as_tables(browser: Browser) -> None:
    scene = Scene(1)
    watching = Watching()
    async with board(scene.message(), watching=watching) as served, opened(browser, served.url) as (page, complaints):
        await expect(page.locator(".nothing:visible")).to_have_count(8)
        for median in (100.0, 250.0):
            figures = row_of(MODEL_FIELDS, {"ttftP50Ms": median, "ttftP99Ms": 2 * median})
            watching.history.add(watching.clock(), 5.0, {scene.buses[0].model: ModelSample(figures)})
            served.source.show(scene.message())
            stamp = page.get_by_role("img", name=re.compile(f"^TTFT, ms. Now: p50 {median:.0f}, p99 {2 * median:.0f}"))
            await expect(stamp).to_be_visible()
        await page.get_by_role("button", name="Tables").click()
        table = page.get_by_role("table", name="TTFT, ms")
        await expect(table.get_by_role("columnheader", name="p50")).to_be_visible()
        await expect(table.get_by_role("row")).not_to_have_count(1)
        assert not complaints


async def test_model_filter_shows_one_models_buses(browser: Browser) -> None:
    scene = Scene(2, 8)
    scene.buses[1].model = "another-model"
    async with board(scene.message()) as served, opened(browser, served.url) as (page, complaints):
        await expect(page.locator(".bus")).to_have_count(2)
        await page.get_by_label("Model").select_option("another-model")
        await expect(page.locator(".bus")).to_have_count(1)
        await expect(page.locator(".bus h3")).to_have_text("executor-1")
        assert not complaints


async def test_pause_lets_go_of_the_stream_and_resume_takes_it_up(browser: Browser) -> None:
    scene = scene_with([rider(0)])
    async with board(scene.message()) as served, opened(browser, served.url) as (page, complaints):
        await is_live(page)
        await page.get_by_role("button", name="Pause").click()
        await is_live(page, "paused")
        while served.feeds.num_watchers:
            await asyncio.sleep(0.01)
        scene.buses[0].riders = []
        served.source.show(scene.message())
        assert (await seats_word(page)).startswith("1 of 8")
        await page.get_by_role("button", name="Pause").click()
        await is_live(page)
        await expect(page.get_by_role("slider")).to_have_attribute("aria-valuetext", re.compile("^0 of 8"))
        assert not complaints


async def test_page_connects_again_after_the_router_restarts(browser: Browser) -> None:
    served = await serve(scene_with([rider(0)]).message())
    async with opened(browser, served.url) as (page, complaints):
        await is_live(page)
        await served.stop()
        await is_live(page, "reconnecting")
        again = await serve(scene_with([]).message(), listen=served.address)
        await is_live(page)
        await expect(page.get_by_role("slider")).to_have_attribute("aria-valuetext", re.compile("^0 of 8"))
        await again.stop()
        assert not [one for one in complaints if not LOST_CONNECTION.search(one)]


async def test_locked_router_asks_for_a_key_and_keeps_it_in_the_tab_alone(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(key_entry(KEY, "acme"))
    authenticator = Authentication(RouterSettings(api_keys_file=keys)).authenticator
    async with (
        board(scene_with([rider(0)]).message(), authenticator=authenticator) as served,
        opened(browser, served.url) as (page, complaints),
    ):
        field = page.get_by_label("API key or token")
        await expect(field).to_be_focused()
        await expect(page.locator("#board")).to_be_hidden()
        await field.fill("wrong" * 10)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("Key rejected")
        await field.fill(KEY)
        await page.get_by_role("button", name="Open dashboard").click()
        await is_live(page)
        await expect(field).to_be_hidden()
        kept = await page.evaluate(
            "[Object.values(sessionStorage), Object.values(localStorage), document.cookie, location.href]"
        )
        assert kept == [[KEY], [], "", served.url]
        await page.reload()
        await is_live(page)
        await page.get_by_role("button", name="Forget key").click()
        await expect(field).to_be_visible()
        assert await page.evaluate("sessionStorage.length") == 0
        assert set(complaints) == {"Failed to load resource: the server responded with a status of 401 (Unauthorized)"}


async def test_no_barrier_is_found_by_axe_in_either_theme(browser: Browser) -> None:
    scene = Scene(1, 4, 80)
    scene.run(8)
    async with (
        board(scene.message(), watching=watching_of(scene)) as served,
        opened(browser, served.url) as (page, complaints),
    ):
        await is_live(page)
        await page.get_by_role("button", name="Tables").click()
        themes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for theme in themes:
            await page.emulate_media(color_scheme=theme)
            results = await Axe().run(page)
            found = [(one["id"], [node["html"] for node in one["nodes"]]) for one in results.response["violations"]]
            assert not found, theme
        assert not complaints


async def test_theme_follows_the_system_and_the_button(browser: Browser) -> None:
    async with (
        board(Scene().message()) as served,
        opened(browser, served.url, color_scheme="dark") as (page, complaints),
    ):
        await is_live(page)
        paper = "getComputedStyle(document.body).backgroundColor"
        dark, theme = await page.evaluate(paper), page.get_by_role("button", name="Theme")
        await theme.click()
        await expect(theme).to_have_text("Theme: light")
        light = await page.evaluate(paper)
        assert light != dark
        await page.reload()
        await expect(theme).to_have_text("Theme: light")
        assert await page.evaluate(paper) == light
        await page.emulate_media(color_scheme="light")
        await theme.click()
        await theme.click()
        await expect(theme).to_have_text("Theme: system")
        assert await page.evaluate(paper) == light
        assert not complaints


async def test_phone_has_one_column_no_sideways_scroll_and_large_targets(browser: Browser) -> None:
    scene = Scene(2, 32, 300, tenants=("acme", "a-tenant-with-a-very-long-name-that-does-not-end-soon" * 2))
    scene.run(60)
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    async with board(scene.message()) as served, opened(browser, served.url, **phone) as (page, complaints):
        await is_live(page)
        await page.get_by_role("button", name="Tables").click()
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        small = """[...document.querySelectorAll("button, select, input, summary, .seats")]
            .filter((one) => one.checkVisibility() && one.getBoundingClientRect().height < 44)
            .map((one) => one.textContent)"""
        assert await page.evaluate(small) == []
        lefts = await page.evaluate(
            "[...document.querySelectorAll('.bus')].map((one) => one.getBoundingClientRect().left)"
        )
        assert len(set(lefts)) == 1
        await page.get_by_role("slider").first.tap(position={"x": 40, "y": 42})
        await expect(page.locator(".looked-at").first).to_have_text(re.compile(r"^Seat \d+: "))
        assert not complaints


async def test_screen_reader_finds_landmarks_headings_tables_and_a_summary(browser: Browser) -> None:
    scene = Scene(1, 8, 120)
    scene.run(40)
    async with board(scene.message()) as served, opened(browser, served.url) as (page, complaints):
        await is_live(page)
        landmarks: tuple[Literal["banner", "main", "contentinfo"], ...] = ("banner", "main", "contentinfo")
        for landmark in landmarks:
            await expect(page.get_by_role(landmark)).to_have_count(1)
        for heading in (
            "inflight dashboard",
            "History",
            "Executors",
            "executor-0",
            "Queue",
            "Events",
            "Tenants",
            "Requests",
        ):
            await expect(page.get_by_role("heading", name=heading, exact=True)).to_have_count(1)
        await expect(page.get_by_role("status")).to_have_text(
            re.compile(r"^\d+ of 8 seats taken, \d+ requests? waiting$")
        )
        await page.get_by_role("button", name="Tables").click()
        tree = await page.locator("body").aria_snapshot()
        names = (
            "Sequences of executor-0",
            "Newest steps of executor-0",
            "KV blocks of executor-0",
            "TTFT, ms",
        )
        for name in (*names, "Inter-token latency", "Throughput", "Step time", "Requests in the queue"):
            assert re.search(rf'table "{name}', tree), name
        assert re.search(r'row "\d+ \S+ (decode|prefill) \d+ \d+ \d+ of \d+ request-\d+"', tree)
        assert not complaints


async def test_four_thousand_seats_are_drawn(browser: Browser) -> None:
    async with board(full_bus(4096)) as served, opened(browser, served.url) as (page, complaints):
        await expect(page.get_by_role("slider")).to_have_attribute("aria-valuetext", re.compile("^4096 of 4,096 seats"))
        await page.get_by_role("button", name="Tables").click()
        await expect(page.get_by_role("table", name="Sequences").get_by_role("row")).to_have_count(202)
        box = await page.locator(".seats canvas").bounding_box()
        assert box is not None
        assert box["height"] < 900
        assert not complaints


async def test_names_of_clients_are_text_and_never_markup(browser: Browser) -> None:
    evil = "<img src=x onerror=document.title=1>"
    scene = scene_with([rider(0, evil)])
    scene.waiting = [rider(1, evil, seat=0)]
    async with board(scene.message()) as served, opened(browser, served.url) as (page, complaints):
        await is_live(page)
        await page.get_by_role("button", name="Tables").click()
        await expect(page.locator("#queue")).to_contain_text(evil)
        assert await page.locator("main img").count() == 0
        assert await page.title() == "inflight dashboard"
        assert not complaints


async def test_policy_keeps_foreign_code_out(browser: Browser) -> None:
    async with board(Scene().message()) as served, opened(browser, served.url) as (page, complaints):
        await is_live(page)
        assert not complaints
        await page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.inside = 1'}))"
        )
        assert await page.evaluate("window.inside") is None
        assert any("Content Security Policy" in one for one in complaints)


async def test_browsers_words_of_the_page_are_collected(browser: Browser) -> None:
    async with board(Scene().message()) as served, opened(browser, served.url) as (page, complaints):
        await page.evaluate("setTimeout(() => { throw new Error('seen') })")
        await page.wait_for_function("true")
        assert isinstance(complaints, Complaints)
        assert complaints == ["seen"]
