"""Displays of a round: a live table on a terminal, otherwise a line per event."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inflight.catalogue import Capacity
from inflight.cli.demo.board import Board, Rider, RiderState

BAR_WIDTH = 24
_STYLES = {
    RiderState.WAITING: "dim",
    RiderState.PREFILL: "yellow",
    RiderState.DECODE: "green",
    RiderState.DONE: "dim cyan",
    RiderState.FAILED: "red",
}


class Display(Protocol):
    """Receives the events of a round."""

    def announce(self, news: str, now_s: float) -> None:
        """A request boarded or left."""

    def refresh(self, board: Board, capacity: Capacity, now_s: float) -> None:
        """The figures changed."""


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """A table that changes in place."""

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def announce(self, news: str, now_s: float) -> None:
        """Does nothing: the table shows it."""

    def refresh(self, board: Board, capacity: Capacity, now_s: float) -> None:
        """Draws the table."""
        view = Group(Text(self._title, style="bold"), _rider_table(board), totals_line(board, capacity, now_s))
        self._live.update(view, refresh=True)


class PlainDisplay:
    """A line per event, for logs."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._totals = ""
        console.print(title)

    def announce(self, news: str, now_s: float) -> None:
        """Prints the event, with the latest figures."""
        self._console.print(f"  {now_s:6.2f} s  {_shorten(news, 60):<60}  {self._totals}".rstrip(), soft_wrap=True)

    def refresh(self, board: Board, capacity: Capacity, now_s: float) -> None:
        """Keeps the figures for the next line."""
        self._totals = f"[{_seats_and_blocks(capacity)}]"


def totals_line(board: Board, capacity: Capacity, now_s: float) -> Text:
    """Returns the seats one by one, then the figures of all executors together."""
    seats = " ".join(f"▣ #{rider.number:<2}" if rider else "▢ ·  " for rider in board.seated)
    speed = board.num_tokens / now_s if now_s > 0 else 0.0
    figures = f"{_seats_and_blocks(capacity)} · {board.num_tokens} tokens · {speed:.0f} tokens/s"
    return Text(f"\n{seats}\n{figures}")


def _seats_and_blocks(capacity: Capacity) -> str:
    executors = capacity.executors
    seats_used, seats_total = sum(e.seats_used for e in executors), sum(e.seats_total for e in executors)
    blocks_used, blocks_total = sum(e.blocks_used for e in executors), sum(e.blocks_total for e in executors)
    return f"seats {seats_used}/{seats_total} · KV blocks {blocks_used}/{blocks_total}"


def _rider_table(board: Board) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("#", justify="right")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=36)
    table.add_column("state", min_width=8)
    table.add_column("seat", justify="right")
    table.add_column("tokens", min_width=BAR_WIDTH + 8, no_wrap=True)
    table.add_column("first token", justify="right", no_wrap=True)
    for rider in board.riders:
        table.add_row(*_rider_row(rider), style=_STYLES[rider.state])
    return table


def _rider_row(rider: Rider) -> tuple[str, ...]:
    filled = round(BAR_WIDTH * rider.num_tokens / rider.prompt.max_tokens)
    bar = f"{'━' * filled:<{BAR_WIDTH}} {rider.num_tokens:>3}/{rider.prompt.max_tokens}"
    first = "" if rider.first_token_s is None else f"{rider.first_token_s:.2f} s"
    seat = "" if rider.seat is None else str(rider.seat)
    return str(rider.number), rider.prompt.text, rider.state.value, seat, bar, first


def _shorten(text: str, max_characters: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"
