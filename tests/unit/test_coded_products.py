"""Products with quantized matrices against the dequantized ones: formats, groups, orders and numbers of rows, in every
build that this processor can run."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.executor.checkpoint.quantized_weight import (
    Coded,
    FloatWeight,
    QuantizedWeight,
    pack_halves,
)
from inflight.executor.checkpoint.rounding import round_to
from inflight.executor.cpu.coded_weights import GROUP_SIZES, encode, is_supported
from inflight.executor.cpu.decoder import _coded_part, _CodedPart
from inflight.executor.native.build import BuildFailure, load_library
from inflight.executor.native.library import FOLDER, usable_instruction_sets
from tests.support.device.native_builds import (
    BEST_FIRST,
    INSTRUCTION_SETS,
    QUICKLY_COMPILED,
    SOURCES,
    emulation_of_amx,
)

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

SOURCE = SOURCES / "coded_products.cpp"
COLUMNS, DEPTH = 64, 384
EMULATED = "emulated tiles"
DTYPES = [torch.float32, torch.bfloat16]
# Relative distance of products: sums in float32, and with bfloat16 scales of 11 bits, or with AMX weights of 8.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-4}
TOLERANCE_OF_ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2.5e-3}
# One row, groups of registers of every size, more than one tile, and more than one pass over unpacked codes.
ROW_COUNTS = (1, 2, 5, 12, 13, 32, 33, 70)


# Where the processor has AMX, the fast tests use that.
SLOW_WITH_AMX = (pytest.mark.slow,) if "amx" in INSTRUCTION_SETS else ()


@pytest.fixture(scope="module", params=[*BEST_FIRST, pytest.param(EMULATED, marks=SLOW_WITH_AMX)])
def calls(request: pytest.FixtureRequest) -> Any:
    library: Any = emulation_of_amx().calls if request.param == EMULATED else compiled(request.param)
    # Emulated tiles do not need the processor's, which the system would refuse where there are none.
    assert request.param == EMULATED or library.inflight_prepare()
    library.rounds_weights = request.param in ("amx", EMULATED)
    library.coded_product.argtypes = (
        c_void_p,
        *(c_int64, c_void_p) * 1,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
    )
    return library


def compiled(instructions: str) -> Any:
    flags = next(each for each in usable_instruction_sets() if each.name == instructions).compiler_flags
    headers = sorted(FOLDER.glob("*.h"))
    flags = (*flags, QUICKLY_COMPILED, f"-I{FOLDER}")
    library = load_library("coded_products", (SOURCE, FOLDER / "pool.cpp"), headers, flags)
    assert not isinstance(library, BuildFailure), library
    return library


def product(calls: Any, parts: Sequence[Tensor | Coded], rows: Tensor, *, rounds_rows: bool = False) -> Tensor:
    """Rows times the parts, which are next to each other."""
    columns, depth = sum(part.shape[0] for part in parts), rows.shape[1]
    plain = torch.zeros(columns, depth, dtype=rows.dtype)
    coded, kept, first = [], [], 0
    for part in parts:
        if not isinstance(part, Tensor):
            entry, tensors = _coded_part(part, first, rows.dtype, rounds_rows)
            coded.append(entry)
            kept.append(tensors)
        else:
            plain[first : first + part.shape[0]] = part
        first += part.shape[0]
    out = torch.full((rows.shape[0], columns), float("nan"))
    entries = (_CodedPart * len(coded))(*coded)
    numbers = rows.contiguous()
    is_bfloat16 = rows.dtype == torch.bfloat16
    sizes = columns, depth, numbers.data_ptr(), rows.shape[0], is_bfloat16
    calls.coded_product(ctypes.addressof(entries), len(coded), plain.data_ptr(), *sizes, out.data_ptr())
    return out


def expected(parts: list[Tensor | Coded], rows: Tensor) -> Tensor:
    dense = [part.to(rows.dtype) if isinstance(part, Tensor) else part.dequantized() for part in parts]
    return rows.double() @ torch.cat([part.double() for part in dense]).T


def expected_of_rounded(weight: QuantizedWeight, rows: Tensor) -> Tensor:
    """Rows, rounded in 32 numbers or smaller groups, times the codes above the center, and exact rows times the rest of
    the weights, one number for each group."""
    coded = encode(weight, rows.dtype)
    count = min(coded.group_size, 32)
    parts = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % count)).view(rows.shape[0], -1, count)
    if weight.column_order is not None:
        parts = rows.float()[:, weight.column_order.long()].view(parts.shape)
    scale = parts.abs().amax(-1, keepdim=True) / 127
    rounded = ((parts * (127 / parts.abs().amax(-1, keepdim=True))).round() * scale).flatten(1)[:, : rows.shape[1]]
    exact = parts.flatten(1)[:, : rows.shape[1]]
    shift = (weight.offset + weight.scale * coded.center).repeat_interleave(weight.group_size, dim=1)
    dense = QuantizedWeight(weight.codes, weight.scale, weight.offset, weight.bits, weight.group_size).dequantized()
    return rounded.double() @ (dense - shift).double().T + exact.double() @ shift.double().T


def assert_near(calls: Any, found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE_OF_ROUNDED if calls.rounds_weights else TOLERANCE
    assert float((found - wanted).norm() / wanted.norm()) < tolerance[dtype]


def random_weight(
    bits: int,
    group_size: int,
    depth: int = DEPTH,
    *,
    seed: int = 0,
    is_symmetric: bool = False,
    has_order: bool = False,
) -> QuantizedWeight:
    """Random codes, scales that no 16 bits hold, and offsets that are no multiples of them unless it is symmetric."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (COLUMNS, depth), generator=generator, dtype=torch.uint8)
    scale = torch.rand(COLUMNS, depth // group_size, generator=generator) * 0.02 + 1e-4
    offset = (
        scale * -(1 << (bits - 1)) if is_symmetric else -scale * torch.rand(scale.shape, generator=generator) * 2**bits
    )
    order = torch.randperm(depth, generator=generator).to(torch.int32) if has_order else None
    return QuantizedWeight(pack_halves(codes) if bits == 4 else codes, scale, offset, bits, group_size, order)


def random_fp8(group_size: int, row_block: int = 1, depth: int = DEPTH) -> FloatWeight:
    """Random codes of all numbers, and scales that no 16 bits hold."""
    generator = torch.Generator().manual_seed(group_size)
    codes = torch.randint(256, (COLUMNS, depth), generator=generator, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # NaN
    scale = torch.rand(-(-COLUMNS // row_block), -(-depth // group_size), generator=generator) * 0.01 + 1e-4
    return FloatWeight(codes, scale, 8, group_size, row_block)


def random_fp4(scale_dtype: torch.dtype, depth: int = DEPTH) -> FloatWeight:
    """Random codes with the scales of MXFP4, or those of NVFP4 with a factor that no 16 bits hold."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (COLUMNS, depth // 2), generator=generator, dtype=torch.uint8)
    if scale_dtype == torch.float8_e8m0fnu:
        exponents = torch.randint(100, 130, (COLUMNS, depth // 32), generator=generator, dtype=torch.uint8)
        return FloatWeight(codes, exponents.view(scale_dtype), 4, 32)
    scale = (torch.rand(COLUMNS, depth // 16, generator=generator) * 400 + 0.01).to(scale_dtype)
    return FloatWeight(codes, scale, 4, 16, factor=torch.rand(COLUMNS, generator=generator) * 1e-3)


# Groups that end within a row, whole rows, also of a depth that is no multiple of 16, and blocks.
FLOATS: dict[str, FloatWeight] = {
    "fp8 in blocks": random_fp8(128, 32),
    "fp8 in groups": random_fp8(256),
    "fp8 of rows": random_fp8(DEPTH),
    "fp8 of short rows": random_fp8(72, depth=72),
    "mxfp4": random_fp4(torch.float8_e8m0fnu),
    "nvfp4": random_fp4(torch.float8_e4m3fn),
}
FLOATS_OF_DEPTH = [weight for weight in FLOATS.values() if weight.shape[1] == DEPTH]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_products_are_those_of_the_dense_floats_and_a_row_does_not_depend_on_the_others(
    calls: Any, name: str, dtype: torch.dtype
) -> None:
    weight = FLOATS[name]
    rows = random_rows(max(ROW_COUNTS), weight.shape[1], dtype)
    for num_rows in (1, 13, 70):
        assert_near(calls, product(calls, [weight], rows[:num_rows]), expected([weight], rows[:num_rows]), dtype)
    alone = torch.cat([product(calls, [weight], row[None]) for row in rows])
    for num_rows in ROW_COUNTS:
        assert torch.equal(product(calls, [weight], rows[:num_rows]), alone[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["fp8 in blocks", "mxfp4", "nvfp4"])
def test_every_float_is_decoded_exactly(calls: Any, name: str, dtype: torch.dtype) -> None:
    # Given each code in each place of a lane, with scales of 1, and rows that read one of them
    of_name = FLOATS[name]
    codes = torch.stack([torch.arange(256, dtype=torch.uint8).roll(shift) for shift in range(COLUMNS)])
    codes[(codes & 127) == 127] = 0
    if of_name.bits == 4:
        codes = pack_halves(codes % 16)
    num_groups = 256 // of_name.group_size
    ones = torch.full((COLUMNS, num_groups), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    scale = ones if of_name.scale.dtype == ones.dtype else ones.float().to(of_name.scale.dtype)
    weight = FloatWeight(codes, scale, of_name.bits, of_name.group_size)
    found = product(calls, [weight], torch.eye(256).to(dtype))
    assert torch.equal(found.T, weight.numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_rounded_rows_multiply_fp4_as_whole_numbers(calls: Any, name: str, dtype: torch.dtype) -> None:
    weight = FLOATS[name]
    whole = weight.to_whole_numbers()
    for num_rows in (1, 13, 70):
        rows = random_rows(num_rows, DEPTH, dtype)
        found, wanted = product(calls, [weight], rows, rounds_rows=True), expected_of_rounded(whole, rows)
        assert float((found - wanted).norm() / wanted.norm()) < 3 * TOLERANCE[dtype]


def test_rows_for_fp8_are_not_rounded(calls: Any) -> None:
    weight, rows = FLOATS["fp8 in blocks"], random_rows(5, DEPTH, torch.float32)
    assert torch.equal(product(calls, [weight], rows, rounds_rows=True), product(calls, [weight], rows))


def test_scales_of_fp4_keep_their_numbers_and_a_byte_where_they_are_powers() -> None:
    for name, itemsize in (("mxfp4", 1), ("nvfp4", 2)):
        assert encode(FLOATS[name], torch.float32).scales.itemsize == itemsize
    # The least exponent is no normal number of float32.
    weight = random_fp4(torch.float8_e8m0fnu)
    weight.scale.view(torch.uint8)[3, 1] = 0
    assert torch.equal(encode(weight, torch.bfloat16).scales, weight.scale.float())


def random_rows(num_rows: int, depth: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, depth, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("group_size", [*GROUP_SIZES, 48, 192, DEPTH])
def test_products_are_those_of_the_dequantized_matrix(
    calls: Any, group_size: int, is_symmetric: bool, bits: int, dtype: torch.dtype
) -> None:
    weight = random_weight(bits, group_size, is_symmetric=is_symmetric)
    for num_rows in (1, 13, 70):
        rows = random_rows(num_rows, DEPTH, dtype)
        assert_near(calls, product(calls, [weight], rows), expected([weight], rows), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
# Less than a vector of codes, no multiple of 16, and an odd number of groups of 16.
@pytest.mark.parametrize("depth", [6, 72, 80, 2064])
def test_a_whole_row_may_be_a_group(calls: Any, depth: int, bits: int, dtype: torch.dtype) -> None:
    weight, rows = random_weight(bits, depth, depth), random_rows(14, depth, dtype)
    assert_near(calls, product(calls, [weight], rows), expected([weight], rows), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_differ_in_bits_groups_and_orders_and_may_be_plain(calls: Any, dtype: torch.dtype) -> None:
    parts: list[Tensor | Coded] = [
        random_weight(4, 16, seed=1, has_order=True),
        random_weight(8, 32, seed=2),
        torch.randn(COLUMNS, DEPTH, generator=torch.Generator().manual_seed(3)) * 0.1,
        random_weight(8, 128, seed=4, is_symmetric=True, has_order=True),
        random_weight(4, DEPTH, seed=5),
        *FLOATS_OF_DEPTH,
    ]
    for num_rows in (1, 40):
        rows = random_rows(num_rows, DEPTH, dtype)
        found, wanted = product(calls, parts, rows), expected(parts, rows)
        for first in range(0, found.shape[1], COLUMNS):
            some = slice(first, first + COLUMNS)
            assert_near(calls, found[:, some], wanted[:, some], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rounds_rows", [False, True])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    calls: Any, rounds_rows: bool, bits: int, dtype: torch.dtype
) -> None:
    for weight in (random_weight(bits, 32, has_order=True), random_weight(bits, 128, is_symmetric=True)):
        rows = random_rows(max(ROW_COUNTS), DEPTH, dtype)
        alone = torch.cat([product(calls, [weight], row[None], rounds_rows=rounds_rows) for row in rows])
        for num_rows in ROW_COUNTS:
            some = product(calls, [weight], rows[:num_rows], rounds_rows=rounds_rows)
            assert torch.equal(some, alone[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("group_size", [*GROUP_SIZES, 48])
def test_rounded_rows_are_multiplied_exactly(
    calls: Any, group_size: int, is_symmetric: bool, bits: int, dtype: torch.dtype
) -> None:
    weight = random_weight(bits, group_size, is_symmetric=is_symmetric, has_order=is_symmetric)
    for num_rows in (1, 13, 70):
        rows = random_rows(num_rows, DEPTH, dtype)
        found, wanted = product(calls, [weight], rows, rounds_rows=True), expected_of_rounded(weight, rows)
        assert float((found - wanted).norm() / wanted.norm()) < 3 * TOLERANCE[dtype]
        # The loss by rounding.
        exact = expected([weight], rows)
        assert 1e-4 < float((found - exact).norm() / exact.norm()) < 0.012


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_with_rounded_rows_differ_and_may_be_plain(calls: Any, dtype: torch.dtype) -> None:
    parts: list[Tensor | QuantizedWeight] = [
        random_weight(4, 16, seed=1, has_order=True),
        random_weight(8, 16, seed=2),
        torch.randn(COLUMNS, DEPTH, generator=torch.Generator().manual_seed(3)) * 0.1,
        random_weight(4, 16, seed=4, is_symmetric=True),
        random_weight(4, 128, seed=5),
    ]
    rows = random_rows(40, DEPTH, dtype)
    found = product(calls, [*parts], rows, rounds_rows=True)
    for index, part in enumerate(parts):
        alone = expected([part], rows) if isinstance(part, Tensor) else expected_of_rounded(part, rows)
        some = found[:, index * COLUMNS : (index + 1) * COLUMNS]
        assert float((some - alone).norm() / alone.norm()) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("depth", [6, 72, 80, 2064])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_rows_may_end_within_a_group(calls: Any, bits: int, depth: int) -> None:
    weight, rows = random_weight(bits, depth, depth), random_rows(14, depth, torch.bfloat16)
    found, exact = product(calls, [weight], rows, rounds_rows=True), expected([weight], rows)
    assert float((found - exact).norm() / exact.norm()) < 0.012


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_tiles_multiply_the_rounded_weights(calls: Any, group_size: int, is_symmetric: bool, bits: int) -> None:
    if not calls.rounds_weights:
        pytest.skip("this build scales the sums of groups")
    weight = random_weight(bits, group_size, is_symmetric=is_symmetric)
    weight.scale[:] = weight.scale.half().float()
    zeros = torch.randint(1 << bits, weight.scale.shape, generator=torch.Generator().manual_seed(6))
    weight.offset[:] = -weight.scale * (1 << (bits - 1) if is_symmetric else zeros)
    # To the nearest bfloat16, of two equally near ones the larger magnitude.
    dense = weight.dequantized().float().view(torch.int32)
    rounded = ((dense + 0x8000) >> 16 << 16).view(torch.float32).to(torch.bfloat16)
    for num_rows in (1, 70):
        rows = random_rows(num_rows, DEPTH, torch.bfloat16)
        # Of a matrix with codes in another part, because one without any has none of these products.
        wanted = product(calls, [rounded, weight], rows)[:, :COLUMNS]
        assert torch.equal(product(calls, [weight], rows), wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_without_scale_is_its_offset(calls: Any, bits: int) -> None:
    weight = random_weight(bits, 32)
    weight.scale[:, 1::3] = 0
    weight.offset[0] = 0
    rows = random_rows(3, DEPTH, torch.float32)
    assert_near(calls, product(calls, [weight], rows), expected([weight], rows), torch.float32)


@pytest.mark.parametrize("rounds_rows", [False, True])
def test_a_number_that_is_not_finite_stays_in_its_row(calls: Any, rounds_rows: bool) -> None:
    rows = random_rows(20, 80, torch.bfloat16)
    rows[7, 79] = float("nan")
    found = product(calls, [random_weight(4, 80, 80)], rows, rounds_rows=rounds_rows)
    assert found.isnan().any(dim=1).tolist() == [row == 7 for row in range(20)]


@pytest.mark.parametrize(("bits", "zero", "highest"), [(4, 8, 15), (4, 7, 15), (8, 128, 255), (8, 32, 63)])
def test_symmetric_formats_have_no_shifts(bits: int, zero: int, highest: int) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(highest + 1, (COLUMNS, DEPTH), generator=generator, dtype=torch.uint8)
    scale = torch.rand(COLUMNS, DEPTH // 32, generator=generator)
    packed = pack_halves(codes) if bits == 4 else codes
    coded = encode(QuantizedWeight(packed, scale, scale * -zero, bits, 32), torch.bfloat16)
    assert coded.center == zero
    assert coded.shifts is None


def test_scales_that_sixteen_bits_hold_are_kept_in_them_without_a_change() -> None:
    weight = random_weight(4, 32)
    halves = weight.scale.half().float()
    zeros = torch.randint(16, halves.shape, generator=torch.Generator().manual_seed(0)).float()
    coded = encode(QuantizedWeight(weight.codes, halves, -halves * zeros, 4, 32), torch.float32)
    assert coded.scales.dtype == torch.float16
    assert torch.equal(coded.scales.float() * coded.factors[:, None], halves)
    assert encode(weight, torch.float32).scales.dtype == torch.float32
    assert encode(weight, torch.bfloat16).scales.dtype == torch.float16


def test_unusual_groups_are_left_to_dense_products() -> None:
    assert not is_supported(random_weight(8, 24))
    assert is_supported(random_weight(8, 48))


def test_an_order_that_is_no_permutation_is_refused() -> None:
    weight = random_weight(4, 32)
    order = torch.arange(DEPTH, dtype=torch.int32).clamp(max=DEPTH - 2)
    with pytest.raises(ValueError, match="not a permutation"):
        encode(QuantizedWeight(weight.codes, weight.scale, weight.offset, 4, 32, order), torch.float32)


@pytest.mark.parametrize(("bits", "share"), [(4, 1 / 15), (8, 1 / 127)])
def test_rounding_changes_a_number_by_at_most_half_a_step(bits: int, share: float) -> None:
    weight = random_rows(COLUMNS, DEPTH, torch.float32)
    weight[3, :32] = 0.5
    rounded = round_to(weight, bits)
    groups, changes = (part.view(COLUMNS, -1, rounded.group_size) for part in (weight, rounded.dequantized() - weight))
    extent = groups.amax(-1) - groups.amin(-1) if bits == 4 else groups.abs().amax(-1)
    assert (changes.abs().amax(-1) <= extent * share / 2 + 1e-6).all()


def test_rounding_to_4_bits_keeps_zeros() -> None:
    weight = random_rows(COLUMNS, DEPTH, torch.float32)
    weight[:, ::3] = 0
    weight[0] += 4 * (weight[0] != 0)

    rounded = round_to(weight, 4).dequantized()

    assert (rounded[weight == 0] == 0).all()
