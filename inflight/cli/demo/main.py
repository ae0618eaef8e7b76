"""`inflight demo`: a dozen prompts at once, live, with in-flight and with static batching."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

from rich.console import Console

from inflight.aio import AsyncClient
from inflight.cli.call_errors import in_words
from inflight.cli.console import EXIT_FAILURE, EXIT_USAGE, CommandError, open_console, run_in_foreground
from inflight.cli.demo.display import LiveDisplay, PlainDisplay
from inflight.cli.demo.prompts import CHECKED_PROMPT, DEMO_PROMPTS
from inflight.cli.demo.round import Round, run_round
from inflight.cli.demo.summary import answers_table, comparison_table, names_the_capital
from inflight.cli.flags import add_run_dir_flag, resolve_run_dir
from inflight.cli.parser import CommandParser
from inflight.errors import InflightError
from inflight.local.display import StackDisplay
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack, StackError

# Few seats, so that most requests wait, and a small pool, so that the display shows its blocks change.
DEFAULT_SEATS = 4
TOKENS_PER_SEAT = 1024

_TITLES = {
    "inflight": "In-flight batching: at every step finished requests leave and waiting ones board",
    "static": "Static batching: no request boards until the whole batch has finished",
}


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    if not 1 <= flags.seats <= 64:
        raise CommandError(f"--seats: {flags.seats} is not between 1 and 64", EXIT_USAGE)
    return run_in_foreground(lambda: _demo(flags))


async def _demo(flags: argparse.Namespace) -> int:
    console = open_console()
    inflight = await _round(console, flags, "inflight")
    console.print(answers_table(inflight))
    if inflight.failures or not names_the_capital(inflight):
        raise CommandError(_complaint(inflight))
    static = await _round(console, flags, "static")
    if static.failures:
        raise CommandError(_complaint(static))
    console.print(f"\nThe same {len(DEMO_PROMPTS)} prompts, all sent at once, on {flags.seats} seats:")
    console.print(comparison_table(inflight, static))
    return 0


async def _round(console: Console, flags: argparse.Namespace, batching: str) -> Round:
    """Starts a stack with this kind of batching, sends every prompt, and stops the stack."""
    options = StackOptions(
        model=flags.model,
        executor_args=(
            *("--batching", batching),
            *("--max-num-sequences", str(flags.seats)),
            *("--max-tokens-in-paged-kv-cache", str(flags.seats * TOKENS_PER_SEAT)),
        ),
        run_dir=resolve_run_dir(flags) / "demo",
    )
    console.print(f"\nStarting a stack with {batching} batching and {flags.seats} seats")
    title = f"\n{_TITLES[batching]}"
    try:
        with StackDisplay(console) as starting:
            async with LocalStack(options, starting.show) as stack, AsyncClient(stack.address) as client:
                live = LiveDisplay(console, title) if console.is_terminal else nullcontext(PlainDisplay(console, title))
                with live as display:
                    return await run_round(client, DEMO_PROMPTS, flags.seats, display)
    except StackError as error:
        raise CommandError(str(error), EXIT_USAGE if error.is_setting else EXIT_FAILURE) from None
    except InflightError as error:
        raise CommandError(in_words(error, "the stack")) from None


def _complaint(finished: Round) -> str:
    if finished.failures:
        first = finished.failures[0]
        return f"{len(finished.failures)} of {len(finished.riders)} requests failed; #{first.number}: {first.ending}"
    answer = next(rider.text for rider in finished.riders if rider.prompt.text == CHECKED_PROMPT)
    return f"the answer to {CHECKED_PROMPT!r} is not Paris but {answer!r}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight demo",
        description="Starts a local stack, sends a dozen prompts of very different lengths at once and shows them "
        "board and leave. Then does the same with static batching and compares the two.",
    )
    parser.add_argument("--model", metavar="MODEL", help="as for inflight up; default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--seats", type=int, default=DEFAULT_SEATS, metavar="N", help=f"number of seats (default: {DEFAULT_SEATS})"
    )
    add_run_dir_flag(parser)
    return parser
