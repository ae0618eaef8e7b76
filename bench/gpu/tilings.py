"""Search for tilings of attention on one NVIDIA GPU: `python -m inflight.bench.gpu.tilings`.

Times attention of one layer, with the heads of Llama-3-8B or of another shape, for every candidate, and prints the
fastest beside the tiling that `executor/kernels/tiling.py` chooses. Nothing is changed by it: the constants of that
module follow from its results. Candidates that a GPU cannot run are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from inflight.bench.gpu.engine.session import why_not
from inflight.bench.gpu.engine.tiling_trial import Case, default_tiling, time_s, try_once
from inflight.bench.gpu.roofline import SHAPES
from inflight.executor.kernels.tiling import Tiling

NUM_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate and its time, in seconds."""

    tiling: Tiling
    layer_s: float


def cases(name: str, dtype_name: str) -> list[Case]:
    """Returns decodes of short and long contexts, and chunks with and without a prefix."""
    shape = SHAPES[name]
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype_name)
    decodes = [(1, 1000), (32, 1000), (128, 1000), (16, 8000)]
    chunks = [(1024, 1024), (2048, 8192)]
    return [
        *(Case(*heads, count, context, 0) for count, context in decodes),
        *(Case(*heads, 1, context, num_tokens) for num_tokens, context in chunks),
    ]


def candidates(case: Case) -> Iterator[Tiling]:
    """Yields the default tiling, then others."""
    default = default_tiling(case)
    yield default
    if case.num_chunk_tokens:
        for rows, keys, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            yield Tiling(rows, keys, 1, warps, stages)
        return
    for keys, warps, stages in itertools.product((16, 32, 64, 128), (1, 2, 4), (2, 3, 4, 5)):
        yield replace(default, keys=keys, num_warps=warps, num_stages=stages)
    for splits, span in itertools.product((4, 8, 16, 32), (128, 256, 512)):
        yield replace(default, splits=splits, span_keys=span)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m inflight.bench.gpu.tilings", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", default="8b", help=f"of {', '.join(SHAPES)}; default: %(default)s")
    parser.add_argument("--kv-dtypes", default="bfloat16", help="bfloat16, fp8; default: %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="compiling processes")
    arguments = parser.parse_args(argv)
    reason = why_not()
    if reason is not None:
        print(f"error: there is no GPU to measure: {reason}", file=sys.stderr)
        return 1
    # Each process compiles into the same cache on disk.
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as workers:
        for name, dtype_name in itertools.product(arguments.models.split(","), arguments.kv_dtypes.split(",")):
            trials = [(case, list(dict.fromkeys(candidates(case)))) for case in cases(name, dtype_name)]
            compiled = [workers.map(try_once, itertools.repeat(case), tilings) for case, tilings in trials]
            for (case, tilings), runs in zip(trials, compiled, strict=True):
                usable = [tiling for tiling, can_run in zip(tilings, runs, strict=True) if can_run]
                measured = [Measured(tiling, time_s(case, tiling)) for tiling in usable]
                _print(case, measured, len(tilings))
    return 0


def _print(case: Case, measured: list[Measured], num_candidates: int) -> None:
    print(f"\n{case}: {len(measured)} of {num_candidates} candidates ran", flush=True)
    default = default_tiling(case)
    for index, found in enumerate(sorted(measured, key=lambda found: found.layer_s)):
        if index < NUM_SHOWN or found.tiling == default:
            mark = " (default)" if found.tiling == default else ""
            print(f"  {found.layer_s * 1e6:8.1f} µs  {found.tiling}{mark}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
