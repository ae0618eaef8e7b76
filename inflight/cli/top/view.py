"""The screen of `inflight top`. Pure: makes text of a message and a width.

    seats   ■ ■ ■ ◧ ◧ □ □    a cell for each: ■ decode, ◧ prefill, □ free
    blocks  ████▓▓▒▒░░░░     █ used, ▓ reserved, ▒ in the prefix cache only, ░ free

Colours only repeat the symbols. Names of tenants, models and executors are text, never markup, without control
characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from inflight.catalogue import enum_name, tokens_per_draft
from inflight.cli.top.screen import Screen
from inflight.v1 import inference_pb2, stats_pb2, types_pb2

LABEL_WIDTH = 8
MAX_BAR_WIDTH = 80
# More seats than this many lines hold are drawn as a bar.
MAX_SEAT_LINES = 4
MAX_QUEUES = 12
MAX_SEQUENCES = 20
LEGEND = "seats: ■ decode ◧ prefill □ free   blocks: █ used ▓ reserved ▒ evictable ░ free"
KEYS = "q quits, s sorts, ↑ ↓ select"
# Field of ModelLatency → heading.
LATENCIES = {
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "p99",
    "inter_token_p50_ms": "ITL p50 ms",
    "inter_token_p99_ms": "p99",
}

SEAT_SIGNS = {
    stats_pb2.SEQUENCE_PHASE_DECODE: ("■", "green"),
    stats_pb2.SEQUENCE_PHASE_PREFILL: ("◧", "yellow"),
}
FREE_SEAT = ("□", "dim")
TAKEN_SEAT = ("■", "green")
USED, RESERVED, CACHED, FREE = ("█", "green"), ("▓", "yellow"), ("▒", "cyan"), ("░", "dim")


def render(screen: Screen, width: int, *, has_keys: bool = True) -> RenderableType:
    """Returns the whole screen, for a terminal so many columns wide. `has_keys` shows the keys."""
    parts: list[RenderableType] = [_heading(screen, has_keys), _latencies(screen.now.latencies), Text()]
    for executor in screen.executors:
        parts += _executor(executor, screen, width)
    if not screen.executors:
        parts.append(Text("no executor\n", "yellow"))
    parts += [_queues(screen.now.queues), Text(f"\n{LEGEND}", "dim")]
    return Group(*parts)


def _heading(screen: Screen, has_keys: bool) -> Text:
    now = screen.now
    counted = f"{len(now.executors)} executor{'' if len(now.executors) == 1 else 's'}"
    heading = Text.assemble(("inflight top", "bold"), f"  {_plain(now.router_id)}  {_clock(now.timestamp_ms)}  ")
    heading.append(f"{counted}  by {screen.sorting}  ")
    if has_keys:
        heading.append(KEYS, "dim")
    if screen.note:
        heading.append(f"\n{_plain(screen.note)}", "bold yellow")
    return heading


def _latencies(latencies: Sequence[inference_pb2.ModelLatency]) -> Table:
    table = _table("model")
    for heading in ("tokens/s", *LATENCIES.values(), "ended/min", "refused/min"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in latencies:
        times = [f"{getattr(one, name):.0f}" if one.HasField(name) else "-" for name in LATENCIES]
        table.add_row(
            Text(_plain(one.model), "bold"),
            f"{one.output_tokens_per_s:.0f}",
            *times,
            str(one.num_ended),
            str(one.num_refused),
        )
    return table


def _executor(executor: inference_pb2.ExecutorStats, screen: Screen, width: int) -> list[RenderableType]:
    capacity = executor.capacity
    is_selected = capacity.executor_id == screen.selected
    bar_width = max(8, min(MAX_BAR_WIDTH, width - LABEL_WIDTH - 1))
    parts: list[RenderableType] = [
        _executor_line(
            capacity,
            _step_rate(capacity, screen),
            is_selected=is_selected,
            shows_model=len({one.capacity.model for one in screen.now.executors}) > 1,
        ),
        _labelled("seats", _seats(executor, bar_width)),
        _labelled("blocks", _blocks(capacity, bar_width)),
        _labelled("", _blocks_in_words(capacity)),
    ]
    if is_selected:
        parts += _details(executor, screen.steps.get(capacity.executor_id))
    return [*parts, Text()]


def _executor_line(
    capacity: inference_pb2.ExecutorCapacity, step_rate: float | None, *, is_selected: bool, shows_model: bool
) -> Text:
    name = f"{'▶ ' if is_selected else ''}{_plain(capacity.executor_id)}"
    line = Text.assemble((name, "bold" if capacity.accepting else "dim"))
    if shows_model:
        line.append(f"  {_plain(capacity.model)}")
    if not capacity.accepting:
        line.append("  not accepting", "yellow")
    line.append(f"  seats {capacity.seats_used}/{capacity.seats_total}")
    if capacity.num_waiting:
        line.append(f" + {capacity.num_waiting} standby")
    rate = "" if step_rate is None else f"{step_rate:.0f} steps/s  "
    step_ms = "-" if capacity.HasField("steps_per_s") and not capacity.steps_per_s else f"{capacity.step_ms:.1f}"
    line.append(f"  {rate}{capacity.output_tokens_per_s:.0f} tokens/s  step {step_ms} ms")
    if (yielded := tokens_per_draft(capacity)) is not None:
        line.append(f"  {yielded:.1f} tokens/draft")
    constraint = _constraint(capacity)
    if constraint:
        line.append(f"  bound by {constraint}", "magenta")
    return line


def _step_rate(capacity: inference_pb2.ExecutorCapacity, screen: Screen) -> float | None:
    """Returns steps per second: over the same ten seconds as the tokens, or since the last message if the executor does
    not report it."""
    if capacity.HasField("steps_per_s"):
        return capacity.steps_per_s
    return screen.step_rates.get(capacity.executor_id)


def _seats(executor: inference_pb2.ExecutorStats, bar_width: int) -> Text:
    capacity = executor.capacity
    if capacity.seats_total > bar_width // 2 * MAX_SEAT_LINES:
        return _bar([(capacity.seats_used, TAKEN_SEAT)], capacity.seats_total, FREE_SEAT, bar_width)
    signs = [FREE_SEAT] * capacity.seats_total
    by_seat = {one.seat: SEAT_SIGNS.get(one.phase, TAKEN_SEAT) for one in executor.sequences if one.HasField("seat")}
    if not by_seat:  # the message has no sequences: fill from the left
        by_seat = dict.fromkeys(range(capacity.seats_used), TAKEN_SEAT)
    for seat, sign in by_seat.items():
        if seat < len(signs):
            signs[seat] = sign
    text = Text()
    for seat, sign in enumerate(signs):
        if seat % (bar_width // 2):
            text.append(" ")
        elif seat:
            text.append("\n" + " " * LABEL_WIDTH)
        text.append(*sign)
    return text


def _blocks(capacity: inference_pb2.ExecutorCapacity, bar_width: int) -> Text:
    reserved = max(0, capacity.blocks_reserved - capacity.blocks_used)
    parts = [(capacity.blocks_used, USED), (reserved, RESERVED), (capacity.blocks_cached, CACHED)]
    return _bar(parts, capacity.blocks_total, FREE, bar_width)


def _blocks_in_words(capacity: inference_pb2.ExecutorCapacity) -> Text:
    host_total = capacity.host_blocks_total
    num_host = capacity.host_blocks_used + capacity.host_prefixes.num_blocks
    host = f", {num_host}/{host_total} in host memory" if host_total else ""
    return Text(
        f"{capacity.blocks_used} used, {capacity.blocks_reserved} reserved, {capacity.blocks_cached} evictable "
        f"of {capacity.blocks_total}{host}",
        "dim",
    )


def _bar(parts: Sequence[tuple[int, tuple[str, str]]], total: int, rest: tuple[str, str], bar_width: int) -> Text:
    """Draws a bar: every part that is not empty takes at least one cell, as long as there are cells."""
    text, num_left, drawn, counted = Text(), bar_width, 0, 0
    for amount, (sign, style) in parts:
        counted = min(total, counted + amount)
        wanted = round(counted / total * bar_width) - drawn if total else 0
        num_cells = min(num_left, max(wanted, 1 if amount else 0))
        text.append(sign * num_cells, style)
        num_left -= num_cells
        drawn += num_cells
    text.append(rest[0] * num_left, rest[1])
    return text


def _details(executor: inference_pb2.ExecutorStats, step: stats_pb2.IterationStats | None) -> list[RenderableType]:
    details: list[RenderableType] = []
    if step is not None:
        details.append(_labelled("step", _newest_step(step)))
    drafts = executor.capacity.drafts
    if drafts.num_drafts:
        text = f"{drafts.num_accepted} of {drafts.num_verified} drafted tokens accepted, in {drafts.num_drafts} drafts"
        details.append(_labelled("drafts", Text(text)))
    prefixes = executor.capacity.host_prefixes
    if prefixes.stored_blocks:
        text = (
            f"{prefixes.num_blocks} prefix blocks in host memory, {prefixes.stored_blocks} stored, "
            f"{prefixes.restored_blocks} brought back, {prefixes.dropped_blocks} dropped; "
            f"{prefixes.hit_tokens} prompt tokens found"
        )
        details.append(_labelled("host", Text(text)))
    if executor.capacity.HasField("states"):
        details.append(_labelled("states", Text(_states_in_words(executor.capacity.states))))
    if executor.sequences:
        details.append(_sequences(executor.sequences))
    return details


def _states_in_words(states: types_pb2.RecurrentStates) -> str:
    return (
        f"{states.used_slots} of {states.num_slots} slots of recurrent state used; {states.kept_checkpoints} of "
        f"{states.num_checkpoints} checkpoints, {states.loaded_checkpoints} loaded, {states.dropped_checkpoints} "
        f"dropped; {states.usable_tokens} of {states.kv_tokens} prompt tokens with KV were usable"
    )


def _newest_step(step: stats_pb2.IterationStats) -> Text:
    batch = step.inflight_batching_stats
    parts = ", ".join(f"{_plain(part.name)} {part.ms:.1f}" for part in step.parts)
    return Text(
        f"{step.iter}: {step.iter_latency_ms:.1f} ms, device {step.device_ms:.1f}; "
        f"{batch.num_ctx_tokens} tokens of {batch.num_context_requests} prompts, {batch.num_gen_tokens} output tokens; "
        f"boarded {batch.num_boarded_requests}, ended {batch.num_completed_requests}; host ms: {parts or '-'}"
    )


def _sequences(sequences: Sequence[stats_pb2.SequenceStats]) -> Table:
    table = _table("    seat", "phase", "tenant", "request")
    table.columns[0].justify = "right"
    for heading in ("prompt", "output", "blocks", "reserved"):
        table.add_column(heading, justify="right")
    for one in sequences[:MAX_SEQUENCES]:
        table.add_row(
            str(one.seat) if one.HasField("seat") else "-",
            enum_name(one, "phase"),
            Text(_plain(one.tenant)),
            Text(_plain(one.request_id)),
            *(str(n) for n in (one.prompt_tokens, one.output_tokens, one.num_blocks, one.reserved_blocks)),
        )
    if len(sequences) > MAX_SEQUENCES:
        table.add_row("", f"and {len(sequences) - MAX_SEQUENCES} more")
    return table


def _queues(queues: Sequence[inference_pb2.TenantQueue]) -> RenderableType:
    if not queues:
        return Text("no requests waiting", "dim")
    table = _table("waiting", "class", "tenant")
    for heading in ("requests", "tokens", "longest wait"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = sorted(queues, key=lambda queue: -queue.num_tokens)[:MAX_QUEUES]
    for queue in shown:
        table.add_row(
            Text(_plain(queue.model)),
            enum_name(queue, "priority"),
            Text(_plain(queue.tenant) or "others"),
            str(queue.num_requests),
            str(queue.num_tokens),
            f"{queue.longest_wait_ms / 1000:.1f} s",
        )
    if len(queues) > len(shown):
        table.add_row(f"and {len(queues) - len(shown)} more")
    return table


def _labelled(label: str, content: Text) -> Text:
    return Text.assemble((f"{label:>{LABEL_WIDTH - 1}} ", "dim"), content)


def _constraint(capacity: inference_pb2.ExecutorCapacity) -> str:
    name = enum_name(capacity, "constraint")
    return "" if name in ("unspecified", "no_work") else name.replace("_", " ")


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def _clock(timestamp_ms: int) -> str:
    return f"{datetime.fromtimestamp(timestamp_ms / 1000, UTC):%H:%M:%S} UTC"


def _plain(text: str) -> str:
    """Returns the text without control characters."""
    return "".join(character if character.isprintable() else "�" for character in text)
