"""Keeps transformers from writing progress bars and advice to the executor's terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within it only errors are logged and no progress is shown; what was set before is put back."""
    verbosity, progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if progress_bar:
            logging.enable_progress_bar()
