"""The demo: who sits where, what is shown of it, and what is said at the end."""

from __future__ import annotations

import io
import math
import threading
from typing import Any

import grpc
import pytest
from rich.console import Console

from inflight import AsyncClient
from inflight.catalogue import Capacity, decode_capacity
from inflight.cli.demo.board import Board, RiderState
from inflight.cli.demo.display import LiveDisplay, PlainDisplay
from inflight.cli.demo.prompts import CHECKED_PROMPT, DEMO_PROMPTS, DemoPrompt
from inflight.cli.demo.round import Round, run_round
from inflight.cli.demo.summary import answers_table, comparison_table, names_the_capital, quantile
from inflight.common.errors import Reason, RequestError
from inflight.v1 import inference_pb2
from tests.unit.scripted_router import ScriptedRouter, accepted, delta, ending, serving, started

PROMPTS = tuple(DemoPrompt(f"question {number}", 10) for number in range(1, 5))


def board(num_seats: int = 2) -> Board:
    return Board(PROMPTS, num_seats)


def seats(here: Board) -> list[int | None]:
    """Returns the number of the passenger in each seat."""
    return [None if rider is None else rider.number for rider in here.seated]


def capacity(seats_used: int = 1) -> Capacity:
    executor = inference_pb2.ExecutorCapacity(seats_used=seats_used, seats_total=2, blocks_used=3, blocks_total=64)
    return decode_capacity(inference_pb2.GetCapacityResponse(executors=[executor]))


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120, markup=False, highlight=False)


def text_of(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


# --- the board


def test_sequence_that_boards_takes_the_lowest_free_seat() -> None:
    riders = (here := board()).riders
    assert here.board(riders[0], 0.1) == ["#1 boards seat 1: question 1"]
    here.board(riders[1], 0.1)
    assert seats(here) == [1, 2]
    here.leave(riders[0], 0.5, "length")
    assert seats(here) == [None, 2]
    assert here.board(riders[2], 0.6) == ["#3 boards seat 1: question 3"]


def test_a_rider_seen_boarding_before_another_is_seen_leaving_gets_that_ones_seat() -> None:
    riders = (here := board()).riders
    for rider in riders[:2]:
        here.board(rider, 0.1)
    assert here.board(riders[2], 0.1) == []
    assert seats(here) == [1, 2]
    news = here.leave(riders[1], 0.2, "length")
    assert news == ["#2 leaves after 0 tokens (length)", "#3 boards seat 2: question 3"]
    assert seats(here) == [1, 3]
    here.leave(riders[2], 0.3, "length")
    here.leave(riders[0], 0.3, "length")
    assert seats(here) == [None, None]


def test_a_rider_that_ends_without_a_seat_takes_none_with_it() -> None:
    riders = (here := board(num_seats=1)).riders
    here.board(riders[0], 0.1)
    here.board(riders[1], 0.1)
    here.fail(riders[1], 0.2, "gone")
    here.leave(riders[0], 0.3, "length")
    assert seats(here) == [None]


def test_a_rider_goes_from_waiting_through_prefill_and_decode_to_done() -> None:
    rider = (here := board()).riders[0]
    states: list[RiderState] = [rider.state]
    here.board(rider, 0.1)
    states.append(rider.state)
    here.produce(rider, 0.2, 1, "a")
    here.produce(rider, 0.3, 2, "bc")
    states.append(rider.state)
    here.leave(rider, 0.4, "length")
    states.append(rider.state)
    assert states == [RiderState.WAITING, RiderState.PREFILL, RiderState.DECODE, RiderState.DONE]
    assert (rider.boarded_s, rider.first_token_s, rider.ended_s) == (0.1, 0.2, 0.4)
    assert (rider.text, here.num_tokens) == ("abc", 3)


# --- the displays


def test_the_plain_display_writes_a_line_per_event_with_the_latest_figures() -> None:
    shown = console(is_terminal=False)
    display = PlainDisplay(shown, "title")
    display.announce("#1 boards seat 1: question", 0.25)
    display.refresh(board(), capacity(), 0.3)
    display.announce("#1 leaves after 3 tokens (length)", 0.5)
    title, first, second = text_of(shown).splitlines()
    assert title == "title"
    assert first.strip() == "0.25 s  #1 boards seat 1: question"
    assert second.endswith("[seats 1/2 · KV blocks 3/64]")


def test_the_live_display_shows_every_rider_and_the_totals() -> None:
    shown = console(is_terminal=True)
    here = board()
    here.board(here.riders[0], 0.1)
    here.produce(here.riders[0], 0.2, 5, "abc")
    with LiveDisplay(shown, "title") as display:
        display.refresh(here, capacity(), 0.5)
    output = text_of(shown)
    assert all(prompt.text in output for prompt in PROMPTS)
    assert all(part in output for part in ("decode", "waiting", "5/10", "seats 1/2", "KV blocks 3/64", "10 tokens/s"))
    assert "▣ #1" in output


def test_request_whose_end_is_seen_before_that_of_the_one_in_its_seat_boards_first() -> None:
    here = Board(PROMPTS[:3], 2)
    for rider in here.riders[:2]:
        here.board(rider, 0.0)
    assert here.board(here.riders[2], 0.1) == []
    boards, leaves = here.leave(here.riders[2], 0.2, "length")
    assert boards == f"#3 boards: {PROMPTS[2].text}"
    assert leaves.startswith("#3 leaves")


# --- a round


class Answering(ScriptedRouter):
    """Answers every prompt with as many tokens as were asked for, `num_seats` requests at a time."""

    def __init__(self, num_seats: int) -> None:
        self.seats = threading.BoundedSemaphore(num_seats)
        super().__init__(self.answer)
        self.capacity = inference_pb2.GetCapacityResponse(
            executors=[inference_pb2.ExecutorCapacity(seats_total=num_seats, blocks_total=64)]
        )

    def answer(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Any:
        if request.chat.messages[-1].content[0].text == "refuse":
            raise RequestError(Reason.QUEUE_FULL, "too many wait")
        if request.want_queue_events:
            yield inference_pb2.StreamEvent(queued=inference_pb2.Queued(position=1))
        with self.seats:
            yield accepted()
            yield started()
            for offset in range(request.stopping.max_tokens):
                yield delta("Paris ", offset)
        yield from ending(request.stopping.max_tokens)


async def test_a_round_asks_in_order_brings_every_answer_and_tells_of_everybody() -> None:
    shown = console(is_terminal=False)
    router = Answering(num_seats=2)
    with serving(router) as address:
        async with AsyncClient(address) as client:
            finished = await run_round(client, PROMPTS, 2, PlainDisplay(shown, "title"))
    assert [rider.state for rider in finished.riders] == [RiderState.DONE] * 4
    assert finished.num_tokens == 40
    assert finished.failures == []
    assert len(finished.first_token_times_s) == 4
    warm_up, *asked = [router.requests.get().chat.messages[-1].content[0].text for _ in range(5)]
    assert warm_up not in asked
    assert asked == [prompt.text for prompt in PROMPTS]
    lines = text_of(shown)
    assert all(f"#{number} boards" in lines and f"#{number} leaves after 10 tokens" in lines for number in range(1, 5))


async def test_one_refused_request_fails_alone() -> None:
    prompts = (PROMPTS[0], DemoPrompt("refuse", 5), PROMPTS[1])
    with serving(Answering(num_seats=3)) as address:
        async with AsyncClient(address) as client:
            finished = await run_round(client, prompts, 3, PlainDisplay(console(is_terminal=False), "title"))
    assert [rider.number for rider in finished.failures] == [2]
    assert "too many wait" in finished.failures[0].ending


# --- the end


def finished_round(total_s: float, texts: tuple[str, ...] = ("It is Paris.",)) -> Round:
    here = Board(tuple(DemoPrompt(CHECKED_PROMPT, 10) for _ in texts), 2)
    for index, (rider, text) in enumerate(zip(here.riders, texts, strict=True)):
        here.board(rider, 0.0)
        here.produce(rider, 0.5 * (index + 1), 10, text)
        here.leave(rider, total_s, "length")
    return Round(tuple(here.riders), total_s)


def test_the_capital_is_checked_whatever_its_case() -> None:
    assert names_the_capital(finished_round(1.0, ("PARIS!",)))
    assert not names_the_capital(finished_round(1.0, ("London",)))
    assert not names_the_capital(Round((), 1.0))


def test_quantiles_are_nearest_rank() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 0.0)) == (2.0, 4.0, 1.0)
    assert math.isnan(quantile([], 0.5))


