"""The header of a GGUF file: its scalar metadata, and the places of its tensors.

Other readers take ten seconds for the vocabulary, import torch, or do not know all types of
tensors. Arrays are skipped. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little endian.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

Value = int | float | bool | str

# Number of the type → struct format.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
MAGIC = b"GGUF"
# Number of a tensor's type → name, numbers in a block, bytes of a block (ggml.c of llama.cpp).
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
# Tensors begin at multiples of this, unless the metadata has another number.
_ALIGNMENT = 32
# Beyond any name or plain value there is; a larger one means that these are not the bytes of a length.
_MAX_TEXT_BYTES = 10_000_000


class GgufError(ValueError):
    """A file that is not a GGUF file, or not a whole one. The text is for the user."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: its shape `[rows, columns]`, the number of its type, and its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    start: int

    @property
    def type_name(self) -> str:
        """`Q4_K`, or the number of a type that is not in `TENSOR_TYPES`."""
        known = TENSOR_TYPES.get(self.type_number)
        return str(self.type_number) if known is None else known[0]

    @property
    def num_bytes(self) -> int:
        """Its size in the file; 0 if its type is not in `TENSOR_TYPES`."""
        _, num_numbers, num_bytes = TENSOR_TYPES.get(self.type_number, ("", 1, 0))
        return math.prod(self.shape) // num_numbers * num_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata without its arrays, and the tensors."""

    metadata: dict[str, Value]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """The architecture by its name in llama.cpp."""
        return str(self.metadata.get("general.architecture"))

    @property
    def num_parameters(self) -> int:
        """The number of weights."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def type_names(self) -> tuple[str, ...]:
        """The types of its tensors, the one of most weights first."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.type_name] += math.prod(tensor.shape)
        return tuple(name for name, _ in sizes.most_common())


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads the header.

    Raises:
        GgufError: the file is none, or broken off.
    """
    try:
        with path.open("rb") as file:
            header = _read(file)
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from None
    except (struct.error, KeyError, UnicodeDecodeError, _BrokenError):
        raise GgufError(f"{path} is not a GGUF file, or not a whole one") from None
    end = max((tensor.start + tensor.num_bytes for tensor in header.tensors), default=0)
    if (size := path.stat().st_size) < end:
        raise GgufError(f"GGUF file {path} is truncated: {size} bytes of at least {end}")
    return header


class _BrokenError(Exception):
    """The bytes are not a valid header."""


def _read(file: BinaryIO) -> GgufHeader:
    if file.read(4) != MAGIC:
        raise _BrokenError
    _number(file, "I")  # version
    num_tensors, num_values = _number(file, "Q"), _number(file, "Q")
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        name = _text(file)
        value = _value(file, _number(file, "I"))
        if value is not None:
            metadata[name] = value
    tensors = [_tensor(file) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", _ALIGNMENT))
    if alignment < 1:
        raise _BrokenError
    first = -(-file.tell() // alignment) * alignment
    return GgufHeader(metadata, tuple(replace(tensor, start=first + tensor.start) for tensor in tensors))


def _tensor(file: BinaryIO) -> GgufTensor:
    """Reads where a tensor is, counted from the first one."""
    name, num_dimensions = _text(file), _number(file, "I")
    if num_dimensions > 8:
        raise _BrokenError
    columns_first = [_number(file, "Q") for _ in range(num_dimensions)]
    type_number, start = _number(file, "I"), _number(file, "Q")
    return GgufTensor(name, tuple(reversed(columns_first)), type_number, start)


def _value(file: BinaryIO, kind: int) -> Value | None:
    """Reads a value. Returns None for an array."""
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        return _plain(file, _NUMBERS[kind])
    inner, length = _number(file, "I"), _number(file, "Q")
    if inner in _NUMBERS:
        file.seek(length * struct.calcsize(f"<{_NUMBERS[inner]}"), 1)
        return None
    for _ in range(length):
        _value(file, inner)
    return None


def _text(file: BinaryIO) -> str:
    length = _number(file, "Q")
    if length > _MAX_TEXT_BYTES:
        raise _BrokenError
    return file.read(length).decode(errors="replace")


def _number(file: BinaryIO, form: str) -> int:
    return int(_plain(file, form))


def _plain(file: BinaryIO, form: str) -> int | float | bool:
    value: int | float | bool = struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]
    return value
