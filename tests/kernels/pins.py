"""What the compiled kernels need on each kind of GPU, as it is committed: `python -m tests.kernels.pins` renews it.

Registers of a thread, bytes that it spills, bytes of shared memory of a program, and the stages of the buffers into
which loops load ahead. They follow from the version of Triton and a digest of the kernels and their launches, which are
committed with them. Figures are only committed of kernels without `faults`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton

REPOSITORY = Path(__file__).parents[2]
PINS = Path(__file__).with_suffix(".json")
# What a program may use (CUDA C++ programming guide, technical specifications per compute capability).
MAX_SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
FIGURES = ("registers", "spill_bytes", "shared_bytes", "buffers")


def compile_for(capabilities: Iterable[int], cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs `compile_kernels` in a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", *map(str, capabilities), *options],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=590, check=False,
    )  # fmt: skip


def find_digests(cache: Path) -> dict[str, str]:
    """Returns for each kind of GPU the digest of what determines the code of every kernel."""
    result = compile_for(MAX_SHARED_BYTES, cache, "--digest")
    assert result.returncode == 0, result.stderr
    return dict(zip(map(str, MAX_SHARED_BYTES), result.stdout.split(), strict=True))


def figures_of(compiled: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """`FIGURES` of each kernel by its name and constants; the largest where only the arguments' types differ."""
    found: dict[str, list[Any]] = {}
    for kernel in compiled:
        key = " ".join([kernel["kernel"], *map(str, kernel["constants"]), *(["fp8"] if kernel["has_fp8"] else [])])
        figures = [kernel[name] for name in FIGURES]
        known = found.get(key, figures)
        found[key] = [*map(max, figures[:3], known[:3]), known[3]]
    return found


def faults(compiled: list[dict[str, Any]], capability: int) -> list[str]:
    """Returns what no kernel may be like, in words."""
    found = []
    for kernel in compiled:
        name = f"{kernel['kernel']} {kernel['constants']}"
        if kernel["shared_bytes"] > MAX_SHARED_BYTES[capability]:
            found.append(f"{name} needs {kernel['shared_bytes']} bytes of shared memory")
        if kernel["kernel"] == "change_kernel" and kernel["num_fused"]:
            found.append(f"{name}: a penalty is a product and a subtraction, each rounded, as in torch and C++")
        loads_ahead = kernel["kernel"] == "attend_decodes_kernel" and not kernel["has_fp8"]
        if loads_ahead and min(kernel["buffers"], default=0) < 2:
            found.append(f"{name}: decodes load keys and values a tile ahead")
    return found


def main() -> int:
    """Compiles for every kind of GPU and writes the file; returns the exit code."""
    pinned: dict[str, dict[str, list[Any]]] = {}
    for capability in MAX_SHARED_BYTES:
        with tempfile.TemporaryDirectory() as cache:
            result = compile_for([capability], Path(cache))
        if result.returncode != 0:
            print(result.stderr, file=sys.stderr)
            return 1
        compiled = [json.loads(line) for line in result.stdout.splitlines()]
        if found := faults(compiled, capability):
            print(*found, sep="\n", file=sys.stderr)
            return 1
        pinned[str(capability)] = figures_of(compiled)
    with tempfile.TemporaryDirectory() as cache:
        write(find_digests(Path(cache)), pinned)
    return 0


def write(digests: dict[str, str], pinned: dict[str, dict[str, list[Any]]]) -> None:
    """Writes the file, a line for each kernel."""
    parts = []
    for capability, figures in pinned.items():
        lines = ",\n".join(f"   {json.dumps(key)}: {json.dumps(values)}" for key, values in figures.items())
        parts.append(f'  "{capability}": {{\n{lines}\n  }}')
    kernels = ",\n".join(parts)
    head = f' "triton": "{triton.__version__}",\n "digests": {json.dumps(digests)}'
    PINS.write_text(f'{{\n{head},\n "kernels": {{\n{kernels}\n }}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