def test_the_comparison_says_how_many_times_better() -> None:
    shown = console(is_terminal=False)
    shown.print(comparison_table(inflight=finished_round(2.0), static=finished_round(5.0)))
    rows = {line[:24].strip(): line.split()[-2:] for line in text_of(shown).splitlines()}
    assert rows["output tokens/s"] == ["2.50", "×"]
    assert rows["total time"] == ["2.50", "×"]


def test_the_answers_are_shown_shortened() -> None:
    shown = console(is_terminal=False)
    shown.print(answers_table(finished_round(1.0, ("Paris " * 100,))))
    assert "…" in text_of(shown)
    assert len(text_of(shown).splitlines()) == 2


def test_the_demo_asks_a_dozen_things_of_very_different_length_once() -> None:
    assert len(DEMO_PROMPTS) == 12
    lengths = [prompt.max_tokens for prompt in DEMO_PROMPTS]
    assert max(lengths) / min(lengths) >= 20
    assert sum(prompt.text == CHECKED_PROMPT for prompt in DEMO_PROMPTS) == 1


@pytest.mark.parametrize("num_alone", [0, 1])
def test_each_static_batch_of_the_demo_has_one_long_answer(num_alone: int) -> None:
    num_seats = 4
    lengths = [prompt.max_tokens for prompt in DEMO_PROMPTS][num_alone:]
    batches = [lengths[start : start + num_seats] for start in range(0, len(lengths), num_seats)]
    assert all(max(batch) >= 2 * sorted(batch)[-2] for batch in batches)
    assert sum(map(max, batches)) > 2 * sum(lengths) / num_seats
