"""`python -m inflight.executor.native.prebuild FOLDER`: the C++ code for every x86-64 processor.

For an image without a compiler; see `inflight.executor.native.build`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from inflight.executor.native.library import prebuild_all

if __name__ == "__main__":
    for built in prebuild_all(Path(sys.argv[1])):
        print(built)
