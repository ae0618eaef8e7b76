"""The Markdown and HTML pages of the committed reports, built from their JSON.

    python -m inflight.bench.build_reports [FOLDER …]

The pages lie beside the JSON. Git ignores the HTML.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.bench.chaos import report as chaos
from inflight.bench.comparison import pages as comparison
from inflight.bench.engine import quality
from inflight.bench.gpu import report as gpu
from inflight.bench.report.page import Page
from inflight.bench.scheduling import report as scheduling
from inflight.bench.soak import result as soak

REPORTS = Path("bench/reports")
PAGES: Mapping[str, Callable[[Mapping[str, Any]], Page]] = {
    kind.KIND: kind.page_of for kind in (chaos, comparison, gpu, quality, scheduling, soak)
}


def main(folders: Sequence[str]) -> int:
    """Writes the pages of every JSON report of the folders."""
    for folder in map(Path, folders or [str(REPORTS)]):
        for path in sorted(folder.glob("*.json")):
            values = json.loads(path.read_text(encoding="utf-8"))
            page = PAGES[values["report"]](values)
            path.with_suffix(".md").write_text(page.markdown(), encoding="utf-8")
            path.with_suffix(".html").write_text(page.html(), encoding="utf-8")
            print(path.with_suffix(".html"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
