"""The block types of GGUF files, as codes with a scale and an offset per group.

The layouts are those of ggml-common.h in llama.cpp; `gguf.quants` computes the same numbers, bit by bit. A number is
`d * code + m`, where `d` and `m` are of float16, in k-quants times a small whole number. The products fit into float32
without rounding for all types whose offset is a multiple of the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.executor.checkpoint.quantized_weight import Coded, FloatWeight, QuantizedWeight, pack_halves

# Numbers of a superblock of k-quants.
SUPERBLOCK = 256
# Bytes of a file that are decoded at once, which takes some times as much memory.
PIECE_BYTES = 16 << 20
# The exponent of a scale of MXFP4 that stands for NaN.
NAN_EXPONENT = 255
# The codes of IQ4_NL and IQ4_XS stand for these numbers.
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Codes `[blocks, numbers]` uint8, and scale and offset `[blocks, groups]` float32."""

    codes: Tensor
    scale: Tensor
    offset: Tensor


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks: `decode` takes their bytes, `[blocks, num_bytes]`; None for numbers of e2m1. `bits` holds the
    largest code."""

    name: str
    num_numbers: int
    num_bytes: int
    bits: int
    group_size: int
    decode: Callable[[Tensor], Blocks] | None


def quantized_weight(kind: BlockType, rows: Tensor) -> Coded:
    """Returns the matrix whose rows are blocks, `[out, bytes of a row]` uint8.

    Raises:
        ValueError: a scale is not finite.
    """
    if kind.decode is None:
        return _mxfp4_weight(rows)
    pieces = [_decode_rows(kind, kind.decode, piece) for piece in rows.split(max(1, PIECE_BYTES // rows.shape[1]))]
    codes, scale, offset = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return QuantizedWeight(codes, scale, offset, kind.bits, kind.group_size)


def _mxfp4_weight(rows: Tensor) -> FloatWeight:
    """Returns the matrix of blocks of numbers of e2m1, whose first byte is the exponent of their scale plus 127."""
    blocks = rows.view(-1, MXFP4.num_bytes)
    exponents = blocks[:, :1].contiguous()
    if bool((exponents == NAN_EXPONENT).any()):
        raise ValueError("scales that are not finite")
    codes = pack_halves(_bits(blocks[:, 1:], 4, 16)).view(len(rows), -1)
    return FloatWeight(codes, exponents.view(len(rows), -1).view(torch.float8_e8m0fnu), 4, MXFP4.group_size)


def _decode_rows(kind: BlockType, decode: Callable[[Tensor], Blocks], rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns packed codes, scale and offset of some rows."""
    blocks = decode(rows.reshape(-1, kind.num_bytes))
    codes, scale, offset = (part.reshape(len(rows), -1) for part in (blocks.codes, blocks.scale, blocks.offset))
    return pack_halves(codes) if kind.bits == 4 else codes, scale, offset


def _half(blocks: Tensor, start: int) -> Tensor:
    """Returns the float16 number at byte `start` of each block, `[blocks, 1]` float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _bits(packed: Tensor, num_bits: int, width: int) -> Tensor:
    """Returns numbers of `num_bits`. Each run of `width` bytes has first the lowest bits of all its bytes, then the
    next ones."""
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8)[:, None]
    runs = packed.reshape(packed.shape[0], -1, 1, width)
    return ((runs >> shifts) & ((1 << num_bits) - 1)).flatten(1)


def _bit_of_each(packed: Tensor) -> Tensor:
    """Returns the bits of bytes in order, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[..., None] >> shifts) & 1).flatten(1)


def _scaled(codes: Tensor, scale: Tensor, zero: int) -> Blocks:
    """Returns blocks of `scale * (code - zero)`."""
    return Blocks(codes, scale, scale * -zero)


def _q4_0(blocks: Tensor) -> Blocks:
    return _scaled(_bits(blocks[:, 2:], 4, 16), _half(blocks, 0), 8)


