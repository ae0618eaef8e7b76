"""The progress of a local stack that starts or stops: a line per process, and on a terminal a spinner."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from inflight.local.stack import Phase, Progress


class StackDisplay(AbstractContextManager["StackDisplay"]):
    """Pass `show` to `LocalStack` as its `on_progress`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._awaited: list[str] = []
        self._status: Status | None = console.status("", spinner="dots") if console.is_terminal else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, progress: Progress) -> None:
        """Shows that a process reached a phase."""
        if progress.phase in (Phase.STARTING, Phase.STOPPING):
            self._awaited.append(progress.name)
        elif progress.name in self._awaited:
            self._awaited.remove(progress.name)
        if progress.phase in (Phase.READY, Phase.STOPPED):
            line = f"  {progress.name:<12} {progress.phase.value} after {progress.elapsed_s:4.1f} s"
            self._console.print(
                f"{line}  {progress.address}" if progress.phase is Phase.READY else line, highlight=False
            )
        self._show_awaited(progress.phase)

    def _show_awaited(self, phase: Phase) -> None:
        if self._status is None:
            return
        if not self._awaited:
            self._status.stop()
            return
        verb = "starting" if phase in (Phase.STARTING, Phase.READY) else "stopping"
        self._status.update(f"{verb} {', '.join(self._awaited)} …")
        self._status.start()
