"""`inflight top` and `inflight stats`: what is drawn, what keys do, and that a terminal is left as it was."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from inflight.cli.main import main
from inflight.cli.top.main import as_svg
from inflight.cli.top.screen import ESCAPE, LEAVE, SORT, Screen
from inflight.cli.top.view import render
from inflight.v1 import inference_pb2, stats_pb2, types_pb2
from tests.support.stack.pseudo_terminal import CTRL_C, at_terminal
from tests.unit.scripted_router import ScriptedRouter, asked

DECODE, PREFILL = stats_pb2.SEQUENCE_PHASE_DECODE, stats_pb2.SEQUENCE_PHASE_PREFILL
DOWN, UP = "\x1b[B", "\x1b[A"
ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"


def executor(
    name: str, *seats: tuple[int, stats_pb2.SequencePhase], num_steps: int = 0, tokens_per_s: float = 0, total: int = 8
) -> inference_pb2.ExecutorStats:
    """An executor of 64 blocks with these seats taken."""
    capacity = inference_pb2.ExecutorCapacity(
        executor_id=name,
        model="smol",
        accepting=True,
        seats_total=total,
        seats_used=len(seats),
        num_waiting=2,
        blocks_total=64,
        blocks_used=16,
        blocks_reserved=32,
        blocks_cached=8,
        output_tokens_per_s=tokens_per_s,
        step_ms=12.5,
        num_steps=num_steps,
        constraint=types_pb2.STEP_CONSTRAINT_BLOCKS,
    )
    sequences = [
        stats_pb2.SequenceStats(seat=seat, phase=phase, tenant="acme", request_id=f"r{seat}", num_blocks=3)
        for seat, phase in seats
    ]
    step = stats_pb2.IterationStats(iter=num_steps, iter_latency_ms=12.5, parts=[stats_pb2.StepPart(name="plan", ms=1)])
    return inference_pb2.ExecutorStats(capacity=capacity, iterations=[step], sequences=sequences)


def message(*executors: inference_pb2.ExecutorStats, timestamp_ms: int = 1_000) -> inference_pb2.GetStatsResponse:
    queue = inference_pb2.TenantQueue(
        model="smol", tenant="acme", priority=types_pb2.PRIORITY_CLASS_BATCH, num_requests=5, num_tokens=900,
        longest_wait_ms=2500,
    )  # fmt: skip
    latency = inference_pb2.ModelLatency(model="smol", num_ended=12, output_tokens_per_s=420, ttft_p50_ms=80)
    return inference_pb2.GetStatsResponse(
        router_id="router-0", timestamp_ms=timestamp_ms, executors=executors, queues=[queue], latencies=[latency]
    )


def drawn(screen: Screen, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(render(screen, width))
    return captured.get()


def line_of(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(label))


# --- drawing


def test_every_seat_is_a_cell_that_shows_what_it_does() -> None:
    shown = drawn(Screen.of(message(executor("e0", (0, DECODE), (1, DECODE), (3, PREFILL)))))
    assert line_of(shown, "seats ") == "  seats ■ ■ □ ◧ □ □ □ □"
    assert "seats 3/8 + 2 standby" in shown
    assert "bound by blocks" in shown


def test_seats_are_filled_from_the_left_where_their_numbers_are_not_known() -> None:
    told = executor("e0", (5, DECODE), (6, DECODE))
    del told.sequences[:]
    assert line_of(drawn(Screen.of(message(told))), "seats ") == "  seats ■ ■ □ □ □ □ □ □"


def test_executor_that_stands_still_has_no_speed_and_steps_and_tokens_are_of_one_window() -> None:
    # Given messages a second apart in which its counter of steps stands still
    before, now = executor("e0", num_steps=9, tokens_per_s=163), executor("e0", num_steps=9, tokens_per_s=163)
    now.capacity.steps_per_s = 20
    shown = drawn(Screen.of(message(before)).shows(message(now, timestamp_ms=2_000)))
    assert "20 steps/s  163 tokens/s  step 12.5 ms" in shown

    now.capacity.steps_per_s = now.capacity.output_tokens_per_s = 0
    shown = drawn(Screen.of(message(before)).shows(message(now, timestamp_ms=2_000)))
    assert "0 steps/s  0 tokens/s  step - ms" in shown


def test_executor_that_drafts_shows_the_tokens_of_a_draft() -> None:
    plain, drafting = executor("e0"), executor("e0")
    drafts = drafting.capacity.drafts
    drafts.num_drafts, drafts.num_verified, drafts.num_accepted = 10, 60, 25

    assert "tokens/draft" not in drawn(Screen.of(message(plain)))
    shown = drawn(Screen.of(message(drafting)))
    assert "3.5 tokens/draft" in shown
    selected = drawn(Screen.of(message(drafting)).pressed(DOWN))
    assert "25 of 60 drafted tokens accepted, in 10 drafts" in selected


def test_prefixes_in_host_memory_are_counted() -> None:
    plain, storing = executor("e0"), executor("e0")
    plain.capacity.host_blocks_total = storing.capacity.host_blocks_total = 40
    storing.capacity.host_blocks_used = 4
    prefixes = types_pb2.HostPrefixes(
        num_blocks=20, stored_blocks=30, restored_blocks=12, dropped_blocks=10, hit_tokens=192
    )
    storing.capacity.host_prefixes.CopyFrom(prefixes)

    assert "0/40 in host memory" in drawn(Screen.of(message(plain)), width=140)
    assert "24/40 in host memory" in drawn(Screen.of(message(storing)), width=140)
    selected = drawn(Screen.of(message(storing)).pressed(DOWN), width=140)
    assert "20 prefix blocks in host memory, 30 stored, 12 brought back, 10 dropped; 192 prompt tokens" in selected


def test_recurrent_state_is_shown_where_there_is_any() -> None:
    hybrid = executor("e0")
    hybrid.capacity.states.CopyFrom(
        types_pb2.RecurrentStates(
            num_slots=9,
            used_slots=2,
            num_checkpoints=40,
            kept_checkpoints=30,
            loaded_checkpoints=5,
            dropped_checkpoints=7,
            kv_tokens=1000,
            usable_tokens=640,
        )
    )
    selected = drawn(Screen.of(message(hybrid)).pressed(DOWN), width=180)
    assert "2 of 9 slots of recurrent state used; 30 of 40 checkpoints, 5 loaded, 7 dropped" in selected
    assert "640 of 1000 prompt tokens with KV were usable" in selected
    assert "slots of recurrent state" not in drawn(Screen.of(message(executor("e0"))).pressed(DOWN), width=180)


def test_many_seats_wrap_and_very_many_are_a_bar() -> None:
    wrapped = drawn(Screen.of(message(executor("e0", total=80))), width=60)
    assert wrapped.count("□") == 80 + 1, "and the legend's"
    bar = drawn(Screen.of(message(executor("e0", (0, DECODE), total=4096))), width=60)
    assert line_of(bar, "seats ").count("■") == 1
    assert bar.count("□") < 60


def test_blocks_are_held_promised_kept_and_free() -> None:
    bar = line_of(drawn(Screen.of(message(executor("e0"))), width=73), "blocks █")
    assert [bar.count(sign) for sign in "█▓▒░"] == [16, 16, 8, 24]
    assert "16 used, 32 reserved, 8 evictable of 64" in drawn(Screen.of(message(executor("e0"))))


def test_queues_and_latencies_are_told() -> None:
    shown = drawn(Screen.of(message()))
    assert "no executor" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["smol", "420", "80", "-", "-", "-", "12", "0"] in rows
    assert ["smol", "batch", "acme", "5", "900", "2.5", "s"] in rows
    del (empty := message()).queues[:]
    assert "no requests waiting" in drawn(Screen.of(empty))


def test_steps_per_second_are_the_difference_between_two_messages() -> None:
    screen = Screen.of(message(executor("e0", num_steps=100), executor("e1", num_steps=100)))
    assert "steps/s" not in drawn(screen)
    again = screen.shows(message(executor("e0", num_steps=150), executor("e1", num_steps=3), timestamp_ms=3_000))
    assert again.step_rates == {"e0": 25.0}, "e1 has started again"
    assert "25 steps/s" in drawn(again)


def test_names_of_others_do_not_command_the_terminal() -> None:
    named = message(executor("e\x1b[31m0"))
    named.queues[0].tenant = "[bold]a\x07"
    shown = drawn(Screen.of(named))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[bold]a" in shown


def test_an_executor_that_is_chosen_shows_its_newest_step_and_who_sits_there() -> None:
    screen = Screen.of(message(executor("e0", (1, DECODE), num_steps=9), executor("e1")))
    assert "acme  r1" not in " ".join(drawn(screen).split())
    shown = " ".join(drawn(screen.pressed(DOWN)).split())
    assert "▶ e0" in shown
    assert "9: 12.5 ms" in shown
    assert "1 decode acme r1 0 0 3 0" in shown
    del (without := executor("e0")).iterations[:]
    later = screen.pressed(DOWN).shows(message(without, timestamp_ms=2_000))
    assert "9: 12.5 ms" in drawn(later), "the newest that is known stays"


# --- keys


def test_keys_sort_choose_and_leave() -> None:
    screen = Screen.of(message(executor("e0"), executor("e1", (0, DECODE), tokens_per_s=5)))
    assert [one.capacity.executor_id for one in screen.executors] == ["e0", "e1"]
    sorted_by_seats = screen.pressed(SORT)
    assert sorted_by_seats.sorting == "seats"
    assert [one.capacity.executor_id for one in sorted_by_seats.executors] == ["e1", "e0"]
    assert screen.pressed(DOWN).pressed(DOWN).selected == "e1"
    assert screen.pressed(UP).selected == "e1"
    assert screen.pressed(DOWN).pressed(ESCAPE).selected == ""
    assert screen.pressed(LEAVE).has_left
    assert screen.pressed("x") == screen
    assert Screen.of(message()).pressed(DOWN).selected == ""


# --- the commands


@pytest.fixture
def router() -> ScriptedRouter:
    router = ScriptedRouter()
    router.stats = [
        message(executor("e0", (0, DECODE), num_steps=100)),
        message(executor("e0", (0, DECODE), (1, PREFILL), num_steps=150), timestamp_ms=2_000),
    ]
    return router


def test_top_once_shows_speeds(address: str, router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--model", "smol", "--interval", "0.5", "--address", address]) == 0
    shown = capsys.readouterr().out
    assert "50 steps/s" in shown
    assert "■ ◧ □ □ □ □ □ □" in shown
    assert "q leaves" not in shown, "no keys are offered"
    assert asked(router) == [
        inference_pb2.GetStatsRequest(model="smol", interval_ms=500, want_iterations=True, want_sequences=True)
    ]


def test_stats_is_top_as_json(address: str, router: ScriptedRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--once", "--address", address]) == 0
    assert main(["top", "--json", "--once", "--address", address]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    shown = json.loads(first)
    assert shown["timestampMs"] == "2000", "the first message tells of no steps"
    assert shown["executors"][0]["iterations"][0]["iterLatencyMS"] == 12.5
    assert shown["executors"][0]["capacity"]["seatsTotal"] == 8
    assert not asked(router)[0].want_sequences


def test_a_silly_interval_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--interval", "0.001"]) == 2
    assert "--interval" in capsys.readouterr().err


def test_the_picture_needs_no_other_site(address: str, tmp_path: Path) -> None:
    assert main(["top", "--svg", str(tmp_path / "top.svg"), "--address", address]) == 0
    picture = (tmp_path / "top.svg").read_text()
    assert "■" in picture
    assert "url(" not in picture.replace("url(#", "")
    assert as_svg(Screen.of(message())).startswith("<svg")


def test_a_picture_that_cannot_be_written_is_one_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--svg", "/nowhere/top.svg", "--address", address]) == 2
    assert capsys.readouterr().err == "error: --svg: No such file or directory: /nowhere/top.svg\n"


@pytest.mark.parametrize("key", ["q", CTRL_C])
def test_the_terminal_is_as_before_when_top_is_left(key: str, address: str, router: ScriptedRouter) -> None:
    with at_terminal("top", "--address", address) as terminal:
        terminal.expect(ALTERNATE)
        terminal.expect("50 steps/s")
        assert not terminal.is_cooked()
        terminal.type(DOWN)
        terminal.expect("▶ e0")
        terminal.type("s")
        terminal.expect("by seats")
        terminal.type(key)
        terminal.expect(NORMAL)
        assert terminal.wait() == 0
        assert terminal.is_cooked()
    assert router.stats_left.wait(60)


def test_top_says_that_its_router_has_gone_and_goes_on_with_it_later(address: str, router: ScriptedRouter) -> None:
    with at_terminal("top", "--address", address) as terminal:
        terminal.expect("50 steps/s")
        router.stats = [message(executor("e0", (7, DECODE)), timestamp_ms=9_000)]
        router.end_stats()
        terminal.expect("reconnecting")
        terminal.expect("□ □ □ □ □ □ □ ■")
        terminal.type("q")
        assert terminal.wait() == 0
