"""The report of a benchmark as JSON and as a Markdown page of parts with tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.bench.report.table import Table, plain

MAX_LINE = 160


@dataclass(frozen=True, slots=True)
class Part:
    """A section of a report. `details` is folded; `found` is what follows."""

    title: str
    note: str = ""
    found: Sequence[str] = ()
    table: Table | None = None
    details: Table | None = None
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A report. `last_lines` are those that the command prints for machines."""

    title: str
    circumstances: Mapping[str, str]
    parts: Sequence[Part]
    note: str = ""
    last_lines: Sequence[str] = ()

    def markdown(self) -> str:
        blocks = [
            f"# {self.title}",
            self.note,
            facts(self.circumstances),
            *(block for part in self.parts for block in _markdown(part)),
            "```\n" + "\n".join(self.last_lines) + "\n```" if self.last_lines else "",
        ]
        return "\n\n".join(block for block in blocks if block) + "\n"


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
    """Writes `name`.json and .md into a folder and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {".json": dump(values) + "\n", ".md": page.markdown()}
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
