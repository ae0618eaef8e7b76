"""A report as JSON: everything, the time lines and distributions included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from bench.measures import Run, SeatSample
from bench.report.figures import figures
from bench.report.report import Report, Section, stack_cost


def to_json(report: Report) -> dict[str, Any]:
    """Plain values."""
    return {
        "circumstances": dict(report.circumstances),
        "slo": asdict(report.slo),
        "price_per_hour": report.price_per_hour,
        "workloads": [_section(report, section) for section in report.sections],
    }


def dump(values: Mapping[str, Any]) -> str:
    """JSON with a line for each value and each run: neither one endless line nor a line for each number."""
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items() if key != "workloads"]
    workloads = ",\n".join(_dump_section(section) for section in values["workloads"])
    return "{\n" + ",\n".join([*parts, f' "workloads": [\n{workloads}\n ]']) + "\n}\n"


def _dump_section(section: Mapping[str, Any]) -> str:
    runs = ",\n    ".join(json.dumps(run) for run in section["runs"])
    parts = [f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in section.items() if key != "runs"]
    return "  {\n" + ",\n".join([*parts, f'   "runs": [\n    {runs}\n   ]']) + "\n  }"


def _section(report: Report, section: Section) -> dict[str, Any]:
    cost = stack_cost(section)
    return {
        "workload": section.workload.name,
        "num_requests": len(section.workload.requests),
        "prompt_tokens": section.workload.prompt_tokens,
        "output_tokens": section.workload.output_tokens,
        "concurrency": section.workload.concurrency,
        "compared": section.subject,
        "ratios": section.ratios(),
        "stack_cost": None if cost is None else asdict(cost),
        "summary": {mode: _summary(report, section, mode) for mode in section.modes},
        "runs": [_run(run) for run in section.runs],
    }


def _summary(report: Report, section: Section, mode: str) -> dict[str, Any]:
    spreads = {figure.title: figure.spread(section, mode) for figure in figures(report, section)}
    return {title: asdict(spread) for title, spread in spreads.items() if spread is not None}


def _run(run: Run) -> dict[str, Any]:
    # Not `asdict(run)`: it copies mappings by their own class, and the samples are better as columns.
    return {
        "mode": run.mode,
        "round": run.round,
        "measures": asdict(run.measures),
        "cores": dict(run.cores),
        "figures": dict(run.figures),
        "errors": list(run.errors),
        "distributions": {name: list(values) for name, values in asdict(run.distributions).items()},
        "samples": _columns(run.samples),
    }


def _columns(samples: Sequence[SeatSample]) -> dict[str, float | list[float]]:
    """The time line as one list for each field, or one number where it never changes: much smaller than objects."""
    columns = {
        field.name: [round(getattr(sample, field.name), 3) for sample in samples] for field in fields(SeatSample)
    }
    return {name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()}
