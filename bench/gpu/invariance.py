"""Whether the logits of a decode depend on how many others are in its step, and what the steps take.

    python -m inflight.bench.gpu.invariance 8b

Prints a JSON object for each number of decodes. Attention adds in an order that does not depend on the batch; matrix
products of cuBLAS may, with the algorithm that it chooses for the number of rows. The environment of the process
decides what it may choose from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from inflight.bench.gpu.engine import session as gpu
from inflight.bench.gpu.roofline import SHAPES

COUNTS = (1, 8, 32, 128, 256)
CONTEXT = 300


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inflight.bench.gpu.invariance", description=__doc__)
    parser.add_argument("model", choices=SHAPES)
    session = gpu.GpuSession(SHAPES[parser.parse_args(argv).model])
    alone = session.first_logits(1, CONTEXT)
    for count in COUNTS:
        beside = session.first_logits(count, CONTEXT)
        step_s, device_s = session.decode_s(count, CONTEXT)
        distance = float((beside.float() - alone.float()).norm() / alone.float().norm())
        figures = {
            "decodes": count,
            "has_same_bits": bool((beside == alone).all()),
            "relative_distance": distance,
            "has_same_token": bool(beside.argmax() == alone.argmax()),
            "step_ms": round(1000 * step_s, 3),
            "device_ms": round(1000 * device_s, 3),
        }
        print(json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
