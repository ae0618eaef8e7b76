"""The requests of a demo round and their seats, for its displays. Pure; time is an argument.

The client API does not number seats. The board does, for display: a request that boards gets the lowest free number.
Events of different streams may arrive out of order, so a request may board before the one whose seat it takes is seen
to leave. Then the board delays the message until a seat is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from inflight.cli.demo.prompts import DemoPrompt


class RiderState(Enum):
    """State of a request."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Rider:
    """One request. Times are seconds since all were sent."""

    number: int
    prompt: DemoPrompt
    state: RiderState = RiderState.WAITING
    seat: int | None = None
    num_tokens: int = 0
    text: str = ""
    boarded_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    ending: str = ""


class Board:
    """All requests of a round, and the seats."""

    def __init__(self, prompts: Sequence[DemoPrompt], num_seats: int) -> None:
        self.riders = [Rider(number, prompt) for number, prompt in enumerate(prompts, start=1)]
        self.num_seats = num_seats
        self._free_seats = set(range(1, num_seats + 1))
        self._without_seat: list[Rider] = []

    @property
    def num_tokens(self) -> int:
        """Tokens produced so far."""
        return sum(rider.num_tokens for rider in self.riders)

    @property
    def seated(self) -> list[Rider | None]:
        """The request in each seat, by seat number."""
        by_seat = {rider.seat: rider for rider in self.riders if rider.seat is not None}
        return [by_seat.get(seat) for seat in range(1, self.num_seats + 1)]

    def board(self, rider: Rider, now_s: float) -> list[str]:
        """Records that the request boards; returns messages to show."""
        rider.state = RiderState.PREFILL
        rider.boarded_s = now_s
        self._without_seat.append(rider)
        return self._take_seats()

    def produce(self, rider: Rider, now_s: float, num_tokens: int, text: str) -> None:
        """Records output of the request."""
        if num_tokens and rider.first_token_s is None:
            rider.first_token_s = now_s
        rider.state = RiderState.DECODE
        rider.num_tokens += num_tokens
        rider.text += text

    def leave(self, rider: Rider, now_s: float, ending: str) -> list[str]:
        """Records that the request has finished; returns messages to show."""
        # The end of the one whose seat it took may be seen later than its own.
        boards = [f"#{rider.number} boards: {rider.prompt.text}"] if rider in self._without_seat else []
        news = f"#{rider.number} leaves after {rider.num_tokens} tokens ({ending})"
        return [*boards, news, *self._end(rider, now_s, RiderState.DONE, ending)]

    def fail(self, rider: Rider, now_s: float, ending: str) -> list[str]:
        """Records that the request failed; returns messages to show."""
        return [f"#{rider.number} failed: {ending}", *self._end(rider, now_s, RiderState.FAILED, ending)]

    def _end(self, rider: Rider, now_s: float, state: RiderState, ending: str) -> list[str]:
        rider.state, rider.ending, rider.ended_s = state, ending, now_s
        if rider in self._without_seat:
            self._without_seat.remove(rider)
        if rider.seat is not None:
            self._free_seats.add(rider.seat)
            rider.seat = None
        return self._take_seats()

    def _take_seats(self) -> list[str]:
        news = []
        while self._without_seat and self._free_seats:
            rider = self._without_seat.pop(0)
            rider.seat = min(self._free_seats)
            self._free_seats.remove(rider.seat)
            news.append(f"#{rider.number} boards seat {rider.seat}: {rider.prompt.text}")
        return news
