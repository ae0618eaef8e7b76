"""`python -m tests.answers`: answers of a real system under forty JSON schemas, the last third of them during faults.

Every answer that ends by itself must satisfy its schema, and every request must end, whichever processes die.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from inflight.bench.chaos.disturbance import ChaosRun, System, disturb, running_system
from inflight.bench.chaos.options import parse_options
from inflight.bench.chaos.setting import setting_of
from inflight.bench.fleet.health import Leak
from inflight.bench.targets.command_errors import with_command_errors
from inflight.cli.console import EXIT_FAILURE, run_in_foreground, run_main
from tests.answers.load import Answers
from tests.answers.verdict import Verdict

LEAK_TIMEOUT_S = 90.0


def main(argv: Sequence[str]) -> int:
    """Runs it and returns the exit code: 0 if every answer is valid and every request ended."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.answers",
        description="Asks a real system for answers under forty JSON schemas at temperature 1.5, the last third of "
        "them while faults happen, and validates each. Exits 1 where an answer is invalid or a request did not end "
        "well. Other options are those of `python -m inflight.bench.chaos`.",
        allow_abbrev=False,
    )
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first request; default: 0")
    parser.add_argument("--count", type=int, default=2000, metavar="N", help="requests; default: 2000")
    given, others = parser.parse_known_args(argv)
    # Faults go on until the last answer.
    options = parse_options(["--run-dir", "run/answers", "--seconds", "inf", "--seats", "32", *others])
    console = Console()
    console.print(f"seed {options.seed}", highlight=False)
    with setting_of(options) as setting:
        run = ChaosRun(options, setting, console)
        return run_in_foreground(lambda: with_command_errors(answers(run, given.first, given.count)))


async def answers(run: ChaosRun, first: int, count: int) -> int:
    """One run; 0 if every answer is valid and nothing is left behind."""
    calm = count - count // 3
    async with running_system(run) as system:
        undisturbed = Answers.of(system.client, range(first, first + calm), run.say)
        await undisturbed.run(run.options.clients)
        run.say(_line("undisturbed", undisturbed))
        disturbed = Answers.of(system.client, range(first + calm, first + count), run.say)
        await _answer_during_faults(run, system, disturbed)
        run.say(_line("during faults", disturbed))
        leak = await system.observer.leak(LEAK_TIMEOUT_S)
        run.say(f"{len(run.windows)} faults, {len(system.fleet.exits)} deaths")
    verdicts = undisturbed.verdicts + disturbed.verdicts
    run.console.print(last_line(verdicts, len(system.fleet.exits), leak), highlight=False, soft_wrap=True)
    is_right = verdicts.total() == count and not (undisturbed.num_failed or disturbed.num_failed or leak)
    return 0 if is_right else EXIT_FAILURE


async def _answer_during_faults(run: ChaosRun, system: System, load: Answers) -> None:
    """Returns when every answer has ended and the system is whole again."""
    faults = asyncio.create_task(disturb(run, system, load))
    try:
        await load.run(run.options.clients)
    finally:
        faults.cancel()
        with suppress(asyncio.CancelledError):
            await faults
    await system.observer.wait_until_whole(run.options.recovery_timeout_s)


def _line(what: str, load: Answers) -> str:
    counts = ", ".join(f"{load.verdicts[verdict]} {verdict.value}" for verdict in Verdict)
    more = f"{load.num_tokens} tokens, {load.num_resumed} resumed, {load.num_refused} refused and asked again"
    return f"{what}: {load.num_ended} answers: {counts}; {more}"


def last_line(verdicts: Counter[Verdict], num_deaths: int, leak: Leak) -> str:
    """The line for machines."""
    counts = " ".join(f"{verdict.name.lower()}={verdicts[verdict]}" for verdict in Verdict)
    return f"answers: {counts} deaths={num_deaths} leaked_blocks={leak.num_blocks}"


if __name__ == "__main__":
    run_main(main)
