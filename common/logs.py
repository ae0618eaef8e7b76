"""How processes log: one line per event on standard error. Prompts, outputs and keys are never logged."""

from __future__ import annotations

import logging
import sys


def start_logging(process: str, level: str) -> None:
    """Configures the root logger of this process. `level` is a name of `logging`, any case."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s",
    )
