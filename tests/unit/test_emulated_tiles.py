"""Products by AMX with emulated tiles: layouts, pieces and numbers of rows, on a processor without AMX too."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_int64, c_void_p
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.executor.cpu.streams import STREAMS, WeightStream
from inflight.executor.native.library import INSTRUCTION_SETS
from tests.support.device.native_builds import INSTRUCTION_SETS as USABLE
from tests.support.device.native_builds import emulation_of_amx, library_of

# The first test may wait for the compiler.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def emulation() -> Any:
    calls = emulation_of_amx().calls
    calls.emulated_product.argtypes = (c_void_p, c_void_p, *(c_int64,) * 6, c_void_p)
    return calls


@pytest.mark.skipif("amx" not in USABLE, reason="the processor has no AMX")
@pytest.mark.parametrize("num_rows", [3, 16])
@pytest.mark.parametrize("depth", [16, 32])
def test_emulated_tiles_sum_as_the_processor_does(num_rows: int, depth: int) -> None:
    library_of("amx")  # requests the system's permission
    calls = emulation_of_amx(*INSTRUCTION_SETS[0].compiler_flags).calls
    row_bytes = [64, 2 * depth, 64, *(0 for _ in range(13))]
    rows_of_tiles = [num_rows, num_rows, depth // 2, *(0 for _ in range(13))]
    configuration = struct.pack("<BB14x16H16B", 1, 0, *row_bytes, *rows_of_tiles)
    generator = torch.Generator().manual_seed(4)
    rows, columns = (torch.randn(16, 32, generator=generator).to(torch.bfloat16) for _ in range(2))
    sums = torch.randn(16, 16, generator=generator)

    found = []
    for add in (calls.add_by_processor, calls.add_by_emulation):
        found.append(sums.clone())
        add(configuration, *(c_void_p(tensor.data_ptr()) for tensor in (found[-1], rows, columns)))

    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][num_rows:], sums[num_rows:])
    assert not torch.equal(found[0][:num_rows], sums[:num_rows])


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


def rounded(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Groups of 64 numbers, transformed and rounded as in int8.h: integers `[rows, groups, 64]`, scales."""
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(64)] for i in range(64)])
    padded = torch.nn.functional.pad(numbers.float(), (0, -numbers.shape[1] % 64))
    groups = padded.unflatten(1, (-1, 64)) @ hadamard
    largest = groups.abs().amax(-1, keepdim=True)
    return (groups * (127 / largest)).round(), largest / 127


@pytest.mark.parametrize("stream", STREAMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 16, 33, 70])
@pytest.mark.parametrize("depth", [64, 80, 640])
def test_products_of_int8_are_those_of_the_rounded_numbers(
    emulation: Any, stream: WeightStream, num_rows: int, depth: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    weights, rows = (torch.randn(count, depth, generator=generator).to(torch.bfloat16) for count in (96, num_rows))

    found = product(emulation, weights, rows, stream, True)

    columns, column_scales = rounded(weights)
    factors, row_scales = rounded(rows)
    wanted = torch.einsum("rgd,cgd->rc", (factors * row_scales).double(), (columns * column_scales).double()) / 64
    # A number may be halfway between two integers, and is then rounded either way.
    assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-3 * depth**0.5)
    # Rounding changes products by a share of their size alone.
    plain = rows.double() @ weights.double().T
    assert (found - plain).norm() / plain.norm() < 0.02


@pytest.mark.parametrize("is_int8", [False, True], ids=["bfloat16", "int8"])
def test_products_are_the_same_for_every_number_of_rows(emulation: Any, is_int8: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weights, rows = (torch.randn(count, 1200, generator=generator).to(torch.bfloat16) for count in (96, 70))
    together = product(emulation, weights, rows, STREAMS[0], is_int8)
    for start, end in ((0, 1), (3, 19), (16, 49), (69, 70)):
        some = rows[start:end].contiguous()
        assert torch.equal(product(emulation, weights, some, STREAMS[0], is_int8), together[start:end])
