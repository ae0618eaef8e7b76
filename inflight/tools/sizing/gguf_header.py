"""The head of a GGUF file: its plain metadata and the shapes of its tensors, without the tensors.

Read here because what else reads it either takes ten seconds for the vocabulary or imports torch. Arrays are passed
over. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.model_source import GGUF_MAGIC, ModelError

Value = int | float | bool | str

# Number of the type → struct format.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
# Beyond any name or plain value there is; a larger one means that these are not the bytes of a length.
_MAX_TEXT_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata without its arrays, and the number of weights."""

    metadata: dict[str, Value]
    num_parameters: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads the header.

    Raises:
        ModelError: the file is none, or broken off.
    """
    try:
        with path.open("rb") as file:
            return _read(file)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (struct.error, KeyError, UnicodeDecodeError, _BrokenError):
        raise ModelError(f"{path} is not a GGUF file, or not a whole one") from None


class _BrokenError(Exception):
    """The bytes are not a valid header."""


def _read(file: BinaryIO) -> GgufHeader:
    if file.read(4) != GGUF_MAGIC:
        raise _BrokenError
    _number(file, "I")  # version
    num_tensors, num_values = _number(file, "Q"), _number(file, "Q")
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        name = _text(file)
        value = _value(file, _number(file, "I"))
        if value is not None:
            metadata[name] = value
    return GgufHeader(metadata, sum(_tensor_size(file) for _ in range(num_tensors)))


def _tensor_size(file: BinaryIO) -> int:
    _text(file)
    num_dimensions = _number(file, "I")
    if num_dimensions > 8:
        raise _BrokenError
    shape = [_number(file, "Q") for _ in range(num_dimensions)]
    file.seek(4 + 8, 1)  # type and offset
    return math.prod(shape)


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
