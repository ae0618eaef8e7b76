"""Structure-aware mutations of protocol messages: values at the edges of their types, and lists, texts and messages
that are missing, doubled, nested or moved. Much faster than `tests.fuzz.messages`, for millions of messages."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_MUTATIONS = 3
MAX_REPEATED = 4
# Of 1: how often a mutation goes into a message field instead of changing it as a whole.
DESCENDS = 0.8

_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_EDGES = (
    0,
    1,
    2,
    3,
    4,
    5,
    20,
    21,
    127,
    128,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 2,
    2**32 - 1,
    2**53,
    2**63,
    2**64 - 1,
    -1,
)
_FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-45, 3e38, -3e38, math.inf, -math.inf, math.nan)
_TEXTS = (
    *("", " ", "\0", "a\nb", "null", "{}", "[]", "{", "0", "true", '{"tools":null}', "r", "r~1", "../r", "t1 t2", "-"),
    *("\u202e", "\U0001f600", "a" * 600, "f" * 64, "F" * 64, "a" * 70_000, "[" * 10_000, '{"a":' * 2000),
)


class Mutator:
    """Changes messages in place, as the generator says."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def mutate(self, message: Message) -> None:
        """Makes one to `MAX_MUTATIONS` mutations somewhere in the message."""
        for _ in range(self.random.randint(1, MAX_MUTATIONS)):
            self._mutate(message)

    def _mutate(self, message: Message) -> None:
        while True:
            field = cast(FieldDescriptor, self.random.choice(message.DESCRIPTOR.fields))
            inner = self._inner(message, field)
            if inner is None or self.random.random() > DESCENDS or not inner.DESCRIPTOR.fields:
                break
            message = inner
        self._change(message, field)

    def _inner(self, message: Message, field: FieldDescriptor) -> Message | None:
        """Returns a message in the field, if there is one."""
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            return None
        if not field.is_repeated:
            inner: Message = getattr(message, field.name)
            return inner
        values = getattr(message, field.name)
        return self.random.choice(values) if values else None

    def _change(self, message: Message, field: FieldDescriptor) -> None:
        if self.random.random() < 0.1:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._change_map(getattr(message, field.name), field)
        elif field.is_repeated:
            self._change_list(getattr(message, field.name), field)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING and field.type == FieldDescriptor.TYPE_BYTES:
            setattr(message, field.name, self._bytes(getattr(message, field.name)))
        else:
            setattr(message, field.name, self._value(field))

    def _change_list(self, values: Any, field: FieldDescriptor) -> None:
        size, what = len(values), self.random.random()
        if size and what < 0.2:
            del values[self.random.randrange(size)]
        elif size and what < 0.4:
            values.append(values[self.random.randrange(size)])
        elif field.message_type is not None:
            values.add()
        elif size and what < 0.8:
            values[self.random.randrange(size)] = self._value(field)
        else:
            values.extend(self._value(field) for _ in range(self.random.randint(1, MAX_REPEATED)))

    def _change_map(self, values: Any, field: FieldDescriptor) -> None:
        assert field.message_type is not None
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        if value.message_type is None:
            values[self._value(key)] = self._value(value)

    def _value(self, field: FieldDescriptor) -> Any:
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.random.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return self.random.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return self._bytes(b"")
            case FieldDescriptor.CPPTYPE_STRING:
                return self.random.choice(_TEXTS)
            case number_type:
                least, most = _BITS[number_type]
                return min(max(self.random.choice(_EDGES), least), most)

    def _bytes(self, known: bytes) -> bytes:
        """Returns changed bytes: shortened, with another byte, or others."""
        if not known or self.random.random() < 0.3:
            return self.random.choice((b"", b"\0", b"\xff" * 8, b"\xff" * 1000))
        at = self.random.randrange(len(known))
        if self.random.random() < 0.5:
            return known[:at]
        return known[:at] + self.random.randbytes(1) + known[at + 1 :]

    def choice(self, values: Sequence[Any]) -> Any:
        """Returns one of the values."""
        return self.random.choice(values)
