"""`make bench-gpu`: the steps of the engine on one NVIDIA GPU against the GPU's own limits.

Nothing is downloaded and nothing is served over a network. What cannot be measured, for lack of memory or of a package,
is named in the report with the reason, and the rest goes on. Needs no settings; `--help` lists what can be changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from inflight.bench.gpu.engine import device
from inflight.bench.gpu.engine import session as gpu
from inflight.bench.gpu.figures import (
    AttentionPoint,
    ChunkAttentionPoint,
    DecodePoint,
    GpuFigures,
    KernelTime,
    Missing,
    PrefillPoint,
)
from inflight.bench.gpu.report import page, values_of
from inflight.bench.gpu.roofline import SHAPES, ModelShape
from inflight.bench.report.page import write_report

DECODE_COUNTS = (1, 8, 32, 64, 128, 256)
CONTEXT = 1000
PROMPT_TOKENS = (512, 2048, 8192)
FP8_DECODE_COUNTS = (1, 32, 128)
# Steps whose kernels are timed one by one.
KERNEL_DECODE_COUNTS = (1, 32, 128)
KERNEL_PROMPT_TOKENS = 2048
ATTENTION_COUNTS = (1, 32, 128)
CHUNK_TOKENS = 1024
CHUNK_CONTEXTS = (1024, 8192)
CHUNK_BACKENDS = ("triton", "flashinfer")
REPORTS = Path("bench/reports")

Found = TypeVar("Found")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and reports; returns the exit code."""
    arguments = _parser().parse_args(argv)
    reason = gpu.why_not()
    if reason is not None:
        print(f"error: there is no GPU to measure: {reason}", file=sys.stderr)
        return 1
    for name in _names(arguments.models):
        print(f"==> {SHAPES[name].name}: limits of this GPU")
        limits = device.copy_bytes_per_s(), device.matrix_operations_per_s()
        figures = GpuFigures(gpu.circumstances(), SHAPES[name].name, *limits)
        for _ in measure(figures, SHAPES[name], arguments):
            # After each part, so that a run that is stopped keeps what it has measured.
            report = page(figures, SHAPES[name])
            paths = write_report(arguments.out, f"gpu-{name}", values_of(figures), report)
        print(f"\n{report.markdown()}\nreport: " + ", ".join(str(path) for path in paths))
    return 0


def measure(figures: GpuFigures, shape: ModelShape, arguments: argparse.Namespace) -> Iterator[None]:
    """Measures everything about one model, as far as it can be had, and yields after each part."""
    session = attempt(figures, "the model", lambda: gpu.GpuSession(shape))
    if session is None:
        yield
        return
    _measure_steps(figures, session, has_penalties=arguments.penalties)
    yield
    del session
    if arguments.fp8:
        fp8 = attempt(figures, "the model in FP8", lambda: gpu.GpuSession(shape, is_fp8=True))
        if fp8 is not None:
            _measure_decodes(figures, fp8, figures.fp8_decodes, FP8_DECODE_COUNTS, "FP8 decode")
            _measure_prefills(figures, fp8, figures.fp8_prefills, "FP8 prefill")
        yield


def _measure_steps(figures: GpuFigures, session: gpu.GpuSession, *, has_penalties: bool) -> None:
    _measure_decodes(figures, session, figures.decodes, DECODE_COUNTS, "decode")
    if has_penalties:
        points = figures.penalised_decodes
        _measure_decodes(figures, session, points, DECODE_COUNTS, "decode with penalties", has_penalties=True)
    _measure_prefills(figures, session, figures.prefills, "prefill")
    for count in ATTENTION_COUNTS:
        kernel_s = attempt(figures, f"attention, {count} sequences", partial(session.attention_s, count, CONTEXT))
        if kernel_s is not None:
            figures.attention.append(AttentionPoint(count, CONTEXT, kernel_s))
    _measure_chunks(figures, session)
    for count in KERNEL_DECODE_COUNTS:
        _measure_kernels(figures, f"{count} decodes", partial(session.decode_kernels, count, CONTEXT))
    _measure_kernels(
        figures, f"prompt of {KERNEL_PROMPT_TOKENS} tokens", partial(session.prefill_kernels, KERNEL_PROMPT_TOKENS)
    )


def _measure_decodes(
    figures: GpuFigures,
    session: gpu.GpuSession,
    points: list[DecodePoint],
    counts: Sequence[int],
    what: str,
    *,
    has_penalties: bool = False,
) -> None:
    for count in counts:
        work = partial(session.decode_s, count, CONTEXT, has_penalties=has_penalties)
        decode = attempt(figures, f"{what}, {count} sequences", work)
        if decode is not None:
            points.append(DecodePoint(count, CONTEXT, *decode))


def _measure_prefills(figures: GpuFigures, session: gpu.GpuSession, points: list[PrefillPoint], what: str) -> None:
    for num_tokens in PROMPT_TOKENS:
        prefill_s = attempt(figures, f"{what}, {num_tokens} tokens", partial(session.prefill_s, num_tokens))
        if prefill_s is not None:
            points.append(PrefillPoint(num_tokens, prefill_s))


def _measure_kernels(figures: GpuFigures, step: str, work: Callable[[], list[device.Kernel]]) -> None:
    kernels = attempt(figures, f"kernels of a step: {step}", work)
    for kernel in kernels or ():
        figures.kernels.append(KernelTime(step, kernel.name, kernel.num_launches, kernel.total_s))


def _measure_chunks(figures: GpuFigures, session: gpu.GpuSession) -> None:
    for context in CHUNK_CONTEXTS:
        for backend in CHUNK_BACKENDS:
            what = f"attention of a chunk by {backend}, context {context}"
            kernel_s = attempt(figures, what, partial(session.chunk_attention_s, CHUNK_TOKENS, context, backend))
            if kernel_s is not None:
                figures.chunk_attention.append(ChunkAttentionPoint(backend, CHUNK_TOKENS, context, kernel_s))


def attempt(figures: GpuFigures, what: str, work: Callable[[], Found]) -> Found | None:
    """Returns the result, or None with the reason noted where this machine cannot do it."""
    print(f"==> {figures.model}: {what}", flush=True)
    try:
        return work()
    except (RuntimeError, ImportError, ValueError) as error:
        text = str(error).strip().splitlines() or [""]
        reason = "out of memory" if "OutOfMemory" in type(error).__name__ else f"{type(error).__name__}: {text[0]}"
        print(f"    {what} is not measured: {reason}", file=sys.stderr)
        figures.missing.append(Missing(what, reason))
        return None


def _names(text: str) -> list[str]:
    """Returns the names of a list; none of an empty one."""
    return [name for name in text.split(",") if name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="8b,1b", help=f"of {', '.join(SHAPES)}; default: %(default)s")
    parser.add_argument("--penalties", action="store_true", help="measure decodes with penalties too")
    parser.add_argument("--fp8", action="store_true", help="measure steps with FP8 weights and KV too")
    parser.add_argument("--out", type=Path, default=REPORTS, help="folder of the reports; default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
