"""The prediction for GPUs that are not there: `python -m inflight.bench.gpu.predict`. Needs no GPU.

Counts launches and bytes of decode steps of Llama-3-8B and writes `gpu-prediction` into the folder of the reports. To
be run again when a kernel or the decoder changes.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# Kernels are interpreted; triton reads this when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

from inflight.bench.gpu.engine.session import Sizes
from inflight.bench.gpu.engine.traffic import decode_launches
from inflight.bench.gpu.prediction import CONTEXT, KIND, SEQUENCE_COUNTS, CountedStep, page_of, values_of
from inflight.bench.gpu.roofline import LLAMA_3_8B
from inflight.bench.report.page import write_report

REPORTS = Path("bench/reports")


def main(argv: Sequence[str] | None = None) -> int:
    """Counts and reports; returns the exit code."""
    folder = Path(*(sys.argv[1:] if argv is None else argv) or [str(REPORTS)])
    sizes = Sizes(**{name: value for name, value in asdict(LLAMA_3_8B).items() if name != "name"})
    steps = []
    for is_fp8, count in itertools.product((False, True), SEQUENCE_COUNTS):
        print(f"==> {count} sequences{', FP8' if is_fp8 else ''}", flush=True)
        launches = decode_launches(sizes, count, CONTEXT, is_fp8=is_fp8)
        steps.append(CountedStep(count, CONTEXT, tuple(launches.items()), is_fp8))
    values = values_of(steps)
    page = page_of(values)
    paths = write_report(folder, KIND, values, page)
    print(f"\n{page.markdown()}\nreport: " + ", ".join(str(path) for path in paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
