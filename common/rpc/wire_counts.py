"""Limits on the number of fields of a serialized protobuf message, checked before it is parsed.

A message of 4 MB can hold two million empty submessages. Parsing it takes hundreds of milliseconds, during which the
event loop serves no other call. The check reads only tags and lengths and stops at the first limit that is exceeded, so
its cost is bounded by the limits and not by the size of the message.

Bytes that are not a message are left to the parser, which refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor

from inflight.common.errors import FieldViolation, RequestError, invalid

# Of a message and all messages within it. At most 60 ms for check and parser together, on a slow core.
MAX_FIELDS = 2**16

# A message of at most this size is parsed in less than a millisecond, whatever it contains.
SMALL_BYTES = 4096

# Wire types, the last three bits of a tag.
VARINT, FIXED64, LENGTH_DELIMITED, START_GROUP, END_GROUP, FIXED32 = range(6)


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Limits of a message.

    `max_fields` limits the fields of the message and of all messages within it; packed numbers are one field. `max_of`
    limits single fields, by full name (`inflight.v1.Chat.messages`); all values of the field in the message count. No
    two of them have the same last name.
    """

    max_fields: int = MAX_FIELDS
    max_of: Mapping[str, int] = field(default_factory=dict)


DEFAULT_LIMITS = WireLimits()


@dataclass(slots=True)
class _Known:
    """A length-delimited field that the check examines: its name if it is limited, and its type if that is a
    message."""

    name: str
    limit: int | None
    fields: _Fields | None


_Fields = dict[int, _Known]


class WireCounts:
    """The check of one message type."""

    def __init__(self, descriptor: Descriptor, limits: WireLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._known: dict[str, _Fields] = {}
        self._fields = self._read(descriptor)

    def _read(self, descriptor: Descriptor) -> _Fields:
        fields = self._known.get(descriptor.full_name)
        if fields is not None:
            return fields
        fields = self._known[descriptor.full_name] = {}
        for one in descriptor.fields:
            limit = self._limits.max_of.get(one.full_name)
            submessage = None if one.message_type is None else self._read(one.message_type)
            if limit is not None or submessage is not None:
                fields[one.number << 3 | LENGTH_DELIMITED] = _Known(one.name, limit, submessage)
        return fields

    def check(self, serialized: bytes) -> None:
        """Raises `RequestError` for a message that exceeds the limits."""
        if len(serialized) > SMALL_BYTES:
            exceeded = self._exceeded(serialized)
            if exceeded is not None:
                raise exceeded

    def _exceeded(self, serialized: bytes) -> RequestError | None:
        counts: dict[str, int] = {}
        left = self._limits.max_fields
        fields, position, end = self._fields, 0, len(serialized)
        outer: list[tuple[_Fields, int]] = []
        try:
            while position < end or outer:
                if position >= end:
                    fields, end = outer.pop()
                    continue
                left -= 1
                if left < 0:
                    return _too_many("request", "fields", self._limits.max_fields)
                tag = serialized[position]
                position += 1
                if tag > 127:
                    tag, position = _long_varint(serialized, position)
                if tag & 7 != LENGTH_DELIMITED:
                    position = _behind(serialized, position, tag & 7)
                    continue
                length = serialized[position]
                position += 1
                if length > 127:
                    length, position = _long_varint(serialized, position)
                known = fields.get(tag)
                if known is None:
                    position += length
                    continue
                if known.limit is not None:
                    count = counts[known.name] = counts.get(known.name, 0) + 1
                    if count > known.limit:
                        return _too_many(known.name, "entries", known.limit)
                if known.fields is None:
                    position += length
                elif length:
                    outer.append((fields, end))
                    fields, end = known.fields, position + length
        except IndexError:  # it ends within a field, or is not a message: the parser reports it
            pass
        return None


def _long_varint(serialized: bytes, position: int) -> tuple[int, int]:
    """Returns the number of several bytes that begins before `position`, and the position behind it."""
    value, shift = serialized[position - 1] & 127, 7
    while shift < 70:
        byte = serialized[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise IndexError


def _behind(serialized: bytes, position: int, wire_type: int) -> int:
    """Returns the position behind the value of a field that is not length-delimited; of a group behind its tag."""
    match wire_type:
        case 0:
            return position + 1 if serialized[position] < 128 else _long_varint(serialized, position + 1)[1]
        case 1:
            return position + 8
        case 5:
            return position + 4
        case 3 | 4:
            return position
        case _:
            raise IndexError


def _too_many(name: str, what: str, limit: int) -> RequestError:
    return invalid(FieldViolation(name, f"has too many {what}; at most {limit} are allowed"))
