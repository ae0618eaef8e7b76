"""Any message of the protocol, by its descriptor: every field, edge values, and bytes that are no such message.

A hint gives values that make sense for a field, by its full name ("inflight.v1.SamplingParams.temperature"): without
some of those nothing gets past the first check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)
Hints = Mapping[str, st.SearchStrategy[Any]]

MAX_DEPTH = 4
# Of one message: with all of its fields wrong at once only the first check is tried.
MAX_FIELDS = 3
MAX_REPEATED = 3

_HUGE = 100_000
_TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "\0", "a\nb", "../..", "t1 t2", "\u202e", "\U0001f600", "a" * 129, "a" * _HUGE, "{{ x }}"]),
)
_INTEGERS: dict[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
# Around the limits of single fields and of all together.
FLOOD_SIZES = (300, 600, 5000, 9000, 30_000, 70_000)
_WIRE_TYPES: dict[int, int] = {
    FieldDescriptor.TYPE_STRING: 2,
    FieldDescriptor.TYPE_BYTES: 2,
    FieldDescriptor.TYPE_MESSAGE: 2,
    FieldDescriptor.TYPE_DOUBLE: 1,
    FieldDescriptor.TYPE_FIXED64: 1,
    FieldDescriptor.TYPE_SFIXED64: 1,
    FieldDescriptor.TYPE_FLOAT: 5,
    FieldDescriptor.TYPE_FIXED32: 5,
    FieldDescriptor.TYPE_SFIXED32: 5,
}
# Field 1000 of every wire type; no message has it.
_UNKNOWN_FIELDS = (b"\xc0\x3e\x01", b"\xc2\x3e\x03abc", b"\xc1\x3e12345678", b"\xc5\x3e1234", b"\xc3\x3e\xc4\x3e")


def messages_of(message_class: type[M], hints: Hints | None = None) -> st.SearchStrategy[M]:
    """Messages whose fields are set, each or not, to anything that their types can hold."""
    return _fields_of(cast(Descriptor, message_class.DESCRIPTOR), hints or {}, MAX_DEPTH).map(
        lambda fields: _build(message_class, fields)
    )


def bytes_of(message_class: type[M], hints: Hints | None = None) -> st.SearchStrategy[bytes]:
    """Such messages as they travel, some with unknown fields, with several of a oneof, cut short or not
    messages at all."""
    sound = messages_of(message_class, hints).map(lambda message: message.SerializeToString())
    return st.one_of(
        *[sound] * 8,
        st.tuples(sound, st.sampled_from(_UNKNOWN_FIELDS)).map(b"".join),
        st.tuples(sound, sound).map(b"".join),
        st.tuples(sound, st.integers(0, 40)).map(lambda one: one[0][: -one[1] or None]),
        st.binary(max_size=60),
        st.integers(1, 5000).map(nested_struct),
        floods_of(cast(Descriptor, message_class.DESCRIPTOR)),
    )


def floods_of(descriptor: Descriptor) -> st.SearchStrategy[bytes]:
    """Messages in which one field, somewhere, is there more often than any limit allows, or nearly so; empty each
    time."""
    numbers = st.sampled_from(FLOOD_SIZES)
    here = st.tuples(st.sampled_from([*descriptor.fields]), numbers).map(lambda one: _empty(one[0]) * one[1])
    inner = [field for field in descriptor.fields if field.message_type is not None]
    if not inner:
        return here if descriptor.fields else st.just(b"")
    within = st.sampled_from(inner).flatmap(
        lambda field: floods_of(cast(Descriptor, field.message_type)).map(lambda flood: nested(field.number, flood))
    )
    return st.one_of(here, within)


def _empty(field: FieldDescriptor) -> bytes:
    """A field with nothing in it, or 0."""
    wire_type = _WIRE_TYPES.get(field.type, 0)
    return _varint(field.number << 3 | wire_type) + bytes({0: 1, 1: 8, 2: 1, 5: 4}[wire_type])


def nested_struct(depth: int) -> bytes:
    """A message whose field 6 is a chat with template_kwargs (field 3) of structs in structs, so many of them."""
    inner = b""
    for _ in range(depth):
        # Struct.fields {key: "a", value: {struct_value: …}}
        value = nested(5, inner)
        inner = nested(1, nested(1, b"a") + nested(2, value))
        if len(inner) > _HUGE:
            break
    return nested(6, nested(3, inner))


def nested(number: int, content: bytes) -> bytes:
    """A field that holds bytes, text or a message, as it travels."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _fields_of(descriptor: Descriptor, hints: Hints, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    fields = [field for field in descriptor.fields if field.message_type is None or depth > 0]
    if not fields:
        return st.just({})
    return st.lists(st.sampled_from(fields), max_size=MAX_FIELDS, unique_by=lambda field: field.name).flatmap(
        lambda some: st.fixed_dictionaries({field.name: _values_of(field, hints, depth) for field in some})
    )


def _values_of(field: FieldDescriptor, hints: Hints, depth: int) -> st.SearchStrategy[Any]:
    any_value = _any_value_of(field, hints, depth)
    hint = hints.get(field.full_name)
    return any_value if hint is None else st.one_of(hint, hint, hint, any_value)


def _any_value_of(field: FieldDescriptor, hints: Hints, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        pairs = st.tuples(_one_of(key, hints, depth), _one_of(value, hints, depth))
        return st.lists(pairs, max_size=MAX_REPEATED)
    one = st.deferred(lambda: _one_of(field, hints, depth))
    return st.lists(one, max_size=MAX_REPEATED) if field.is_repeated else one


def _one_of(field: FieldDescriptor, hints: Hints, depth: int) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            return _fields_of(cast(Descriptor, field.message_type), hints, depth - 1)
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_FLOAT:
            return st.one_of(st.floats(width=32), st.sampled_from([0.0, 0.5, 1.0]))
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return st.floats()
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return st.one_of(st.binary(max_size=8), st.just(b"\xff" * _HUGE))
        case FieldDescriptor.CPPTYPE_STRING:
            return _TEXTS
        case number_type:
            least, most = _INTEGERS[number_type]
            return st.one_of(st.integers(0, 8), st.sampled_from([least, most]), st.integers(least, most))


def _build(message_class: type[M], fields: dict[str, Any]) -> M:
    message = message_class()
    _fill(message, fields)
    return message


def _fill(message: Message, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, name), value)
        elif field.is_repeated and field.message_type is not None:
            for one in value:
                _fill(getattr(message, name).add(), one)
        elif field.is_repeated:
            getattr(message, name).extend(value)
        elif field.message_type is not None:
            getattr(message, name).SetInParent()
            _fill(getattr(message, name), value)
        else:
            setattr(message, name, value)


def _fill_map(container: Any, pairs: list[tuple[Any, Any]]) -> None:
    for key, value in pairs:
        if isinstance(value, dict):
            _fill(container[key], value)
        else:
            container[key] = value
