"""Encoders of GGUF's superblocks of 256 numbers, rounded to nearest. The package `gguf` only decodes them.

llama.cpp searches for the scales with the least squared error instead, so its files of the same type are better.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.floating[Any]]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
SUPERBLOCK = 256


def quantize(numbers: Numbers, kind: gguf.GGMLQuantizationType) -> Bytes:
    """Returns the bytes of a matrix's rows, in any type that is encoded here or by `gguf`."""
    encode = {"Q4_K": _q4_k, "Q6_K": _q6_k}.get(kind.name)
    if encode is None:
        blocks: Bytes = gguf.quants.quantize(numbers, kind)
        return blocks
    return encode(numbers.reshape(-1, SUPERBLOCK)).reshape(len(numbers), -1)


def _q4_k(blocks: Numbers) -> Bytes:
    """Groups of 32 with a scale and a minimum of 6 bits each: `d * scale * code - dmin * minimum`."""
    groups = blocks.reshape(-1, 8, 32)
    low = groups.min(-1).clip(max=0)
    steps = (groups.max(-1).clip(min=0) - low) / 15
    d, dmin = _half(steps.max(-1) / 63), _half(-low.min(-1) / 63)
    scale, minimum = _codes(steps, d, 0, 63), _codes(-low, dmin, 0, 63)
    codes = _codes(groups + (dmin * minimum)[..., None], (d * scale)[..., None], 0, 15)
    scales, minima = scale.astype(np.uint8), minimum.astype(np.uint8)
    parts = [
        _bytes_of(d),
        _bytes_of(dmin),
        scales[:, :4] | (scales[:, 4:] >> 4 << 6),
        minima[:, :4] | (minima[:, 4:] >> 4 << 6),
        (scales[:, 4:] & 15) | (minima[:, 4:] << 4),
        _packed(codes, 4, 32),
    ]
    return np.concatenate(parts, 1)


def _q6_k(blocks: Numbers) -> Bytes:
    """Groups of 16 with a scale of 8 bits: `d * scale * (code - 32)`. The largest number of a group has the code 0."""
    groups = blocks.reshape(-1, 16, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
    steps = largest / -32
    d = _half(np.take_along_axis(steps, np.abs(steps).argmax(-1)[:, None], 1)[:, 0] / -128)
    scale = _codes(steps, d, -128, 127)
    codes = _codes(groups, (d * scale)[..., None], -32, 31) + 32
    low, high = codes.astype(np.uint8) & 15, codes.astype(np.uint8) >> 4
    return np.concatenate(
        [_packed(low, 4, 64), _packed(high, 2, 32), scale.astype(np.int8).view(np.uint8), _bytes_of(d)], 1
    )


def _half(numbers: Numbers) -> Numbers:
    """Returns `[blocks, 1]` numbers that float16 holds."""
    return numbers.astype(np.float16).astype(np.float32)[:, None]


def _bytes_of(half: Numbers) -> Bytes:
    return half.astype(np.float16).view(np.uint8)


def _codes(numbers: Numbers, step: Numbers, least: int, most: int) -> Numbers:
    """Returns the nearest whole multiples of a step; 0 where there is none."""
    return np.rint(np.divide(numbers, step, out=np.zeros_like(numbers), where=step != 0)).clip(least, most)


def _packed(codes: Any, num_bits: int, width: int) -> Bytes:
    """Packs the codes of each block. Each run of `width` bytes has first the lowest bits of all its bytes."""
    runs = codes.reshape(len(codes), -1, 8 // num_bits, width).astype(np.uint8)
    shifts = np.arange(0, 8, num_bits, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(runs << shifts, axis=2).reshape(len(codes), -1)
    return packed
