"""Products with matrices of codes, under Triton's interpreter, have the numbers of the dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inflight.executor.checkpoint.quantized_weight import Coded, FloatWeight, Matrix, QuantizedWeight
from inflight.executor.checkpoint.rounding import round_to
from inflight.executor.products import coded, tiling
from inflight.executor.products.coded import CodedMatrix, CodedWeight, coded_weight
from inflight.executor.products.tiling import product_tiling

NUM_ROWS, NUM_COLUMNS = 80, 288


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def whole_numbers(num_bits: int, group_size: int | None, num_columns: int = NUM_COLUMNS) -> QuantizedWeight:
    return round_to(numbers(NUM_ROWS, num_columns), num_bits, group_size or num_columns)


def with_zeros() -> QuantizedWeight:
    """Scales of float16 and zeros that are codes, as in GPTQ and AWQ; a group has the scale 0."""
    codes, zeros = bits(NUM_ROWS, NUM_COLUMNS // 2), bits(NUM_ROWS, 9) & 15
    scale = (numbers(NUM_ROWS, 9).half() * 0.1).float()
    scale[3, 2] = 0
    return QuantizedWeight(codes, scale, scale * -zeros.float(), 4, 32)


def with_order() -> QuantizedWeight:
    order = torch.randperm(NUM_COLUMNS, generator=torch.Generator().manual_seed(0))
    return replace(with_zeros(), column_order=order.int())


def fp8(rows: int, columns: int) -> FloatWeight:
    codes = bits(NUM_ROWS, NUM_COLUMNS)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = numbers(-(-NUM_ROWS // rows), -(-NUM_COLUMNS // columns)).abs() * 0.01
    return FloatWeight(codes, scale, 8, columns, rows)


def mxfp4() -> FloatWeight:
    scale = (bits(NUM_ROWS, 9) % 12 + 120).view(torch.float8_e8m0fnu)
    return FloatWeight(bits(NUM_ROWS, NUM_COLUMNS // 2), scale, 4, 32)


def nvfp4() -> FloatWeight:
    scale = (numbers(NUM_ROWS, 18).abs() * 10).to(torch.float8_e4m3fn)
    return FloatWeight(bits(NUM_ROWS, NUM_COLUMNS // 2), scale, 4, 16, factor=torch.full((NUM_ROWS,), 0.011))


FORMATS: dict[str, Callable[[], Coded]] = {
    "int4 with zeros": with_zeros,
    "int4 with offsets": lambda: whole_numbers(4, 16),
    "int4 of whole rows": lambda: whole_numbers(4, None),
    "int4, act-order": with_order,
    "int8": lambda: whole_numbers(8, 128, 256),
    "fp8 of rows": lambda: fp8(1, NUM_COLUMNS),
    "fp8 in blocks": lambda: fp8(32, 128),
    "fp8 in groups": lambda: fp8(1, 32),
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
}


@pytest.fixture
def decodes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step multiplies a decoded matrix, some rows at a time."""
    monkeypatch.setattr(coded, "LARGEST_STEP", 0)
    monkeypatch.setattr(coded, "DECODED_BYTES", 1)


def assert_multiplies(weight: CodedWeight, dense: Tensor, dtype: torch.dtype = torch.float32) -> None:
    inputs = numbers(5, dense.shape[1], seed=1).to(dtype)
    expected = inputs.double() @ dense.to(dtype).double().t()
    found = weight.product(inputs)
    assert found.dtype == dtype
    largest = float((found.double() - expected).abs().max() / expected.abs().max())
    assert largest < {torch.float32: 1e-6, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_few_tokens_are_those_of_the_dense_matrix(name: str) -> None:
    weight = FORMATS[name]()
    dense = weight.dequantized()
    assert_multiplies(coded_weight([weight]), dense)


@pytest.mark.usefixtures("decodes_all")
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_many_tokens_are_those_of_the_dense_matrix(name: str) -> None:
    weight = FORMATS[name]()
    dense = weight.dequantized()
    assert_multiplies(coded_weight([weight]), dense)


@pytest.mark.parametrize("name", ["int4 with zeros", "fp8 in blocks", "mxfp4"])
def test_decoded_numbers_are_those_of_the_dense_matrix_to_the_bit(name: str) -> None:
    weight = FORMATS[name]()
    # The interpreter rounds to bfloat16 in another way than a GPU.
    expected = weight.dequantized()
    (part,) = coded_weight([weight]).parts
    assert isinstance(part, CodedMatrix)
    found = torch.empty_like(expected)
    part.decode(0, found)
    assert torch.equal(found, expected)


def test_products_in_half_precision_have_the_numbers_in_half_precision() -> None:
    # The interpreter has no product in bfloat16.
    weight = with_zeros()
    dense = weight.dequantized()
    assert_multiplies(coded_weight([weight]), dense, torch.float16)


def test_columns_are_divided_between_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "MIN_TILES_PER_SPLIT", 1)
    assert product_tiling(5, NUM_ROWS, NUM_COLUMNS).splits == 3
    weight = fp8(32, 128)
    dense = weight.dequantized()
    assert_multiplies(coded_weight([weight]), dense)


@pytest.mark.parametrize(
    ("parts", "num_products"),
    [
        ((with_zeros, with_zeros), 1),
        ((with_order, with_order), 1),
        ((with_zeros, with_order), 2),
        ((lambda: fp8(1, NUM_COLUMNS), lambda: fp8(1, NUM_COLUMNS)), 1),
        # 80 rows are no multiple of 32: the next matrix begins within a block.
        ((lambda: fp8(32, 128), lambda: fp8(32, 128)), 2),
        ((lambda: fp8(16, 128), lambda: fp8(16, 128)), 1),
        ((nvfp4, nvfp4, mxfp4), 2),
        ((with_zeros, lambda: numbers(16, NUM_COLUMNS), with_zeros), 3),
    ],
)
def test_matrices_of_one_form_are_one_product(parts: tuple[Callable[[], Matrix], ...], num_products: int) -> None:
    matrices = [part() for part in parts]
    dense = torch.cat([one if isinstance(one, Tensor) else one.dequantized() for one in matrices])
    weight = coded_weight(matrices)
    assert len(weight.parts) == num_products
    assert weight.shape == dense.shape
    assert_multiplies(weight, dense)


def test_matrix_is_in_memory_once_and_as_small_as_its_parts() -> None:
    matrices = [with_zeros(), with_zeros()]
    weight = coded_weight(matrices)
    assert [part.codes.untyped_storage().nbytes() for part in matrices] == [0, 0]
    # Half a byte for each number; for each group of 32 a scale of 2 bytes and a zero.
    assert weight.num_bytes == 2 * NUM_ROWS * (NUM_COLUMNS // 2 + 9 * 3)
