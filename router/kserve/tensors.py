"""Tensors on the wire, in and out. Pure; knows no names.

A tensor's elements are in its own `contents` or, for all tensors of a message, in the raw contents: numbers
little-endian, BYTES each behind their length in four bytes. What does not fit its type or shape is a violation that
names the tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inflight.common.errors import FieldViolation, invalid
from inflight.kserve import grpc_service_pb2

Element = bool | int | float | bytes

# Types that a request of text can need, as numpy knows them. numpy has no BF16; clients do not send it.
NUMPY_TYPES = {
    "BOOL": "|b1",
    "INT8": "|i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "|u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
BYTES = "BYTES"

# The field of `contents` that holds a type. FP16 has none.
CONTENTS_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}

LENGTH = struct.Struct("<I")

# Of one tensor: more than any model's context, and few enough to be read quickly on the event loop.
MAX_ELEMENTS = 2**20
# Of one tensor of texts: the prompt, stop words, bad words.
MAX_TEXTS = 4096
# Bounds the cost of multiplying sizes.
MAX_DIMENSIONS = 8
# Of one request: more than there are names.
MAX_TENSORS = 100


@dataclass(frozen=True, slots=True)
class Tensor:
    """Elements in row order, and their shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: tuple[Element, ...]


def decode_inputs(request: grpc_service_pb2.ModelInferRequest) -> dict[str, Tensor]:
    """The tensors of a request by name. Raises `RequestError`."""
    raw = request.raw_input_contents
    if len(request.inputs) > MAX_TENSORS:
        raise invalid(FieldViolation("inputs", f"has {len(request.inputs)} tensors; at most {MAX_TENSORS} are allowed"))
    if raw and len(raw) != len(request.inputs):
        text = f"has {len(raw)} entries for {len(request.inputs)} tensors"
        raise invalid(FieldViolation("raw_input_contents", text))
    tensors: dict[str, Tensor] = {}
    for index, sent in enumerate(request.inputs):
        if sent.name in tensors:
            raise _wrong(sent.name, "is listed twice")
        tensors[sent.name] = _decode(sent, raw[index] if raw else None)
    return tensors


def encode_output(response: grpc_service_pb2.ModelInferResponse, tensor: Tensor) -> None:
    """Adds a tensor to a response."""
    response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    response.raw_output_contents.append(encode_elements(tensor.datatype, tensor.elements))


def encode_elements(datatype: str, elements: Sequence[Element]) -> bytes:
    """Elements as raw contents have them."""
    if datatype == BYTES:
        return b"".join(LENGTH.pack(len(one)) + one for one in elements if isinstance(one, bytes))
    return np.array(elements, dtype=NUMPY_TYPES[datatype]).tobytes()


def _decode(sent: grpc_service_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    if sent.parameters:
        names = ", ".join(sorted(sent.parameters))
        raise _wrong(sent.name, f"has parameters ({names[:100]}); these and shared memory are not supported")
    if sent.datatype != BYTES and sent.datatype not in NUMPY_TYPES:
        raise _wrong(sent.name, f"is of type {sent.datatype[:20]!r}; known: {', '.join([BYTES, *NUMPY_TYPES])}")
    if len(sent.shape) > MAX_DIMENSIONS:
        raise _wrong(sent.name, f"has {len(sent.shape)} dimensions; at most {MAX_DIMENSIONS} are allowed")
    if any(size < 0 for size in sent.shape):
        raise _wrong(sent.name, "has a shape with a negative size")
    if raw is None:
        elements = _contents(sent)
    elif sent.HasField("contents"):
        raise _wrong(sent.name, "has `contents` in addition to raw_input_contents")
    else:
        elements = _split(sent.name, raw) if sent.datatype == BYTES else _numbers(sent.name, sent.datatype, raw)
    if math.prod(sent.shape) != len(elements):
        raise _wrong(sent.name, f"has {len(elements)} elements, and its shape is {list(sent.shape)}")
    return Tensor(sent.name, sent.datatype, tuple(sent.shape), elements)


def _contents(sent: grpc_service_pb2.ModelInferRequest.InferInputTensor) -> tuple[Element, ...]:
    own = CONTENTS_FIELDS.get(sent.datatype)
    others = sorted(field.name for field, _ in sent.contents.ListFields() if field.name != own)
    if others:
        raise _wrong(sent.name, f"is of type {sent.datatype}, and its elements are in {', '.join(others)}")
    elements = () if own is None else getattr(sent.contents, own)
    _check_count(sent.name, len(elements), MAX_TEXTS if sent.datatype == BYTES else MAX_ELEMENTS)
    return tuple(elements)


def _numbers(name: str, datatype: str, raw: bytes) -> tuple[Element, ...]:
    kind = np.dtype(NUMPY_TYPES[datatype])
    if len(raw) % kind.itemsize:
        raise _wrong(name, f"has {len(raw)} bytes, and an element of type {datatype} takes {kind.itemsize}")
    _check_count(name, len(raw) // kind.itemsize, MAX_ELEMENTS)
    return tuple(np.frombuffer(raw, dtype=kind).tolist())


def _split(name: str, raw: bytes) -> tuple[Element, ...]:
    elements: list[bytes] = []
    begin = 0
    while begin < len(raw):
        if len(raw) - begin < LENGTH.size:
            raise _wrong(name, "ends within the length of an element")
        (length,) = LENGTH.unpack_from(raw, begin)
        begin += LENGTH.size
        if len(raw) - begin < length:
            raise _wrong(name, f"has an element of {length} bytes, of which {len(raw) - begin} are there")
        elements.append(raw[begin : begin + length])
        begin += length
        _check_count(name, len(elements), MAX_TEXTS)
    return tuple(elements)


def _check_count(name: str, num_elements: int, most: int) -> None:
    if num_elements > most:
        raise _wrong(name, f"has too many elements; at most {most} are allowed")


def _wrong(name: str, text: str) -> Exception:
    return invalid(FieldViolation(f"inputs[{name[:100]}]", text))
