"""The report of a run on a GPU: every figure beside its limit. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median, quantiles

from bench.gpu.figures import Figures, ServedRun
from bench.gpu.roofline import Limits, ModelShape

OWN_ENGINE = "inflight"
# What a decode step and a prompt shall reach of their limits, and *mixed* against continuous batching by transformers.
DECODE_GOAL, PREFILL_GOAL, MIXED_GOAL = 0.85, 0.60, 3.0


def to_json(figures: Figures) -> str:
    """Everything that was measured."""
    return json.dumps(asdict(figures), indent=1) + "\n"


def to_markdown(figures: Figures, shape: ModelShape) -> str:
    """The report for people."""
    limits = Limits(figures.copy_bytes_per_s, figures.matrix_operations_per_s)
    sections = [
        f"# {figures.model} on {figures.circumstances.get('gpu', 'a GPU')}",
        "\n".join(f"- {name}: {text}" for name, text in figures.circumstances.items()),
        f"Random weights, bfloat16, {shape.num_parameters / 1e9:.2f} billion parameters. Limits, measured in the same "
        f"run: copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s (read and written), matrix products "
        f"{limits.matrix_operations_per_s / 1e12:.0f} TFLOP/s.",
        *_section("Decode", _decode_rows(figures, shape, limits), f"Goal: {DECODE_GOAL:.0%} at 32 to 128 sequences."),
        *_section("Prefill", _prefill_rows(figures, shape, limits), f"Goal: {PREFILL_GOAL:.0%}."),
        *_section("Attention of one layer", _attention_rows(figures, shape, limits)),
        *_section("Workloads", _served_rows(figures.served), _against_peers(figures.served)),
        *_section("Not measured", [["what", "why"], *([gap.what, gap.reason] for gap in figures.missing)]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _section(title: str, rows: Sequence[Sequence[str]], remark: str = "") -> Iterable[str]:
    """Title, table and remark; nothing for a table without rows."""
    return (f"## {title}", table(rows), remark) if len(rows) > 1 else ()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as Markdown; the first is the header."""
    header, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *body))


def _decode_rows(figures: Figures, shape: ModelShape, limits: Limits) -> list[list[str]]:
    rows = [["sequences", "context", "step ms", "limit ms", "of limit", "device ms", "host ms exposed", "tokens/s"]]
    for point in figures.decodes:
        limit_s = limits.decode_s(shape, point.num_sequences, point.context)
        rows.append(
            [
                str(point.num_sequences),
                str(point.context),
                f"{point.step_s * 1e3:.2f}",
                f"{limit_s * 1e3:.2f}",
                f"{limit_s / point.step_s:.0%}",
                f"{point.device_s * 1e3:.2f}",
                f"{max(0.0, point.step_s - point.device_s) * 1e3:.2f}",
                f"{point.num_sequences / point.step_s:,.0f}",
            ]
        )
    return rows


def _prefill_rows(figures: Figures, shape: ModelShape, limits: Limits) -> list[list[str]]:
    rows = [["tokens", "step ms", "limit ms", "of limit", "tokens/s"]]
    for point in figures.prefills:
        limit_s = limits.prefill_s(shape, point.num_tokens)
        rows.append(
            [
                str(point.num_tokens),
                f"{point.step_s * 1e3:.1f}",
                f"{limit_s * 1e3:.1f}",
                f"{limit_s / point.step_s:.0%}",
                f"{point.num_tokens / point.step_s:,.0f}",
            ]
        )
    return rows


def _attention_rows(figures: Figures, shape: ModelShape, limits: Limits) -> list[list[str]]:
    rows = [["sequences", "context", "µs", "GB/s", "of copy"]]
    for point in figures.attention:
        num_bytes = point.num_sequences * point.context * shape.kv_bytes_per_layer_and_token
        rate = num_bytes / point.kernel_s
        rows.append(
            [
                str(point.num_sequences),
                str(point.context),
                f"{point.kernel_s * 1e6:.1f}",
                f"{rate / 1e9:,.0f}",
                f"{rate / limits.copy_bytes_per_s:.0%}",
            ]
        )
    return rows


def _served_rows(runs: Iterable[ServedRun]) -> list[list[str]]:
    rows = [
        ["workload", "engine", "output tokens/s", "total s", "TTFT p50/p99 ms", "inter-token p50/p99 ms", "host ms"]
    ]
    for run in runs:
        exposed = "–" if run.exposed_host_s is None else f"{run.exposed_host_s * 1e3:.2f}"
        rows.append(
            [
                run.workload,
                run.engine,
                f"{run.output_tokens / run.total_s:,.0f}",
                f"{run.total_s:.1f}",
                _spread(run.first_token_s),
                _spread(run.between_tokens_s),
                exposed,
            ]
        )
    return rows


def _spread(times_s: Sequence[float]) -> str:
    """Median and 99th percentile in milliseconds."""
    if not times_s:
        return "–"
    last = quantiles(times_s, n=100, method="inclusive")[98] if len(times_s) > 1 else times_s[0]
    return f"{median(times_s) * 1e3:.1f} / {last * 1e3:.1f}"


def _against_peers(runs: Sequence[ServedRun]) -> str:
    """Our tokens/s against each peer's on the same workload."""
    speeds = {(run.workload, run.engine): run.output_tokens / run.total_s for run in runs}
    sentences = [
        f"*{workload}*: {own / speed:.2f} times {engine}."
        for (workload, engine), speed in speeds.items()
        if engine != OWN_ENGINE and (own := speeds.get((workload, OWN_ENGINE))) is not None
    ]
    goal = f" Goal: {MIXED_GOAL:.0f} times transformers' continuous batching on *mixed*." if sentences else ""
    return " ".join(sentences) + goal
