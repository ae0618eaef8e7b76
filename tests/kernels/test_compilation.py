"""Compilation of every kernel to machine code for data-centre GPUs, without a GPU.

If nothing has changed since the figures were committed, a sample is compiled for one kind of GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.kernels.compile_kernels import MIN_FP8_CAPABILITY
from tests.kernels.pins import MAX_SHARED_BYTES, PINS, compile_for, faults, figures_of, find_digests

KERNELS = {
    *("attend_kernel", "attend_decodes_kernel", "combine_kernel", "write_kernel", "rope_write_kernel"),
    *("residual_norm_kernel", "gated_kernel", "squared_relu_kernel"),
    *("restrict_kernel", "draw_kernel", "choose_kernel", "resolve_kernel", "follow_tables_kernel"),
    *("shrink_kernel", "expand_kernel", "coded_product_kernel", "add_splits_kernel", "decode_kernel"),
    *("score_experts_kernel", "choose_experts_kernel", "order_pairs_kernel", "grouped_kernel", "add_experts_kernel"),
    *("copy_kernel", "change_kernel", "name_excluded_kernel"),
    *("short_conv_kernel", "delta_inputs_kernel", "delta_rule_kernel", "gated_norm_kernel"),
    *("mamba2_inputs_kernel", "mamba2_norm_kernel"),
}
# The sample is compiled for it: an H100.
USUAL_CAPABILITY = 90


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return find_digests(tmp_path_factory.mktemp("digests"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", MAX_SHARED_BYTES)
def test_everything_that_is_launched_compiles_and_fits(
    tmp_path: Path, capability: int, digests: dict[str, str]
) -> None:
    pinned = json.loads(PINS.read_text(encoding="utf-8"))
    is_pinned_version = triton.__version__ == pinned["triton"]
    has_changed = not is_pinned_version or digests[str(capability)] != pinned["digests"][str(capability)]
    if not has_changed and capability != USUAL_CAPABILITY:
        pytest.skip("nothing has changed since the figures were committed")
    result = compile_for([capability], tmp_path, *(() if has_changed else ("--sample",)))
    if result.returncode != 0 and not is_pinned_version and "gpu-name" in result.stderr:
        pytest.skip(f"triton {triton.__version__} does not know sm_{capability}")
    assert result.returncode == 0, result.stderr
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    fp8_kernels = {"round_rows_kernel", "gated_fp8_kernel"} if capability >= MIN_FP8_CAPABILITY else set()
    assert {kernel["kernel"] for kernel in compiled} == KERNELS | fp8_kernels
    assert not faults(compiled, capability)
    if is_pinned_version:
        found, expected = figures_of(compiled), pinned["kernels"][str(capability)]
        assert not regressions(found, expected if has_changed else {key: expected[key] for key in found})


def regressions(found: dict[str, list[Any]], pinned: dict[str, list[Any]]) -> list[str]:
    """What is worse than committed, in words. `python -m tests.kernels.pins` renews the file after a change that is
    meant."""
    worse = [f"{key} is not in both" for key in found.keys() ^ pinned.keys()]
    for key in found.keys() & pinned.keys():
        registers, spills, shared, buffers = pinned[key]
        limits = (registers * 1.1 + 4, spills * 1.1 + 16, shared + 1024)
        if any(value > limit for value, limit in zip(found[key], limits, strict=False)) or found[key][3] != buffers:
            worse.append(f"{key}: {found[key]}, pinned {pinned[key]}")
    return worse
