"""`python -m inflight.bench.bfcl.main`: all questions of BFCL to a model, each complete call checked against its
schema.

A local stack answers them through its gateway, to OpenAI's own client. Answers are kept in a file, so that a run can
be done in parts (`--count`) and go on after an interruption (`--go-on`). The report has all answers so far. Exits 1
where a call is invalid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai

from inflight.bench.bfcl.answers import MAX_TOKENS, TEMPERATURE, Answer, answers
from inflight.bench.bfcl.cases import CATEGORIES, PACKAGE, Case, NotFetchedError, fetched_cases
from inflight.bench.report.page import Page, Part, write_report
from inflight.bench.report.table import Table
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import resolve_model
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack

KIND = "bfcl"
RUN_DIR = Path("run/bfcl")
NOTE = """\
The questions of the Berkeley Function Calling Leaderboard, each with its functions and `tool_choice: required`. A call
is valid if it names one of the functions and its arguments satisfy that function's JSON schema. An answer that reaches
the limit of tokens is cut off within a call; its other calls count. Right functions: the answers whose calls name the
functions of the correct calls."""
COLUMNS = (
    "category", "answers", "complete calls", "invalid calls", "other problems", "cut off", "right functions",
    "prompt tokens", "output tokens",
)  # fmt: skip


async def ask(cases: Sequence[Case], options: StackOptions, num_clients: int, kept: Path) -> None:
    """Asks the questions of a stack and appends the answers to a file."""
    name = resolve_model(options.model or "").name
    async with (
        LocalStack(options) as stack,
        openai.AsyncOpenAI(
            base_url=f"http://{stack.gateway_addresses[0]}/v1", api_key="none", max_retries=5, timeout=600
        ) as client,
    ):
        with kept.open("a", encoding="utf-8", buffering=1) as file:
            async for answer in answers(client, name, cases, num_clients):
                print(json.dumps(asdict(answer), ensure_ascii=False), file=file)


def values_of(given: Mapping[str, Answer], cases: Mapping[str, Sequence[Case]], circumstances: dict[str, str]) -> Any:
    """Returns the report as values: the sums of each category, and what was invalid."""
    results = []
    for category, asked in cases.items():
        answered = [given[case.name] for case in asked if case.name in given]
        results.append(
            {
                "category": category,
                "num_cases": len(asked),
                "num_answers": len(answered),
                "num_calls": sum(one.num_calls for one in answered),
                "num_cut_off": sum(one.is_cut_off for one in answered),
                "num_right_functions": sum(one.calls_right_functions for one in answered),
                "prompt_tokens": sum(one.prompt_tokens for one in answered),
                "output_tokens": sum(one.output_tokens for one in answered),
                "invalid": [f"{one.case}: {call}" for one in answered for call in one.invalid],
                "problems": [f"{one.case}: {one.problem}" for one in answered if one.problem],
            }
        )
    return {"report": KIND, "circumstances": circumstances, "results": results}


def page_of(values: Mapping[str, Any]) -> Page:
    """Returns the page of a report that is given as values."""
    results = values["results"]
    rows = [
        [
            one["category"],
            f"{one['num_answers']} of {one['num_cases']}",
            f"{one['num_calls']}",
            f"{len(one['invalid'])}",
            f"{len(one['problems'])}",
            *(f"{one[name]}" for name in ("num_cut_off", "num_right_functions", "prompt_tokens", "output_tokens")),
        ]
        for one in results
    ]
    problems = [problem for one in results for problem in (*one["invalid"], *one["problems"])]
    parts = [Part("Calls", table=Table(COLUMNS, rows), problems=problems)]
    return Page("Tool calls on BFCL", values["circumstances"], parts, note=NOTE)


def kept_answers(path: Path) -> dict[str, Answer]:
    """Returns the answers of a file by case."""
    if not path.exists():
        return {}
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {row["case"]: Answer(**row) for row in rows}


def main(argv: Sequence[str]) -> int:
    """Asks, writes the report and returns the exit code."""
    flags = _parser().parse_args(argv)
    try:
        cases = {category: fetched_cases(category) for category in CATEGORIES}
    except NotFetchedError as error:
        print(f"error: BFCL cannot be fetched: {error}", file=sys.stderr)
        return 2
    kept = RUN_DIR / "answers.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not flags.go_on:
        kept.unlink(missing_ok=True)
    given = kept_answers(kept)
    by_number = sorted((case for asked in cases.values() for case in asked), key=lambda case: case.seed)
    missing = [case for case in by_number if case.name not in given][: flags.count]
    executor_args = tuple(shlex.split(flags.executor_args))
    options = StackOptions(
        model=flags.model or None, gateways=1, executor_args=executor_args, run_dir=RUN_DIR / "stack"
    )
    if missing:
        asyncio.run(ask(missing, options, flags.clients, kept))
    circumstances = {
        "model": resolve_model(flags.model).name,
        "data": f"{PACKAGE}, {', '.join(CATEGORIES)}",
        "requests": f"temperature {TEMPERATURE}, at most {MAX_TOKENS} tokens, {flags.clients} at a time",
        "executor": flags.executor_args or "default settings",
        "machine": f"{platform.machine()} with {num_usable_cores()} cores",
    }
    values = values_of(kept_answers(kept), cases, circumstances)
    page = page_of(values)
    print(page.markdown())
    write_report(flags.out, KIND, values, page)
    return 1 if any(one["invalid"] or one["problems"] for one in values["results"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bfcl", description="Asks a model all questions of BFCL.")
    parser.add_argument("--model", default="", help="as inflight up takes it; default: SmolLM2-135M-Instruct")
    parser.add_argument("--executor-args", default="", help="more flags for the executor")
    parser.add_argument("--clients", type=int, default=32, help="questions at a time; default: 32")
    parser.add_argument("--count", type=int, default=None, help="questions of this run; default: all")
    parser.add_argument("--go-on", action="store_true", help="keep the answers of the last run and ask the others")
    parser.add_argument("--out", type=Path, default=Path("bench/reports"), help="folder of the report")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
