"""The report of a benchmark as JSON, Markdown and one HTML page.

A benchmark describes its report once, as a `Page` of parts with tables and charts. The Markdown is committed; the HTML
page is complete in itself and is built from the JSON by `make reports`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from inflight.bench.report.table import Table, plain

STYLE = Path(__file__).with_suffix(".css")
MAX_LINE = 160
CHARTS = "`make reports` draws the charts."


@dataclass(frozen=True, slots=True)
class Part:
    """A section of a report. `charts` is HTML, and in HTML only; `details` is folded; `found` is what follows."""

    title: str
    note: str = ""
    found: Sequence[str] = ()
    table: Table | None = None
    details: Table | None = None
    problems: Sequence[str] = ()
    charts: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A report. `last_lines` are those that the command prints for machines."""

    title: str
    circumstances: Mapping[str, str]
    parts: Sequence[Part]
    note: str = ""
    charts: str = ""
    last_lines: Sequence[str] = ()

    def markdown(self) -> str:
        has_charts = bool(self.charts) or any(part.charts for part in self.parts)
        blocks = [
            f"# {self.title}",
            self.note,
            CHARTS if has_charts else "",
            facts(self.circumstances),
            *(block for part in self.parts for block in _markdown(part)),
            "```\n" + "\n".join(self.last_lines) + "\n```" if self.last_lines else "",
        ]
        return "\n\n".join(block for block in blocks if block) + "\n"

    def html(self) -> str:
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in self.circumstances.items())
        title = escape(self.title.replace("*", ""))
        last_lines = escape("\n".join(self.last_lines))
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>inflight bench: {title}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style></head>\n"
            f'<body>\n<h1>{title}</h1>\n<p class="soft">{escape(self.note)}</p>\n'
            f"<details open><summary>circumstances</summary><dl>{facts}</dl></details>\n"
            f"{_charts(self.charts)}{''.join(_html(part) for part in self.parts)}"
            f"{f'<pre>{last_lines}</pre>' if last_lines else ''}</body></html>\n"
        )


def facts(circumstances: Mapping[str, str]) -> str:
    """Returns the circumstances as a Markdown list."""
    return "\n".join(f"- {name}: {plain(text)}" for name, text in circumstances.items())


def dump(values: Any, depth: int = 4, indent: int = 0) -> str:
    """JSON with line breaks down to a depth; what is deeper, or fits into a line, stays on one line."""
    text = json.dumps(values)
    if depth == 0 or len(text) + indent <= MAX_LINE or not isinstance(values, Mapping | list | tuple):
        return text
    pad = " " * (indent + 1)
    if isinstance(values, Mapping):
        inside = [f"{json.dumps(str(name))}: {dump(value, depth - 1, indent + 1)}" for name, value in values.items()]
        return "{\n" + ",\n".join(pad + line for line in inside) + "\n" + " " * indent + "}"
    lines = [dump(value, depth - 1, indent + 1) for value in values] if _is_nested(values) else [text[1:-1]]
    return "[\n" + ",\n".join(pad + line for line in lines) + "\n" + " " * indent + "]"


def write_report(folder: Path, name: str, values: Mapping[str, Any], page: Page) -> tuple[Path, ...]:
    """Writes `name`.json, .md and .html into a folder and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {".json": dump(values) + "\n", ".md": page.markdown(), ".html": page.html()}
    paths = []
    for suffix, text in contents.items():
        path = folder / f"{name}{suffix}"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return tuple(paths)


def _is_nested(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Mapping | list | tuple) for value in values)


def _markdown(part: Part) -> list[str]:
    details = part.details and f"<details><summary>every run</summary>\n\n{part.details.markdown()}\n\n</details>"
    return [
        f"## {part.title}",
        part.note,
        "\n".join(f"- {sentence}" for sentence in part.found),
        part.table.markdown() if part.table else "",
        details or "",
        "\n".join(f"- {plain(problem)}" for problem in part.problems),
    ]


def _html(part: Part) -> str:
    found = "".join(f"<li>{escape(sentence.replace('**', ''))}</li>" for sentence in part.found)
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in part.problems)
    return (
        f'<section><h2>{escape(part.title)}</h2><p class="soft">{escape(part.note)}</p>'
        f"{f'<ul class=found>{found}</ul>' if found else ''}{_charts(part.charts)}"
        f"{f'<div class=scroll>{part.table.html()}</div>' if part.table else ''}"
        f"{f'<ul>{problems}</ul>' if problems else ''}</section>\n"
    )


def _charts(charts: str) -> str:
    return f'<div class="charts">{charts}</div>' if charts else ""
