"""Compilation of every kernel to machine code for data-centre GPUs, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
KERNELS = {
    *("attend_kernel", "combine_kernel", "write_kernel", "rope_write_kernel", "residual_norm_kernel", "gated_kernel"),
    *("restrict_kernel", "draw_kernel", "choose_kernel", "resolve_kernel", "follow_tables_kernel"),
    *("copy_kernel", "change_kernel", "name_excluded_kernel"),
}
# What a program may use (CUDA C++ programming guide, technical specifications per compute capability).
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


@pytest.mark.parametrize("capability", MAX_SHARED_BYTES)
def test_everything_that_is_launched_compiles_and_fits(tmp_path: Path, capability: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", str(capability)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in compiled} == KERNELS
    too_large = [kernel for kernel in compiled if kernel["shared_bytes"] > MAX_SHARED_BYTES[capability]]
    assert not too_large
    # A penalty is a product and a subtraction, each rounded, as in torch and C++
    fused = [kernel["num_fused"] for kernel in compiled if kernel["kernel"] == "change_kernel"]
    assert fused
    assert not any(fused)
