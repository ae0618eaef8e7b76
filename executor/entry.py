"""Entry point of an executor process. It sets what must be set before torch is loaded, then runs `executor.main`.

libgomp, torch's thread pool on a CPU, reads its environment when it is loaded. Its threads spin between operations,
about a millisecond by default. If another process uses a core, the threads then wait for one another at each of some
hundred operations of a step. Spinning a thirtieth of that is as fast while the cores are free, and delays a step less
when they are not. Measured on 2 cores, SmolLM2 in bfloat16, a step of 8 sequences at 300 tokens of context:

    spin count            300,000 (default)   40,000   10,000   2,000      0
    cores free                  40 ms          38 ms    39 ms   55 ms   72 ms
    one core busy              221 ms         252 ms   129 ms   73 ms
"""

from __future__ import annotations

import os
from collections.abc import Sequence

SPIN_COUNT = "10000"


def main(argv: Sequence[str]) -> int:
    """Runs an executor. Returns the exit code."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    from executor.main import main as run_executor

    return run_executor(argv)
