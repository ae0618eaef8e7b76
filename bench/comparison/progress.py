"""The progress of a benchmark: a bar for the current run on a terminal, and a line for each finished one."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from inflight.bench.measures.run import Run
from inflight.bench.workloads.plan import Workload

# Every picture costs processor time on the cores that are measured.
REFRESH_PER_S = 2


class Progress:
    """Shows one run at a time."""

    def __init__(self, console: Console, num_runs: int) -> None:
        self._console = console
        self._num_runs = num_runs
        self._num_done = 0
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=REFRESH_PER_S,
            disable=not console.is_terminal,
            transient=True,
        )
        self._bar = self._bars.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def begin(self, workload: Workload, mode: str) -> None:
        description = escape(f"{self._num_done + 1}/{self._num_runs} {workload.name} {mode}")
        self._bars.reset(self._bar, description=description, total=workload.output_tokens, visible=True)

    def advance(self, num_tokens: int) -> None:
        self._bars.advance(self._bar, num_tokens)

    def end(self, workload: Workload, run: Run) -> None:
        self._num_done += 1
        self.say(run_line(workload, run))


def run_line(workload: Workload, run: Run) -> str:
    """Describes a finished run in one line."""
    measures = run.measures
    seats = "" if measures.mean_seats is None else f", {measures.mean_seats:.1f} seats in use"
    failed = f", {measures.num_failed} failed: {run.errors[0]}" if measures.num_failed else ""
    return (
        f"{workload.name} round {run.round} {run.mode}: {measures.num_requests} requests in {measures.total_s:.1f} s, "
        f"{measures.output_tokens_per_s:.1f} output tokens/s{seats}{failed}"
    )
