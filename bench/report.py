"""Writes what a benchmark found: JSON with everything, Markdown for people, a picture. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench.measures import Measures, Run, SeatSample, ratio
from bench.picture import draw_seats
from bench.workloads import Workload

BASELINE_MODE = "static"


@dataclass(frozen=True, slots=True)
class Report:
    """Runs of one workload, in the order they ran, and the circumstances (`machine`, `model`, … in words)."""

    workload: Workload
    circumstances: Mapping[str, str]
    runs: tuple[Run, ...]

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes, in the order of their first run."""
        return tuple(dict.fromkeys(run.mode for run in self.runs))


def write_report(report: Report, folder: Path, name: str) -> tuple[Path, ...]:
    """Writes `name`.json, .md and .png into a folder and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / f"{name}{suffix}" for suffix in (".json", ".md", ".png"))
    paths[0].write_text(_dump(to_json(report)), encoding="utf-8")
    paths[1].write_text(to_markdown(report, picture=paths[2].name), encoding="utf-8")
    first_runs = [next(run for run in report.runs if run.mode == mode) for mode in report.modes]
    draw_seats(first_runs, f"{report.workload.name}: seats in use over time", paths[2])
    return paths


def to_json(report: Report) -> dict[str, Any]:
    """Everything, the samples included."""
    return {
        "workload": report.workload.name,
        "num_requests": len(report.workload.requests),
        "prompt_tokens": report.workload.prompt_tokens,
        "output_tokens": report.workload.output_tokens,
        "circumstances": dict(report.circumstances),
        "ratios": {mode: ratio(report.runs, mode, BASELINE_MODE) for mode in report.modes},
        "runs": [{**asdict(run), "samples": _columns(run.samples), "errors": list(run.errors)} for run in report.runs],
    }


def _columns(samples: Sequence[SeatSample]) -> dict[str, list[float]]:
    """The time line as one list for each field, which is much smaller than one object for each sample."""
    names = [field.name for field in fields(SeatSample)]
    return {name: [round(getattr(sample, name), 3) for sample in samples] for name in names}


def _dump(values: Mapping[str, Any]) -> str:
    """JSON with a line for each value and each run: neither one endless line nor a line for each number."""
    runs = ",\n  ".join(json.dumps(run) for run in values["runs"])
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items() if key != "runs"]
    return "{\n" + ",\n".join([*lines, f' "runs": [\n  {runs}\n ]']) + "\n}\n"


def to_markdown(report: Report, *, picture: str) -> str:
    """The report for people."""
    workload = report.workload
    held = workload.arrives_at_once
    lines = [
        f"# Workload *{workload.name}*",
        "",
        f"{len(workload.requests)} requests, {workload.prompt_tokens} prompt tokens, {workload.output_tokens} output "
        "tokens; greedy, end-of-sequence ignored. Measured at the client, the modes in turn within one run.",
        *(
            ["A request of the benchmark's own holds each executor until its first batch can leave full."]
            if held
            else []
        ),
        "",
        *(f"- {name}: {text}" for name, text in report.circumstances.items()),
        "",
        *_comparison(report),
        *_table(report.runs),
        "",
        f"![Seats in use over time]({picture})",
        "",
        *_failures(report.runs),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _comparison(report: Report) -> list[str]:
    """One sentence for each mode against the baseline."""
    return [
        f"**{mode} gives {against:.2f} times the output tokens/s of {BASELINE_MODE}** (median over the rounds).\n"
        for mode in report.modes
        if mode != BASELINE_MODE and (against := ratio(report.runs, mode, BASELINE_MODE)) is not None
    ]


_COLUMNS: tuple[tuple[str, Callable[[Measures], float | None], str], ...] = (
    ("total s", lambda m: m.total_s, ".1f"),
    ("requests/min", lambda m: m.requests_per_min, ".1f"),
    ("output tokens/s", lambda m: m.output_tokens_per_s, ".1f"),
    ("TTFT p50 ms", lambda m: m.ttft_p50_ms, ".0f"),
    ("TTFT p99 ms", lambda m: m.ttft_p99_ms, ".0f"),
    ("inter-token p50 ms", lambda m: m.inter_token_p50_ms, ".1f"),
    ("inter-token p99 ms", lambda m: m.inter_token_p99_ms, ".1f"),
    ("tokens/step", lambda m: m.tokens_per_step, ".2f"),
    ("mean seats", lambda m: m.mean_seats, ".2f"),
    ("failed", lambda m: m.num_failed, ".0f"),
)


def _table(runs: Sequence[Run]) -> list[str]:
    titles = ["round", "mode", *(title for title, _, _ in _COLUMNS)]
    rows = [titles, ["---"] * len(titles)]
    for run in runs:
        figures = [(value(run.measures), form) for _, value, form in _COLUMNS]
        shown = ["–" if figure is None else format(figure, form) for figure, form in figures]
        rows.append([str(run.round), run.mode, *shown])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _failures(runs: Sequence[Run]) -> list[str]:
    return [f"- round {run.round}, {run.mode}: {error}" for run in runs for error in run.errors]
