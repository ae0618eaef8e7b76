"""Layout of the board's page, measured in a real browser: labels, bars, and many executors with many seats."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from inflight.router.dashboard.history import MODEL_FIELDS, ModelSample, row_of
from inflight.router.dashboard.watching import MAX_TIMELINES, Watching
from inflight.router.telemetry.events import RequestFacts
from tests.integration.test_board_page import board, is_live
from tests.support.board.browser import CHROMIUM, NO_CHROMIUM, PATIENCE_MS, chromium, opened
from tests.support.board.scenes import Scene, full_fleet, scene_with_little_kv, watching_of

expect.set_options(timeout=PATIENCE_MS)

pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_CHROMIUM),
    pytest.mark.asyncio(loop_scope="module"),
]

DESKTOP: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
# Labels of an axis that take more lines than one, or stand out of their chart.
BROKEN_LABELS = """[...document.querySelectorAll(".plot .y, .plot .x")].filter((one) => {
    if (!one.checkVisibility()) return false;
    const range = document.createRange();
    range.selectNodeContents(one);
    const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
    const text = range.getBoundingClientRect();
    const card = one.closest(".chart").getBoundingClientRect();
    return lines.size > 1 || text.left < card.left || text.right > card.right;
}).map((one) => one.textContent)"""
# Parts of the page that lie on one another, by their selectors.
OVERLAPS = """(selector) => {
    const boxes = [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility())
        .map((one) => [one.id || one.className, one.getBoundingClientRect()]);
    return boxes.flatMap(([a, one], at) => boxes.slice(at + 1).filter(([, other]) =>
        one.left < other.right - 1 && other.left < one.right - 1 &&
        one.top < other.bottom - 1 && other.top < one.bottom - 1
    ).map(([b]) => `${a} on ${b}`));
}"""
MAX_ELEMENTS = 6000
TITLES = (
    "Running and waiting",
    "TTFT",
    "Inter-token latency",
    "Throughput",
    "KV cache",
    "Prefix cache hits",
    "Step time",
    "Ended",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


async def test_labels_of_axes_keep_to_one_line_however_large_the_figures_are(browser: Browser) -> None:
    scene = full_fleet(20, 256)
    for screen in (DESKTOP, PHONE):
        async with (
            board(scene.message(), watching=watching_of(scene)) as served,
            opened(browser, served.url, **screen) as (page, complaints),
        ):
            await is_live(page)
            await expect(page.locator(".plot .y").first).to_have_text("0")
            await expect(page.locator(".plot .y").filter(has_text="K").first).to_be_visible()
            assert await page.evaluate(BROKEN_LABELS) == []
            # In any font
            await page.evaluate("document.body.style.fontFamily = 'DejaVu Sans Mono, monospace'")
            assert await page.evaluate(BROKEN_LABELS) == []
            assert not complaints


async def test_charts_are_filled_when_the_page_is_opened(browser: Browser) -> None:
    scene = Scene(2, 16)
    scene.run(40)
    async with (
        board(scene.message(), watching=watching_of(scene)) as served,
        opened(browser, served.url, **DESKTOP) as (page, complaints),
    ):
        await is_live(page)
        for title in TITLES:
            chart = page.get_by_role("img", name=re.compile(rf"^{title}, .*Now: .* \d"))
            await expect(chart).to_be_visible()
            # From the left end, fifteen minutes ago, to the right
            reach = await chart.evaluate(
                "(chart) => { const box = chart.querySelector('g').getBBox(); return [box.x, box.x + box.width]; }"
            )
            assert reach[0] < 30, title
            assert reach[1] > 970, title
        await expect(page.locator(".nothing:visible")).to_have_count(0)
        assert not complaints


async def test_range_of_the_charts_can_be_chosen(browser: Browser) -> None:
    scene = Scene(1)
    async with (
        board(scene.message(), watching=watching_of(scene)) as served,
        opened(browser, served.url, **DESKTOP) as (page, complaints),
    ):
        await page.get_by_label("Last").select_option("2 min")
        await expect(page.locator(".plot .x").first).to_have_text("−2 min")
        assert not complaints


async def test_step_time_shows_device_and_exposed_host_on_a_scale_that_both_are_read_on(browser: Browser) -> None:
    scene = Scene(1)
    async with (
        board(scene.message(), watching=watching_of(scene)) as served,
        opened(browser, served.url, **DESKTOP) as (page, complaints),
    ):
        chart = page.get_by_role(
            "img", name=re.compile(r"^Step time, ms, log scale. Now: device \d+.*exposed host 0\.")
        )
        await expect(chart).to_be_visible()
        # A fiftieth of the device's time is not at the bottom of the chart
        height = await chart.evaluate(
            "(chart) => { const box = chart.querySelectorAll('.line')[1].getBBox(); return 100 - box.y - box.height; }"
        )
        assert height > 10
        assert not complaints


async def test_gap_of_the_history_is_left_open(browser: Browser) -> None:
    scene, watching = Scene(1), Watching()
    figures = row_of(MODEL_FIELDS, {"running": 3.0, "waiting": 1.0})
    for age_s in (600, 595, 590, 30, 25, 20):
        watching.history.add(watching.clock() - age_s, 5.0, {scene.buses[0].model: ModelSample(figures)})
    async with (
        board(scene.message(), watching=watching) as served,
        opened(browser, served.url, **DESKTOP) as (page, complaints),
    ):
        line = page.get_by_role("img", name=re.compile("^Running and waiting")).locator(".line").first
        await expect(line).to_have_attribute("d", re.compile("^M[^M]*L[^M]*L[^M]*M[^M]*L[^M]*L[^M]*$"))
        assert not complaints


async def test_kv_in_use_is_readable_where_it_is_a_thousandth_of_the_pool(browser: Browser) -> None:
    async with (
        board(scene_with_little_kv().message()) as served,
        opened(browser, served.url, **DESKTOP) as (page, complaints),
    ):
        await is_live(page)
        await open_first(page)
        strip = page.get_by_role("img", name="KV blocks of executor-0")
        width = await strip.evaluate(
            "(strip) => [...strip.querySelectorAll('[data-part=used]')]"
            ".reduce((all, one) => all + one.getBoundingClientRect().width, 0)"
        )
        assert width >= 24
        await expect(page.locator(".bus").first).to_contain_text(re.compile(r"12 in use of 12,070"))
        assert not complaints


async def test_events_are_listed_newest_first(browser: Browser) -> None:
    scene = Scene(2, 16)
    watching = watching_of(scene)
    async with board(scene.message(), watching=watching) as served, opened(browser, served.url) as (page, complaints):
        lines = page.get_by_role("list", name="Events").get_by_role("listitem")
        await expect(lines).to_have_text(
            [
                re.compile("executor-0 preempted 4 sequences"),
                re.compile("executor-1 is back"),
                re.compile("executor-1 lost, 6 requests moved"),
                re.compile("the admission file was reloaded"),
                re.compile("executor-1 joined"),
                re.compile("executor-0 joined"),
            ]
        )
        # When another comes
        watching.events.executor_lost("executor-0", scene.buses[0].model, 2)
        served.source.show(scene.message())
        await expect(lines.first).to_have_text(re.compile(r"\d\d:\d\d:\d\d.*executor-0 lost, 2 requests moved"))
        assert not complaints


async def test_request_shows_its_timeline_from_its_row_and_from_its_seat(browser: Browser) -> None:
    scene = Scene(1, 8)
    scene.run(12)
    watching = watching_of(scene)
    async with board(scene.message(), watching=watching) as served, opened(browser, served.url) as (page, complaints):
        await is_live(page)
        dialog = page.get_by_role("dialog")
        # From a row, by the keyboard
        await page.get_by_label("Find").fill("request-905")
        await page.get_by_role("button", name="request-905").press("Enter")
        await expect(dialog.get_by_role("heading")).to_have_text("request-905")
        stages = dialog.get_by_role("rowheader")
        await expect(stages.first).to_have_text("Queued")
        await expect(stages.last).to_have_text(re.compile("^Ended: "))
        await expect(dialog).to_contain_text("moved: executor lost")
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        # From a seat
        seats = page.get_by_role("slider")
        await seats.focus()
        await page.keyboard.press("Enter")
        rider = next(one for one in scene.buses[0].riders if one.seat == 0)
        await expect(dialog.get_by_role("heading")).to_have_text(f"request-{rider.number}")
        await expect(stages).not_to_have_count(0)
        assert not complaints


async def test_request_that_is_not_among_the_recent_is_looked_up(browser: Browser) -> None:
    scene = Scene(1, 8)
    scene.run(12)
    rider = next(one for one in scene.buses[0].riders if one.seat == 0)
    watching = Watching()
    facts = RequestFacts(scene.buses[0].model, request_id=f"request-{rider.number}", tenant=rider.tenant)
    watching.requests.follow(facts).admitted()
    for number in range(MAX_TIMELINES):
        watching.requests.follow(RequestFacts("other", request_id=f"later-{number}", tenant="acme")).admitted()
    async with board(scene.message(), watching=watching) as served, opened(browser, served.url) as (page, complaints):
        await is_live(page)
        for seat, says in ((0, "Queued"), (1, "Another router serves it")):
            await page.get_by_role("slider").focus()
            await page.keyboard.press("Home")
            for _ in range(seat):
                await page.keyboard.press("ArrowDown")
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("dialog")).to_contain_text(says)
            await page.keyboard.press("Escape")
        assert set(complaints) <= {"Failed to load resource: the server responded with a status of 404 (Not Found)"}


async def open_first(page: Page) -> None:
    """Shows the first executor's details, where they are not shown already."""
    button = page.locator(".bus").first.get_by_role("button", name="Details")
    if await button.get_attribute("aria-expanded") != "true":
        await button.click()


