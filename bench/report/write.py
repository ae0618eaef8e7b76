"""Puts a report on disk: JSON with everything, Markdown, and one HTML page with charts."""

from __future__ import annotations

from pathlib import Path

from bench.report.as_json import dump, to_json
from bench.report.markdown import to_markdown
from bench.report.page import to_html
from bench.report.report import Report


def write_report(report: Report, folder: Path, name: str, json_path: Path | None = None) -> tuple[Path, ...]:
    """Writes `name`.json, .md and .html into a folder, the JSON to `json_path` too, and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{name}.html"
    contents = {
        folder / f"{name}.json": dump(to_json(report)),
        folder / f"{name}.md": to_markdown(report, page=page.name),
        page: to_html(report),
    }
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        contents[json_path] = contents[folder / f"{name}.json"]
    for path, text in contents.items():
        path.write_text(text, encoding="utf-8")
    return tuple(contents)
