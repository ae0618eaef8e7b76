"""The start of a stack is shown line by line, and on a terminal with what is still awaited."""

from __future__ import annotations

import io

from rich.console import Console

from inflight.local.display import StackDisplay
from inflight.local.stack import Phase, Progress


def show(*, is_terminal: bool) -> str:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=100, markup=False, highlight=False)
    with StackDisplay(console) as display:
        display.show(Progress("executor-0", Phase.STARTING, 0.0, "[::1]:1"))
        display.show(Progress("router-0", Phase.STARTING, 0.1, "[::1]:2"))
        display.show(Progress("executor-0", Phase.READY, 2.5, "[::1]:1"))
        display.show(Progress("router-0", Phase.READY, 3.0, "[::1]:2"))
        display.show(Progress("router-0", Phase.STOPPING, 0.0, "[::1]:2"))
        display.show(Progress("router-0", Phase.STOPPED, 0.4, "[::1]:2"))
    return shown.getvalue()


def test_plain_output_has_a_line_per_process_that_is_ready_or_has_ended() -> None:
    assert show(is_terminal=False).splitlines() == [
        "  executor-0   ready after  2.5 s  [::1]:1",
        "  router-0     ready after  3.0 s  [::1]:2",
        "  router-0     stopped after  0.4 s",
    ]


def test_a_terminal_shows_what_is_still_awaited() -> None:
    output = show(is_terminal=True)
    assert "starting executor-0, router-0 …" in output
    assert "starting router-0 …" in output
    assert "stopping router-0 …" in output
