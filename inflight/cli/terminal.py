"""The console that commands print to."""

from __future__ import annotations

import os
import re
import sys
from typing import IO, cast

from rich.console import Console

# Where nobody looks at a window, lines are as wide as the tables are meant to be.
PLAIN_WIDTH = 120
BLANKS_AT_THE_END = re.compile(r"[ \t]+(?=\n)|[ \t]+\Z")


class TrimmedLines:
    """Standard output without blanks at the ends of lines, which tables fill up to their width."""

    def __init__(self) -> None:
        self._held = ""

    def write(self, text: str) -> int:
        """Blanks at the end are held back until it is known whether something follows on their line."""
        whole = self._held + text
        kept = BLANKS_AT_THE_END.sub("", whole)
        self._held = whole[len(whole.rstrip(" \t")) :]
        sys.stdout.write(kept)
        return len(text)

    def flush(self) -> None:
        """See `io.TextIOBase`."""
        sys.stdout.flush()

    def isatty(self) -> bool:
        """Only what is not shown in a terminal is trimmed."""
        return False

    def fileno(self) -> int:
        """See `io.TextIOBase`."""
        return sys.stdout.fileno()

    @property
    def encoding(self) -> str:
        """Of standard output."""
        return sys.stdout.encoding


def console() -> Console:
    """Standard output. What is printed is text: nothing in it is taken for markup."""
    plain = Console(markup=False, highlight=False)
    if plain.is_terminal:
        return plain
    width = None if "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(markup=False, highlight=False, width=width, file=cast(IO[str], TrimmedLines()))
