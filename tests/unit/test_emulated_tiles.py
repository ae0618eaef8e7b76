"""Products by AMX with emulated tiles: layouts, pieces and numbers of rows, on a processor without AMX too."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.cpu.streams import STREAMS, WeightStream
from executor.native.build import BuildFailure, load_library
from executor.native.library import FOLDER

# The first test may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

SOURCE = Path(__file__).parents[1] / "emulated_tiles.cpp"


@pytest.fixture(scope="module")
def emulation() -> Any:
    headers = sorted(FOLDER.glob("*.h"))
    calls = load_library("emulated_tiles", (SOURCE,), headers, ("-march=x86-64", f"-I{FOLDER}"))
    assert not isinstance(calls, BuildFailure), calls
    calls.emulated_product.argtypes = (c_void_p, c_void_p, *(c_int64,) * 6, c_void_p)
    return calls


def small_integers(*shape: int, seed: int) -> Tensor:
    """Numbers whose products have exact sums in every order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(torch.bfloat16)


def product(emulation: ctypes.CDLL, weights: Tensor, rows: Tensor, stream: WeightStream, is_int8: bool) -> Tensor:
    out = torch.zeros(rows.shape[0], weights.shape[0])
    sizes = rows.shape[0], *weights.shape, is_int8, stream.is_interleaved, stream.prefetch_from_rows
    emulation.emulated_product(weights.data_ptr(), rows.data_ptr(), *sizes, out.data_ptr())
    return out


@pytest.mark.parametrize("stream", STREAMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 32, 33, 70])
# One step, a partial one, some pieces of many rows, and some of few.
@pytest.mark.parametrize("depth", [32, 80, 640, 2112])
def test_products_are_exact(emulation: Any, stream: WeightStream, num_rows: int, depth: int) -> None:
    weights, rows = small_integers(96, depth, seed=0), small_integers(num_rows, depth, seed=1)
    assert torch.equal(product(emulation, weights, rows, stream, False), rows.float() @ weights.float().T)


@pytest.mark.parametrize("stream", STREAMS, ids=str)
@pytest.mark.parametrize("num_rows", [16, 33])
def test_products_of_int8_are_exact(emulation: Any, stream: WeightStream, num_rows: int) -> None:
    # A largest number of 127 has the scale 1.
    weights, rows = small_integers(96, 80, seed=0), small_integers(num_rows, 80, seed=1)
    weights[:, 0] = 127
    assert torch.equal(product(emulation, weights, rows, stream, True), rows.float() @ weights.float().T)
