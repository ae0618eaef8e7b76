"""`inflight demo`: a dozen prompts at once, live, with in-flight and with static batching."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

from rich.console import Console

from inflight.aio import Client
from inflight.cli import terminal
from inflight.cli.address import add_run_dir_flag, resolve_run_dir
from inflight.cli.foreground import run_in_foreground
from inflight.cli.outcome import EXIT_FAILURE, EXIT_USAGE, CommandError, in_words
from inflight.cli.parser import CommandParser
from inflight.cli.stack_display import StackDisplay
from inflight.demo.display import LiveDisplay, PlainDisplay
from inflight.demo.prompts import CHECKED_PROMPT, DEMO_PROMPTS
from inflight.demo.round import Round, run_round
from inflight.demo.summary import answers_table, comparison_table, names_the_capital
from inflight.errors import InflightError
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack, StackError

# Few seats, so that most of the dozen must wait, and a pool in which their blocks can be seen to come and go.
DEFAULT_SEATS = 4
TOKENS_PER_SEAT = 1024

_TITLES = {
    "inflight": "In-flight batching: at every step whoever has finished gets off and the next one boards",
    "static": "Static batching: nobody boards until everybody has got off",
}


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    if not 1 <= flags.seats <= 64:
        raise CommandError(f"--seats: {flags.seats} is not between 1 and 64", EXIT_USAGE)
    return run_in_foreground(lambda: _demo(flags))


async def _demo(flags: argparse.Namespace) -> int:
    console = terminal.console()
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
    """Starts a stack with this kind of batching, sends it every prompt, and ends it."""
    options = StackOptions(
        model=flags.model,
        executor_args=(
            *("--batching", batching),
            *("--max-num-sequences", str(flags.seats)),
            *("--max-tokens-in-paged-kv-cache", str(flags.seats * TOKENS_PER_SEAT)),
        ),
        run_dir=resolve_run_dir(flags) / "demo",
    )
    console.print(f"\nStarting a system with {batching} batching on {flags.seats} seats")
    title = f"\n{_TITLES[batching]}"
    try:
        with StackDisplay(console) as starting:
            async with LocalStack(options, starting.show) as stack, Client(stack.address) as client:
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
    return f"asked {CHECKED_PROMPT!r}, the model did not say Paris but {answer!r}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight demo",
        description="Starts a system, sends a dozen prompts of very different lengths at once and shows them boarding "
        "and leaving; then the same with static batching, and both side by side.",
    )
    parser.add_argument("--model", metavar="MODEL", help="as for inflight up; default: SmolLM2-135M-Instruct")
    parser.add_argument("--seats", type=int, default=DEFAULT_SEATS, metavar="N", help=f"default: {DEFAULT_SEATS}")
    add_run_dir_flag(parser)
    return parser
