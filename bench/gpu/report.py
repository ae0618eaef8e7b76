"""The report of a run on a GPU: every figure beside its limit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from inflight.bench.gpu.figures import (
    ChunkAttentionPoint,
    DecodePoint,
    GpuFigures,
    KernelTime,
    PrefillPoint,
)
from inflight.bench.gpu.roofline import Limits, ModelShape
from inflight.bench.report.page import Page, Part
from inflight.bench.report.table import Table

KIND = "gpu"
# Names of template instances are hundreds of characters long.
MAX_KERNEL_NAME = 80
# What a decode step and a prompt shall reach of their limits.
DECODE_GOAL, PREFILL_GOAL = 0.85, 0.60


def values_of(figures: GpuFigures) -> dict[str, Any]:
    """Everything that was measured, as plain values."""
    return {"report": KIND, **asdict(figures)}


def page(figures: GpuFigures, shape: ModelShape) -> Page:
    """Returns the page of a run. A table without rows is left out."""
    limits = Limits(figures.copy_bytes_per_s, figures.matrix_operations_per_s)
    note = (
        f"Random weights, bfloat16, {shape.num_parameters / 1e9:.2f} billion parameters. Limits, measured in the same "
        f"run: copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s (read and written), matrix products "
        f"{limits.matrix_operations_per_s / 1e12:.0f} TFLOP/s."
    )
    parts = [
        Part(
            "Decode", f"Goal: {DECODE_GOAL:.0%} at 32 to 128 sequences.", table=_decodes(figures.decodes, shape, limits)
        ),
        Part(
            "Decode with penalties",
            "Every sequence has penalties. The device's time is that of a step without them.",
            table=_decodes(figures.penalised_decodes, shape, limits),
        ),
        Part("Prefill", f"Goal: {PREFILL_GOAL:.0%}.", table=_prefills(figures.prefills, shape, limits)),
        Part(
            "Decode in FP8",
            "Weights of layers, keys and values in FP8; the limit counts their bytes.",
            table=_decodes(figures.fp8_decodes, shape, limits, is_fp8=True),
        ),
        Part(
            "Prefill in FP8",
            "The limit is that of bfloat16, so a share may exceed 100 %.",
            table=_prefills(figures.fp8_prefills, shape, limits),
        ),
        Part("Attention of one layer", table=_attention(figures, shape, limits)),
        Part("Attention of a prompt chunk in one layer", table=_chunk_attention(figures.chunk_attention)),
        *(
            Part(f"Kernels of a step: {step}", table=_kernels([time for time in figures.kernels if time.step == step]))
            for step in dict.fromkeys(time.step for time in figures.kernels)
        ),
        Part("Not measured", table=Table(["what", "why"], [[gap.what, gap.reason] for gap in figures.missing])),
    ]
    title = f"{figures.model} on {figures.circumstances.get('gpu', 'a GPU')}"
    return Page(title, figures.circumstances, [part for part in parts if part.table and part.table.rows], note)


def _decodes(points: Iterable[DecodePoint], shape: ModelShape, limits: Limits, *, is_fp8: bool = False) -> Table:
    header = ["sequences", "context", "step ms", "limit ms", "of limit", "device ms", "host ms exposed", "tokens/s"]
    rows = []
    for point in points:
        limit_s = limits.decode_s(shape, point.num_sequences, point.context, is_fp8=is_fp8)
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
    return Table(header, rows)


def _prefills(points: Iterable[PrefillPoint], shape: ModelShape, limits: Limits) -> Table:
    rows = []
    for point in points:
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
    return Table(["tokens", "step ms", "limit ms", "of limit", "tokens/s"], rows)


def _attention(figures: GpuFigures, shape: ModelShape, limits: Limits) -> Table:
    rows = []
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
    return Table(["sequences", "context", "µs", "GB/s", "of copy"], rows)


def _kernels(times: Sequence[KernelTime]) -> Table:
    total_s = sum(time.total_s for time in times)
    rows = [
        [
            time.kernel[:MAX_KERNEL_NAME],
            str(time.num_launches),
            f"{time.total_s / max(1, time.num_launches) * 1e6:.1f}",
            f"{time.total_s * 1e3:.3f}",
            f"{time.total_s / total_s:.1%}",
        ]
        for time in times
    ]
    return Table(["kernel", "launches", "µs each", "ms", "share"], rows)


def _chunk_attention(points: Iterable[ChunkAttentionPoint]) -> Table:
    rows = [
        [point.backend, str(point.num_tokens), str(point.context), f"{point.kernel_s * 1e6:.1f}"] for point in points
    ]
    return Table(["backend", "tokens", "context", "µs"], rows)
