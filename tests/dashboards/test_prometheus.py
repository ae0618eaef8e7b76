"""A real Prometheus scrapes real processes, answers every panel and loads the alerts; a script draws it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from inflight.local.ports import free_ports
from tests.dashboards.conftest import ELSEWHERE, Watched
from tests.dashboards.queries import FOLDER, REPOSITORY, panel_queries, rules
from tests.support.stack.http_pages import page

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")

CONFIGURATION = """
global: {{scrape_interval: 500ms, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: inflight
    static_configs: [{{targets: {targets}}}]
"""
WAIT_S = 120.0
NUM_DRAWINGS = 10


class Prometheus:
    """One that runs, by its HTTP API."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def query(self, expression: str) -> list[Any]:
        """The samples of now."""
        found = await self._ask("query", query=expression)
        result: list[Any] = found["result"]
        return result

    async def answered_panels(self) -> set[str]:
        """Titles of the panels with samples. Waits for `served_panels`: a rate needs two samples of a series."""
        wanted, answered = served_panels(), set[str]()
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while answered != wanted:
                    for query in panel_queries():
                        if query.where not in answered and await self.query(query.text):
                            answered.add(query.where)
                    await asyncio.sleep(0.1)
        return answered

    async def rules(self) -> set[str]:
        """Names of the rules that it evaluates."""
        groups = (await self._ask("rules"))["groups"]
        return {rule["name"] for group in groups for rule in group["rules"]}

    async def _ask(self, what: str, **asked: str) -> Any:
        _, text = await page(self.address, f"/api/v1/{what}?{urllib.parse.urlencode(asked)}")
        return json.loads(text)["data"]

    async def until(self, expression: str, is_enough: Any) -> None:
        """Waits until the samples are enough; before it serves there are none."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with suppress(OSError):
                    if is_enough(await self.query(expression)):
                        return
                await asyncio.sleep(0.1)


def served_panels() -> set[str]:
    """Titles of the panels whose metrics this system has."""
    return {query.where for query in panel_queries() if not any(name in query.text for name in ELSEWHERE)}


@asynccontextmanager
async def run_prometheus(folder: Path, targets: Sequence[str]) -> AsyncIterator[Prometheus]:
    """Prometheus with its files in `folder`."""
    (port,) = free_ports("127.0.0.1", 1)
    (folder / "prometheus.yml").write_text(
        CONFIGURATION.format(rules=FOLDER / "alerts.yaml", targets=json.dumps(list(targets)))
    )
    address = f"127.0.0.1:{port}"
    flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=.", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        process = await asyncio.create_subprocess_exec("prometheus", *flags, cwd=folder, stderr=log, stdout=log)
    try:
        yield Prometheus(address)
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.asyncio(loop_scope="session")
async def test_prometheus_answers_every_panel_and_a_script_draws_them(watched: Watched, tmp_path: Path) -> None:
    async with run_prometheus(tmp_path, watched.targets) as prometheus:
        await prometheus.until("min_over_time(up[1m])", lambda up: len(up) == len(watched.targets))
        await watched.ask()
        await prometheus.until(
            "count_over_time(up[1m])", lambda counts: all(float(one["value"][1]) >= 4 for one in counts)
        )
        assert await prometheus.answered_panels() == served_panels()
        assert await prometheus.rules() == {rule.get("alert") or rule["record"] for rule in rules()}
        picture = tmp_path / "dashboard.png"
        drawn, num_empty = "", len({query.where for query in panel_queries()} - served_panels())
        for _ in range(NUM_DRAWINGS):  # a range has points before the newest samples only
            drawn = await asyncio.to_thread(draw, prometheus.address, picture)
            if f", {num_empty} without figures" in drawn:
                break
        assert f", {num_empty} without figures" in drawn
    assert picture.read_bytes().startswith(b"\x89PNG")


def draw(address: str, picture: Path) -> str:
    """Draws the dashboard, and returns what the script prints."""
    script = REPOSITORY / "deploy" / "dashboards" / "render.py"
    flags = ["--prometheus", f"http://{address}", "--minutes", "10", "--output", str(picture)]
    drawn = subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, timeout=120)
    assert drawn.returncode == 0, drawn.stderr
    return drawn.stdout
