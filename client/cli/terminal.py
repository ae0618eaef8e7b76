"""The console that commands print to."""

from __future__ import annotations

import os

from rich.console import Console

# Where nobody looks at a window, lines are as wide as the tables are meant to be.
PLAIN_WIDTH = 120


def console() -> Console:
    """Standard output. What is printed is text: nothing in it is taken for markup."""
    plain = Console(markup=False, highlight=False)
    if plain.is_terminal or "COLUMNS" in os.environ:
        return plain
    return Console(markup=False, highlight=False, width=PLAIN_WIDTH)
