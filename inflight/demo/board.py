"""Who waits, who sits where and who has left: what the demo's displays show. Pure; time is an argument.

The client API does not number seats. The board does, for the eye: whoever boards takes the lowest free number. News of
one stream may overtake another's, so somebody may board before the one who made room has been seen to leave; then the
board waits with the news until it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from inflight.demo.prompts import DemoPrompt


class RiderState(Enum):
    """Where a request is."""

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
    """Every rider of a round, and the seats."""

    def __init__(self, prompts: Sequence[DemoPrompt], num_seats: int) -> None:
        self.riders = [Rider(number, prompt) for number, prompt in enumerate(prompts, start=1)]
        self.num_seats = num_seats
        self._free_seats = set(range(1, num_seats + 1))
        self._at_the_door: list[Rider] = []

    @property
    def num_tokens(self) -> int:
        """Tokens produced so far."""
        return sum(rider.num_tokens for rider in self.riders)

    @property
    def seated(self) -> list[Rider | None]:
        """Who sits in each seat, in order of its number."""
        by_seat = {rider.seat: rider for rider in self.riders if rider.seat is not None}
        return [by_seat.get(seat) for seat in range(1, self.num_seats + 1)]

    def board(self, rider: Rider, now_s: float) -> list[str]:
        """The rider has a seat; returns the news in words."""
        rider.state = RiderState.PREFILL
        rider.boarded_s = now_s
        self._at_the_door.append(rider)
        return self._take_seats()

    def produce(self, rider: Rider, now_s: float, num_tokens: int, text: str) -> None:
        """More of the rider's answer is there."""
        if num_tokens and rider.first_token_s is None:
            rider.first_token_s = now_s
        rider.state = RiderState.DECODE
        rider.num_tokens += num_tokens
        rider.text += text

    def leave(self, rider: Rider, now_s: float, ending: str) -> list[str]:
        """The rider's answer is whole; returns the news in words."""
        news = f"#{rider.number} leaves after {rider.num_tokens} tokens ({ending})"
        return [news, *self._end(rider, now_s, RiderState.DONE, ending)]

    def fail(self, rider: Rider, now_s: float, ending: str) -> list[str]:
        """The rider's request was refused or broke off; returns the news in words."""
        return [f"#{rider.number} failed: {ending}", *self._end(rider, now_s, RiderState.FAILED, ending)]

    def _end(self, rider: Rider, now_s: float, state: RiderState, ending: str) -> list[str]:
        rider.state, rider.ending, rider.ended_s = state, ending, now_s
        if rider in self._at_the_door:
            self._at_the_door.remove(rider)
        if rider.seat is not None:
            self._free_seats.add(rider.seat)
            rider.seat = None
        return self._take_seats()

    def _take_seats(self) -> list[str]:
        news = []
        while self._at_the_door and self._free_seats:
            rider = self._at_the_door.pop(0)
            rider.seat = min(self._free_seats)
            self._free_seats.remove(rider.seat)
            news.append(f"#{rider.number} boards seat {rider.seat}: {rider.prompt.text}")
        return news