def _q4_1(blocks: Tensor) -> Blocks:
    return Blocks(_bits(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Blocks:
    codes = _bits(blocks[:, 6:], 4, 16) | (_bit_of_each(blocks[:, 2:6]) << 4)
    return _scaled(codes, _half(blocks, 0), 16)


def _q5_1(blocks: Tensor) -> Blocks:
    codes = _bits(blocks[:, 8:], 4, 16) | (_bit_of_each(blocks[:, 4:8]) << 4)
    return Blocks(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Blocks:
    return _scaled(blocks[:, 2:] ^ 0x80, _half(blocks, 0), 128)


def _q2_k(blocks: Tensor) -> Blocks:
    scales, codes = blocks[:, :16], _bits(blocks[:, 16:80], 2, 32)
    return Blocks(codes, _half(blocks, 80) * (scales & 15).float(), -(_half(blocks, 82) * (scales >> 4).float()))


def _q3_k(blocks: Tensor) -> Blocks:
    # The third bit of a code is in the mask.
    codes = _bits(blocks[:, 32:96], 2, 32) | (_bits(blocks[:, :32], 1, 32) << 2)
    scales = _bits(blocks[:, 96:104], 4, 8) | (_bits(blocks[:, 104:108], 2, 4) << 4)
    return _scaled(codes, _half(blocks, 108) * (scales.float() - 32), 4)


def _q4_k(blocks: Tensor) -> Blocks:
    scale, offset = _k_scales(blocks)
    return Blocks(_bits(blocks[:, 16:], 4, 32), scale, offset)


def _q5_k(blocks: Tensor) -> Blocks:
    scale, offset = _k_scales(blocks)
    return Blocks(_bits(blocks[:, 48:], 4, 32) | (_bits(blocks[:, 16:48], 1, 32) << 4), scale, offset)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and offsets of the eight groups of Q4_K and Q5_K, of 6 bits each in bytes 4 to 15."""
    low, minimum, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    offset = torch.cat((minimum & 63, (high >> 4) | ((minimum >> 2) & 48)), dim=1)
    return _half(blocks, 0) * scale.float(), -(_half(blocks, 2) * offset.float())


def _q6_k(blocks: Tensor) -> Blocks:
    codes = _bits(blocks[:, :128], 4, 64) | (_bits(blocks[:, 128:192], 2, 32) << 4)
    return _scaled(codes, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float(), 32)


def _iq4_nl(blocks: Tensor) -> Blocks:
    return _scaled(_non_linear(_bits(blocks[:, 2:], 4, 16)), _half(blocks, 0), 128)


def _iq4_xs(blocks: Tensor) -> Blocks:
    shifts = torch.tensor((0, 4), dtype=torch.uint8)
    low = ((blocks[:, 4:8, None] >> shifts) & 15).flatten(1)
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((blocks[:, 2:4, None] >> pairs) & 3).flatten(1)
    scale = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    return _scaled(_non_linear(_bits(blocks[:, 8:], 4, 16)), scale, 128)


def _non_linear(codes: Tensor) -> Tensor:
    return torch.tensor([number + 128 for number in NON_LINEAR], dtype=torch.uint8)[codes.int()]


MXFP4 = BlockType("MXFP4", 32, 17, 4, 32, None)
# By the number of the type in the file.
BLOCK_TYPES: Mapping[int, BlockType] = {
    2: BlockType("Q4_0", 32, 18, 4, 32, _q4_0),
    3: BlockType("Q4_1", 32, 20, 4, 32, _q4_1),
    6: BlockType("Q5_0", 32, 22, 8, 32, _q5_0),
    7: BlockType("Q5_1", 32, 24, 8, 32, _q5_1),
    8: BlockType("Q8_0", 32, 34, 8, 32, _q8_0),
    10: BlockType("Q2_K", SUPERBLOCK, 84, 4, 16, _q2_k),
    11: BlockType("Q3_K", SUPERBLOCK, 110, 4, 16, _q3_k),
    12: BlockType("Q4_K", SUPERBLOCK, 144, 4, 32, _q4_k),
    13: BlockType("Q5_K", SUPERBLOCK, 176, 8, 32, _q5_k),
    14: BlockType("Q6_K", SUPERBLOCK, 210, 8, 16, _q6_k),
    20: BlockType("IQ4_NL", 32, 18, 8, 32, _iq4_nl),
    23: BlockType("IQ4_XS", SUPERBLOCK, 136, 8, 32, _iq4_xs),
    39: MXFP4,
}