async def test_twenty_executors_of_256_seats_fit_the_page(browser: Browser) -> None:
    scene = full_fleet(20, 256)
    message, watching = scene.message(), watching_of(scene)
    for screen in (DESKTOP, {"viewport": {"width": 1920, "height": 1080}}, PHONE):
        async with (
            board(message, watching=watching) as served,
            opened(browser, served.url, **screen) as (page, complaints),
        ):
            await is_live(page)
            await expect(page.locator(".bus")).to_have_count(20)
            width = screen["viewport"]["width"]
            assert await page.evaluate("document.documentElement.scrollWidth") == width
            assert await page.evaluate("document.querySelectorAll('*').length") < MAX_ELEMENTS
            assert await page.evaluate(OVERLAPS, ".bus, .chart, .figures > div") == []
            height = await page.evaluate("document.querySelector('#buses').getBoundingClientRect().height")
            assert height < (9000 if screen is PHONE else 2600)
            assert not complaints


async def test_totals_and_charts_are_above_the_fold(browser: Browser) -> None:
    async with (
        board(full_fleet(20, 256).message()) as served,
        opened(browser, served.url, **DESKTOP) as (page, complaints),
    ):
        await is_live(page)
        bottoms = await page.evaluate(
            "[...document.querySelectorAll('.chart')].slice(0, 6).map((one) => one.getBoundingClientRect().bottom)"
        )
        assert len(bottoms) == 6
        assert max(bottoms) <= 900
        assert not complaints
