"""`make docs-reference`: writes the pages that are made from the sources. A test compares them with what is
committed."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.protos import read_protos
from tools.reference.api_page import api_pages
from tools.reference.commands_page import commands_page
from tools.reference.settings_page import settings_page

DOCS = Path(__file__).parents[2] / "docs"


def pages() -> dict[str, str]:
    """Every generated page by its file's name under docs/."""
    return {
        "configuration.md": settings_page(),
        "cli.md": commands_page(),
        **api_pages([file for file in read_protos().file if file.name.startswith("inflight/v1/")]),
    }


def main() -> int:
    """Writes those that have changed, and says which."""
    for name, text in pages().items():
        path = DOCS / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
