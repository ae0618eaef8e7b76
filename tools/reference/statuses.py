"""The statuses that each RPC may end with, as docs/statuses.md promises them."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "statuses.md"
NO_REASON = "–"
COMMON = "Every RPC"

Statuses = dict[str, set[tuple[str, str]]]


def documented() -> Statuses:
    """By section, the pairs of status and reason."""
    statuses: Statuses = defaultdict(set)
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
            statuses[section] = set()
        elif row := re.match(r"\| ([A-Z_]+) \| ([A-Z_]+|–) \|", line):
            statuses[section].add((row[1], row[2]))
    return statuses
