"""The console that commands print to."""

from __future__ import annotations

import os
import re
import sys
from typing import IO, cast

from rich.console import Console

# Without a terminal, lines are as wide as the widest table needs.
PLAIN_WIDTH = 120
BLANKS_AT_THE_END = re.compile(r"[ \t]+(?=\n)|[ \t]+\Z")


class TrimmedLines:
    """Standard output without trailing blanks, with which tables fill their lines."""

    def __init__(self) -> None:
        self._held = ""

    def write(self, text: str) -> int:
        """Writes the text; trailing blanks are held back until more of their line follows."""
        whole = self._held + text
        kept = BLANKS_AT_THE_END.sub("", whole)
        self._held = whole[len(whole.rstrip(" \t")) :]
        sys.stdout.write(kept)
        return len(text)

    def flush(self) -> None:
        """See `io.TextIOBase`."""
        sys.stdout.flush()

    def isatty(self) -> bool:
        """False: only output that does not go to a terminal is trimmed."""
        return False

    def fileno(self) -> int:
        """See `io.TextIOBase`."""
        return sys.stdout.fileno()

    @property
    def encoding(self) -> str:
        """Of standard output."""
        return sys.stdout.encoding


def console() -> Console:
    """Standard output. Text is printed as it is; it contains no markup."""
    plain = Console(markup=False, highlight=False)
    if plain.is_terminal:
        return plain
    width = None if "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(markup=False, highlight=False, width=width, file=cast(IO[str], TrimmedLines()))
