"""One round of the demo: all prompts at once against one stack, until the last request has finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.aio import AsyncClient
from inflight.cli.demo.board import Board, Rider, RiderState
from inflight.cli.demo.display import Display
from inflight.cli.demo.prompts import DemoPrompt
from inflight.errors import InflightError
from inflight.events import Delta, Finished, Started

REFRESH_INTERVAL_S = 0.2
WARM_UP_TOKENS = 4

# Far longer than any request of the demo: a stream that hangs must not hang the demo.
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Round:
    """The result of a round. `total_s` is from sending the prompts to the end of the last answer."""

    riders: tuple[Rider, ...]
    total_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens produced."""
        return sum(rider.num_tokens for rider in self.riders)

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens produced per second of the round."""
        return self.num_tokens / self.total_s

    @property
    def first_token_times_s(self) -> list[float]:
        """From sending to the first token, shortest first."""
        return sorted(rider.first_token_s for rider in self.riders if rider.first_token_s is not None)

    @property
    def failures(self) -> list[Rider]:
        """Requests that failed."""
        return [rider for rider in self.riders if rider.state is not RiderState.DONE]


class RoundRunner:
    """Sends the prompts and keeps board and display up to date."""

    def __init__(self, client: AsyncClient, board: Board, display: Display) -> None:
        self._client = client
        self._board = board
        self._display = display
        self._began_s = 0.0

    async def run(self) -> Round:
        """Sends every prompt, one right after the other, and returns when the last answer is complete."""
        await self._client.complete(chat="Hello", temperature=0, max_tokens=WARM_UP_TOKENS, timeout=REQUEST_TIMEOUT_S)
        self._began_s = time.monotonic()
        all_left = asyncio.Event()
        async with asyncio.TaskGroup() as watching:
            watching.create_task(self._watch(all_left))
            try:
                async with asyncio.TaskGroup() as riding:
                    for rider in self._board.riders:
                        in_line = asyncio.Event()
                        riding.create_task(self._ride(rider, in_line))
                        await in_line.wait()  # so that the queue has the same order in every round
                total_s = self._now_s()
            finally:
                all_left.set()
        return Round(tuple(self._board.riders), total_s)

    async def _ride(self, rider: Rider, in_line: asyncio.Event) -> None:
        """Follows one request to its end. `in_line` is set once the router has accepted or refused it."""
        board, prompt = self._board, rider.prompt
        stream = self._client.generate(
            chat=prompt.chat,
            temperature=0,
            max_tokens=prompt.max_tokens,
            ignore_eos=prompt.ignore_eos,
            want_queue_events=True,
            timeout=REQUEST_TIMEOUT_S,
        )
        ending = "the stream ended early"
        try:
            async for event in stream.events():
                in_line.set()
                match event:
                    case Started():
                        self._announce(board.board(rider, self._now_s()))
                    case Delta():
                        board.produce(rider, self._now_s(), event.num_tokens, event.text)
                    case Finished():
                        ending = event.reason.value.replace("_", " ")
        except InflightError as error:
            self._announce(board.fail(rider, self._now_s(), str(error)))
            return
        finally:
            in_line.set()
        self._announce(board.leave(rider, self._now_s(), ending))

    async def _watch(self, all_left: asyncio.Event) -> None:
        """Refreshes the display until all requests have finished, and once after that."""
        while True:
            try:
                capacity = await self._client.capacity(timeout=REFRESH_INTERVAL_S * 5)
                self._display.refresh(self._board, capacity, self._now_s())
            except InflightError:
                pass  # the streams report the error
            if all_left.is_set():
                return
            try:
                async with asyncio.timeout(REFRESH_INTERVAL_S):
                    await all_left.wait()
            except TimeoutError:
                continue

    def _announce(self, news: list[str]) -> None:
        for line in news:
            self._display.announce(line, self._now_s())

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s


async def run_round(client: AsyncClient, prompts: Sequence[DemoPrompt], num_seats: int, display: Display) -> Round:
    """One round with these prompts; a short request before it warms the executor up."""
    return await RoundRunner(client, Board(prompts, num_seats), display).run()
