"""Load of a local stack through its OpenAI-compatible gateway, by the load generator GuideLLM.

`make bench-openai` installs it into .clients/guidellm and runs this. Nothing is loaded from a model hub: prompts are
synthetic text, counted by the model's own tokenizer. Writes GuideLLM's figures with the command, machine and date.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inflight.bench.report.page import Page, Part
from inflight.bench.report.table import Table
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import load_tokenizer, resolve_model
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack

GUIDELLM = Path(".clients/guidellm/bin/guidellm")
COLUMNS = (
    "concurrency", "succeeded", "failed", "requests/s", "output tok/s", "TTFT ms", "inter-token ms", "latency s",
)  # fmt: skip
REPORT = Path("bench/reports/openai")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class GuideLlmLoad:
    """What is sent: `num_requests` with each number of `streams` at a time, to one path of the API."""

    model: str
    path: str = "/v1/chat/completions"
    streams: tuple[int, ...] = (1, 4, 8)
    num_requests: int = 40
    prompt_tokens: int = 64
    output_tokens: int = 64


def guidellm_command(program: Path, load: GuideLlmLoad, target: str, tokenizer: Path, report: Path) -> list[str]:
    data = f"prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
    return [
        *(str(program), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={target},model={load.model},request_format={load.path}"),
        *("--profile", json.dumps({"kind": "concurrent", "streams": load.streams})),
        *("--constraint", f"kind=max_requests,count={load.num_requests}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,{data}"),
        *("--output", f"kind=json,path={report}"),
    ]


async def run_guidellm(command: Sequence[str], report: Path) -> list[dict[str, Any]]:
    """Runs it and returns the benchmarks of its report. Raises `RuntimeError` with its last words where it fails."""
    environment = {**os.environ, **OFFLINE}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"guidellm ended with {process.returncode}: {output.decode(errors='replace')[-2000:]}")
    return _benchmarks_of(report)


def _benchmarks_of(report: Path) -> list[dict[str, Any]]:
    benchmarks: list[dict[str, Any]] = json.loads(report.read_text())["benchmarks"]
    return benchmarks


def write_tokenizer(model: str, folder: Path) -> Path:
    """Returns the model's tokenizer as a folder, which is how others load one."""
    load_tokenizer(resolve_model(model)).save_pretrained(str(folder))
    return folder


def row(streams: int, benchmark: Mapping[str, Any]) -> list[str]:
    """Returns the figures of one run of GuideLLM."""
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    def p99(name: str) -> float:
        return float(metrics[name]["successful"]["percentiles"]["p99"])

    return [
        f"{streams}", f"{totals['successful']}", f"{totals['errored']}", f"{mean('requests_per_second'):.2f}",
        f"{mean('output_tokens_per_second'):.1f}",
        f"{mean('time_to_first_token_ms'):.0f} / {p99('time_to_first_token_ms'):.0f}",
        f"{mean('inter_token_latency_ms'):.1f} / {p99('inter_token_latency_ms'):.1f}",
        f"{mean('request_latency'):.2f} / {p99('request_latency'):.2f}",
    ]  # fmt: skip


def page(load: GuideLlmLoad, benchmarks: Sequence[Mapping[str, Any]], command: str, load_average: float) -> Page:
    """Returns the report. `load_average` is the machine's before the run, which shows how much other load it had."""
    rows = [row(streams, benchmark) for streams, benchmark in zip(load.streams, benchmarks, strict=True)]
    circumstances = {
        "command": command,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.machine()} with {num_usable_cores()} cores, Linux {platform.release()}; load generator, "
        f"gateway, router, executor and Redis share them; load average at the beginning: {load_average:.1f}",
        "model": load.model,
        "load": f"{load.prompt_tokens} prompt and {load.output_tokens} output tokens each, `{load.path}`, streamed",
    }
    note = "The figures are GuideLLM's own, mean / p99. Concurrency is the number of requests that it keeps under way."
    parts = [Part("Figures", note, table=Table(COLUMNS, rows))]
    return Page("GuideLLM through the OpenAI-compatible gateway", circumstances, parts)


async def measure(load: GuideLlmLoad, options: StackOptions, program: Path, source: str) -> list[dict[str, Any]]:
    """Starts the stack, loads it, and returns GuideLLM's benchmarks."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(source, Path(folder) / "tokenizer")
        async with LocalStack(options) as stack:
            report = Path(folder) / "report.json"
            target = f"http://{stack.gateway_addresses[0]}"
            return await run_guidellm(guidellm_command(program, load, target, tokenizer, report), report)


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark and writes its report."""
    flags = _parser().parse_args(argv)
    if not GUIDELLM.exists():
        print(f"error: there is no {GUIDELLM}; make bench-openai installs it", file=sys.stderr)
        return 2
    load = GuideLlmLoad(
        model=resolve_model(flags.model).name,
        streams=tuple(int(one) for one in flags.streams.split(",")),
        num_requests=flags.requests,
        prompt_tokens=flags.prompt_tokens,
        output_tokens=flags.output_tokens,
    )
    options = StackOptions(
        model=flags.model or None, gateways=1, executor_args=tuple(shlex.split(flags.executor_args)),
        run_dir=Path("run/bench-openai"),
    )  # fmt: skip
    load_average = os.getloadavg()[0]
    benchmarks = asyncio.run(measure(load, options, GUIDELLM, flags.model))
    given = f" ARGS={shlex.quote(' '.join(argv))}" if argv else ""
    text = page(load, benchmarks, f"make bench-openai{given}", load_average).markdown()
    flags.report.parent.mkdir(parents=True, exist_ok=True)
    flags.report.with_suffix(".md").write_text(text)
    print(text)
    return 0 if all(not one["metrics"]["request_totals"]["errored"] for one in benchmarks) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-openai", description="Loads the gateway with GuideLLM.")
    parser.add_argument("--model", default="", help="as inflight up takes it; default: SmolLM2-135M-Instruct")
    parser.add_argument("--streams", default="1,4,8", help="requests under way at the same time, one run each")
    parser.add_argument("--requests", type=int, default=40, help="requests of each run")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--executor-args", default="", help="more flags for the executor")
    parser.add_argument("--report", type=Path, default=REPORT, help="where the report goes, without a suffix")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
