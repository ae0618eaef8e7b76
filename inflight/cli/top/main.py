"""`inflight top`: seats, blocks, queues and latencies, live; and `inflight stats`, the same as JSON lines."""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path

import grpc
from rich.console import Console
from rich.live import Live

from inflight.aio import AsyncClient
from inflight.cli.call_errors import errors_in_words, in_words
from inflight.cli.console import EXIT_USAGE, CommandError, open_console, run_in_foreground
from inflight.cli.flags import access_of, add_connection_flags, resolve_addresses
from inflight.cli.parser import CommandParser
from inflight.cli.top.keys import keyboard
from inflight.cli.top.screen import Screen
from inflight.cli.top.view import render
from inflight.errors import InflightError
from inflight.statistics import stats_json
from inflight.v1 import inference_pb2

# Wait before another call after a router has ended the stream.
RETRY_S = 1.0
PICTURE_WIDTH = 110
SVG_OPENING = '<svg class="rich-terminal" role="img" aria-labelledby="title desc"'
SVG_WORDS = (
    '<title id="title">inflight top</title><desc id="desc">A terminal: seats, KV blocks, steps and speeds of each '
    "executor, the queues by class and tenant, time to first token and inter-token latency.</desc>"
)
FONT_FACES = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)

Messages = AsyncGenerator[inference_pb2.GetStatsResponse, None]


def main(argv: Sequence[str]) -> int:
    """Runs `inflight top`."""
    return _run(_parser("top").parse_args(argv))


def stats(argv: Sequence[str]) -> int:
    """Runs `inflight stats`, which is `inflight top --json`."""
    return _run(_parser("stats").parse_args(["--json", *argv]))


def _run(flags: argparse.Namespace) -> int:
    if not 0.05 <= flags.interval <= 60:
        raise CommandError(f"--interval: {flags.interval} is not between 0.05 and 60 seconds", EXIT_USAGE)
    return run_in_foreground(lambda: _top(flags))


async def _top(flags: argparse.Namespace) -> int:
    addresses = resolve_addresses(flags)
    address = ", ".join(addresses)
    # Ctrl-C is the normal end.
    with suppress(asyncio.CancelledError), errors_in_words(address, is_verbose=flags.verbose):
        async with AsyncClient(*addresses, **access_of(flags)) as client:
            if flags.json:
                await _print_json(client, flags)
            elif flags.once or flags.svg or not sys.stdout.isatty():
                await _show_once(client, flags)
            else:
                await LiveTop(client, flags, address).run()
    return 0


async def _messages(client: AsyncClient, flags: argparse.Namespace) -> Messages:
    stats = client.stats(
        model=flags.model or "",
        interval=flags.interval,
        want_iterations=True,
        want_sequences=not flags.json or flags.sequences,
    )
    async with aclosing(stats):
        async for one in stats:
            yield one.wire


async def _print_json(client: AsyncClient, flags: argparse.Namespace) -> None:
    if flags.once:
        print(stats_json((await _settled(client, flags)).now), flush=True)
        return
    async for message in _messages(client, flags):
        print(stats_json(message), flush=True)


async def _show_once(client: AsyncClient, flags: argparse.Namespace) -> None:
    screen = await _settled(client, flags)
    if flags.svg:
        await asyncio.to_thread(_write, Path(flags.svg), as_svg(screen))
        return
    console = open_console()
    console.print(render(screen, console.width, has_keys=False))


async def _settled(client: AsyncClient, flags: argparse.Namespace) -> Screen:
    """Returns the screen of the second message: rates are differences, and the first message has no steps."""
    screen: Screen | None = None
    async with aclosing(_messages(client, flags)) as messages:
        async for message in messages:
            if screen is not None:
                return screen.shows(message)
            screen = Screen.of(message)
    if screen is None:
        raise CommandError("the router sent no statistics")
    return screen


def _write(path: Path, picture: str) -> None:
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--svg: {error.strerror}: {path}", EXIT_USAGE) from None


def as_svg(screen: Screen) -> str:
    """Returns a picture with a description and without external fonts."""
    console = Console(record=True, width=PICTURE_WIDTH, file=io.StringIO(), markup=False, highlight=False)
    console.print(render(screen, PICTURE_WIDTH))
    drawn = FONT_FACES.sub("", console.export_svg(title="inflight top", unique_id="top"))
    return drawn.replace('<svg class="rich-terminal"', SVG_OPENING, 1).replace(">", f">{SVG_WORDS}", 1)


class LiveTop:
    """The alternate screen, drawn at every message and key. Calls again when a router ends the stream."""

    def __init__(self, client: AsyncClient, flags: argparse.Namespace, address: str) -> None:
        self._client = client
        self._flags = flags
        self._address = address
        self._screen: Screen | None = None
        self._has_changed = asyncio.Event()

    async def run(self) -> None:
        """Runs until the user quits."""
        messages = _messages(self._client, self._flags)
        self._take(await anext(messages))  # an error of the first call is shown on the normal screen
        console = open_console()
        async with AsyncExitStack() as opened:
            live = opened.enter_context(Live(console=console, screen=True, auto_refresh=False))
            opened.enter_context(keyboard(self._press))
            following = asyncio.create_task(self._follow(messages))
            opened.push_async_callback(_end, following)
            while self._screen is not None and not self._screen.has_left:
                live.update(render(self._screen, console.width), refresh=True)
                self._has_changed.clear()
                changing = asyncio.create_task(self._has_changed.wait())
                await asyncio.wait((changing, following), return_when=asyncio.FIRST_COMPLETED)
                changing.cancel()
                if following.done():
                    following.result()

    async def _follow(self, messages: Messages) -> None:
        while True:
            note = "the router ended the stream; reconnecting"
            try:
                async for message in messages:
                    self._take(message)
            except InflightError as error:
                if error.code is not grpc.StatusCode.UNAVAILABLE:
                    raise
                note = in_words(error, self._address, is_verbose=self._flags.verbose)
            if self._screen is not None:
                self._change(self._screen.noting(note))
            await asyncio.sleep(RETRY_S)
            messages = _messages(self._client, self._flags)

    def _take(self, message: inference_pb2.GetStatsResponse) -> None:
        self._change(Screen.of(message) if self._screen is None else self._screen.shows(message))

    def _press(self, key: str) -> None:
        if self._screen is not None:
            self._change(self._screen.pressed(key))

    def _change(self, screen: Screen) -> None:
        self._screen = screen
        self._has_changed.set()


async def _end(following: asyncio.Task[None]) -> None:
    following.cancel()
    await asyncio.wait((following,))


def _parser(name: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"inflight {name}",
        description="Shows seats, KV blocks, queues and latencies live, and the latest step of a selected executor. "
        "`inflight stats` is `inflight top --json`.",
    )
    parser.add_argument("--model", metavar="NAME", help="only this model")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between updates (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object per line, with the statistics of each step"
    )
    parser.add_argument("--sequences", action="store_true", help="with --json: include the sequences of each executor")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    add_connection_flags(parser)
    return parser
