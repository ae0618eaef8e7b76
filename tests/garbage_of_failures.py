"""A plugin of pytest that collects what a failed test has left.

Warnings are errors. A failed test may leave sockets, processes and coroutines that were never awaited, and its
traceback keeps them. The garbage collector would warn of them during another test, which would then fail, too.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Generator

import pytest

# Where pytest keeps the last exception, as an interactive interpreter does.
LAST_EXCEPTION = ("last_exc", "last_type", "last_value", "last_traceback")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Collects garbage after a test that has failed. What a test leaves that has passed stays an error."""
    num_failed = item.session.testsfailed
    result = yield
    if item.session.testsfailed > num_failed:
        _collect_silently()
    return result


def _collect_silently() -> None:
    for name in LAST_EXCEPTION:
        vars(sys).pop(name, None)
    report, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    finally:
        sys.unraisablehook = report
