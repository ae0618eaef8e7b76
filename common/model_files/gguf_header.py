"""The header of a GGUF file: its metadata without large arrays, and the places of its tensors.

Other readers take ten seconds for the vocabulary, import torch, or do not know all types of tensors. A model may be
split into several files, whose names end with `-00001-of-00003.gguf`; the first of them has the metadata of the model.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

Number = int | float | bool
Value = Number | str | tuple[Number, ...]

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
    39: ("MXFP4", 32, 17),
}
# Tensors begin at multiples of this, unless the metadata has another number.
_ALIGNMENT = 32
# Arrays of more numbers belong to the vocabulary.
_MAX_ARRAY = 1024
_COPY_BYTES = 16 << 20
# Beyond any name or plain value there is; a larger one means that these are not the bytes of a length.
_MAX_TEXT_BYTES = 10_000_000
# The name of one of the files that a model was split into by llama-gguf-split.
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufError(ValueError):
    """A file that is not a GGUF file, or not a whole one. The text is for the user."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: its shape `[rows, columns]`, the number of its type, and its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    start: int
    file: Path

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
    """Metadata without arrays of texts and large ones, and the tensors."""

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
    """Reads the header of a model in one file or in several, of which `path` is any.

    Raises:
        GgufError: the file is none, or broken off, or another part is missing.
    """
    parts = parts_of(path)
    if missing := [part.name for part in parts if not part.is_file()]:
        raise GgufError(f"GGUF file {path} is one of {len(parts)} parts of a model; not found: {', '.join(missing)}")
    headers = [_read_part(part) for part in parts]
    count = int(str(headers[0].metadata.get("split.count", len(parts))))
    if len(parts) != max(count, 1):
        raise GgufError(
            f"GGUF file {path} is one of {count} parts of a model, whose names must end -00001-of-{count:05}.gguf"
        )
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    num_tensors = headers[0].metadata.get("split.tensors.count", len(tensors))
    if num_tensors != len(tensors):
        raise GgufError(f"the parts of GGUF file {path} have {len(tensors)} tensors instead of {num_tensors}")
    return GgufHeader(headers[0].metadata, tensors)


def parts_of(path: Path) -> tuple[Path, ...]:
    """Returns the files of a model in order: the file itself, or all parts if it is one by its name."""
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    names = (f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1))
    return tuple(path.with_name(name) for name in names)


def join_parts(header: GgufHeader, whole: Path) -> None:
    """Writes one file with the metadata of the first part of a model and the tensors of all.

    Raises:
        GgufError: the size of a tensor is not known.
    """
    tensors = header.tensors
    if unknown := next((tensor for tensor in tensors if tensor.type_number not in TENSOR_TYPES), None):
        raise GgufError(f"the parts of a GGUF file cannot be joined: {unknown.name} is of type {unknown.type_name}")
    with tensors[0].file.open("rb") as file:
        _read_metadata(file)
        size = file.tell()
        file.seek(0)
        begin = file.read(size)
    alignment = _alignment(header.metadata)
    with whole.open("wb") as file:
        # The number of tensors is after the magic number and the version.
        file.write(begin[:8] + struct.pack("<Q", len(tensors)) + begin[16:])
        start = 0
        for tensor in tensors:
            name, shape = tensor.name.encode(), tensor.shape[::-1]
            file.write(struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            file.write(struct.pack("<IQ", tensor.type_number, start))
            start += -(-tensor.num_bytes // alignment) * alignment
        for tensor in tensors:
            file.write(bytes(-file.tell() % alignment))
            _copy(tensor, file)


def _copy(tensor: GgufTensor, target: BinaryIO) -> None:
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        for begin in range(0, tensor.num_bytes, _COPY_BYTES):
            target.write(file.read(min(_COPY_BYTES, tensor.num_bytes - begin)))


def _read_part(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file:
            header = _read(file, path)
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


def _read(file: BinaryIO, path: Path) -> GgufHeader:
    num_tensors, metadata = _read_metadata(file)
    tensors = [_tensor(file, path) for _ in range(num_tensors)]
    first = file.tell() + -file.tell() % _alignment(metadata)
    return GgufHeader(metadata, tuple(replace(tensor, start=first + tensor.start) for tensor in tensors))


def _read_metadata(file: BinaryIO) -> tuple[int, dict[str, Value]]:
    """Reads from the beginning up to the tensors. Returns their number, too."""
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
    return num_tensors, metadata


def _alignment(metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _BrokenError
    return alignment


def _tensor(file: BinaryIO, path: Path) -> GgufTensor:
    """Reads where a tensor is, counted from the first one."""
    name, num_dimensions = _text(file), _number(file, "I")
    if num_dimensions > 8:
        raise _BrokenError
    columns_first = [_number(file, "Q") for _ in range(num_dimensions)]
    type_number, start = _number(file, "I"), _number(file, "Q")
    return GgufTensor(name, tuple(reversed(columns_first)), type_number, start, path)


def _value(file: BinaryIO, kind: int) -> Value | None:
    """Reads a value. Returns None for an array of texts or of many numbers."""
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        return _plain(file, _NUMBERS[kind])
    inner, length = _number(file, "I"), _number(file, "Q")
    if inner in _NUMBERS and length <= _MAX_ARRAY:
        return tuple(_plain(file, _NUMBERS[inner]) for _ in range(length))
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


def _plain(file: BinaryIO, form: str) -> Number:
    value: Number = struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]
    return value
