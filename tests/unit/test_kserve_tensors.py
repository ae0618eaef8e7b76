"""Tensors of the KServe protocol on the wire: what goes in comes out, and what does not fit is refused by name."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.common.errors import RequestError
from inflight.kserve import grpc_service_pb2
from inflight.router.kserve.tensors import (
    BYTES,
    CONTENTS_FIELDS,
    MAX_ELEMENTS,
    MAX_TEXTS,
    NUMPY_TYPES,
    Element,
    Tensor,
    decode_inputs,
    encode_elements,
    encode_output,
)


def elements_of(datatype: str) -> st.SearchStrategy[Element]:
    if datatype == BYTES:
        return st.binary(max_size=20)
    if datatype == "BOOL":
        return st.booleans()
    if datatype.startswith("FP"):
        return st.floats(width=int(datatype[2:]), allow_nan=False)  # type: ignore[arg-type]
    limits = np.iinfo(NUMPY_TYPES[datatype])
    return st.integers(int(limits.min), int(limits.max))


@st.composite
def tensors(draw: st.DrawFn, name: str = "x", datatypes: tuple[str, ...] = (BYTES, *NUMPY_TYPES)) -> Tensor:
    datatype = draw(st.sampled_from(datatypes))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = math.prod(shape)
    return Tensor(name, datatype, shape, tuple(draw(st.lists(elements_of(datatype), min_size=size, max_size=size))))


def by_raw(*given_tensors: Tensor) -> grpc_service_pb2.ModelInferRequest:
    request = grpc_service_pb2.ModelInferRequest()
    for tensor in given_tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(encode_elements(tensor.datatype, tensor.elements))
    return request


def by_contents(*given_tensors: Tensor) -> grpc_service_pb2.ModelInferRequest:
    request = grpc_service_pb2.ModelInferRequest()
    for tensor in given_tensors:
        sent = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        getattr(sent.contents, CONTENTS_FIELDS[tensor.datatype]).extend(tensor.elements)
    return request


def refusal(request: grpc_service_pb2.ModelInferRequest) -> str:
    with pytest.raises(RequestError) as error:
        decode_inputs(request)
    return error.value.description


@given(tensors("a"), tensors("b"))
def test_raw_contents_come_out_as_they_went_in(a: Tensor, b: Tensor) -> None:
    assert decode_inputs(by_raw(a, b)) == {"a": a, "b": b}


@given(tensors(datatypes=tuple(CONTENTS_FIELDS)))
def test_typed_contents_come_out_as_they_went_in(tensor: Tensor) -> None:
    assert decode_inputs(by_contents(tensor)) == {"x": tensor}


@given(tensors())
def test_output_can_be_read_as_an_input(tensor: Tensor) -> None:
    response = grpc_service_pb2.ModelInferResponse()
    encode_output(response, tensor)
    (output,) = response.outputs
    request = grpc_service_pb2.ModelInferRequest(raw_input_contents=response.raw_output_contents)
    request.inputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    assert decode_inputs(request) == {"x": tensor}


@given(st.binary(max_size=40), st.sampled_from((BYTES, *NUMPY_TYPES)), st.integers(0, 9))
def test_any_bytes_are_a_tensor_or_refused_by_name(raw: bytes, datatype: str, size: int) -> None:
    request = grpc_service_pb2.ModelInferRequest(raw_input_contents=[raw])
    request.inputs.add(name="x", datatype=datatype, shape=[size])
    try:
        decoded = decode_inputs(request)
    except RequestError as error:
        refused = error.description
    else:
        assert len(decoded["x"].elements) == size
        return
    assert refused.startswith("inputs[x]: ")


def test_bytes_are_each_behind_their_length_in_four_bytes_little_endian() -> None:
    raw = encode_elements(BYTES, (b"ab", b""))
    assert raw == struct.pack("<I2sI", 2, b"ab", 0)


def test_what_does_not_fit_is_said() -> None:
    one = Tensor("x", "INT32", (1,), (1,))
    request = by_raw(one)
    request.inputs[0].shape[0] = 2**40
    assert "has 1 elements, and its shape is [1099511627776]" in refusal(request)
    request = by_raw(one)
    request.inputs[0].shape[0] = -1
    assert "negative size" in refusal(request)
    assert "is listed twice" in refusal(by_raw(one, one))
    request = by_raw(one)
    request.raw_input_contents.append(b"")
    assert refusal(request) == "raw_input_contents: has 2 entries for 1 tensors"
    request = by_raw(one)
    request.inputs[0].contents.int_contents.append(1)
    assert "`contents` in addition to raw_input_contents" in refusal(request)
    request = by_contents(one)
    request.inputs[0].contents.fp32_contents.append(1)
    assert "its elements are in fp32_contents" in refusal(request)
    request = by_raw(one)
    request.inputs[0].datatype = "BF16"
    assert "is of type 'BF16'; known: BYTES, BOOL" in refusal(request)
    request = by_raw(one)
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    assert "has parameters (shared_memory_region)" in refusal(request)


def test_tensor_of_too_many_elements_is_refused_before_it_is_read() -> None:
    for datatype, size, most in (("INT8", 1, MAX_ELEMENTS), ("BYTES", 4, MAX_TEXTS)):
        request = grpc_service_pb2.ModelInferRequest(raw_input_contents=[bytes(size * (most + 1))])
        request.inputs.add(name="x", datatype=datatype, shape=[most + 1])
        assert refusal(request) == f"inputs[x]: has too many elements; at most {most} are allowed"
    request = grpc_service_pb2.ModelInferRequest()
    sent = request.inputs.add(name="x", datatype="BOOL", shape=[MAX_ELEMENTS + 1])
    sent.contents.bool_contents.extend([True] * (MAX_ELEMENTS + 1))
    assert "too many elements" in refusal(request)


def test_too_many_sizes_or_tensors_are_refused_before_they_are_reckoned_with() -> None:
    request = by_raw(Tensor("x", "INT32", (1,), (1,)))
    request.inputs[0].shape[:] = [2**62] * 200_000  # whose product takes minutes
    assert refusal(request) == "inputs[x]: has 200000 dimensions; at most 8 are allowed"
    request = grpc_service_pb2.ModelInferRequest()
    for number in range(1000):
        request.inputs.add(name=f"x{number}", datatype="INT32", shape=[0])
    assert refusal(request) == "inputs: has 1000 tensors; at most 100 are allowed"
