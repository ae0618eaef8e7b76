"""Limits on the fields of a serialized message, and how much of it is read to check them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, SupportsIndex, cast

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from inflight.common.errors import RequestError
from inflight.common.rpc.wire_counts import MAX_FIELDS, SMALL_BYTES, WireCounts, WireLimits
from inflight.v1 import inference_pb2
from tests.fuzz.messages import floods_of, messages_of, nested

REQUEST = inference_pb2.GenerateRequest
TYPE = cast(Descriptor, REQUEST.DESCRIPTOR)
CHAT, MESSAGES, METADATA = 6, 1, 24


class CountedBytes(bytes):
    """Counts the bytes that are looked at."""

    num_reads = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def counts(**limits: Any) -> WireCounts:
    return WireCounts(TYPE, WireLimits(**limits))


def refusal(check: WireCounts, serialized: bytes) -> str:
    with pytest.raises(RequestError) as error:
        check.check(serialized)
    return str(error.value)


FLOODS: dict[str, Callable[[int], bytes]] = {
    "messages": lambda size: nested(CHAT, b"\x0a\x00" * (size // 2)),
    "messages with parts": lambda size: nested(CHAT, nested(MESSAGES, b"\x12\x02\x0a\x00") * (size // 6)),
    "numbers": lambda size: b"\x48\x01" * (size // 2),
    "numbers of four bytes": lambda size: b"\xc5\x3e1234" * (size // 6),
    "numbers of eight bytes": lambda size: b"\xc1\x3e12345678" * (size // 10),
    "groups": lambda size: b"\xc3\x3e\xc4\x3e" * (size // 4),
    "a map": lambda size: b"\xc2\x01\x00" * (size // 3),
}


@pytest.mark.parametrize("name", FLOODS)
def test_flood_of_fields_is_refused_and_most_of_it_never_read(name: str) -> None:
    flood = CountedBytes(FLOODS[name](1_000_000))
    assert "at most 1000 are allowed" in refusal(counts(max_fields=1000), flood)
    assert flood.num_reads < 10_000


def test_field_with_a_limit_of_its_own_is_named() -> None:
    check = counts(max_of={"inflight.v1.ChatMessage.content": 3000})
    message = nested(MESSAGES, b"\x12\x00" * 1001)
    check.check(nested(CHAT, message * 2))
    # All messages together
    assert refusal(check, nested(CHAT, message * 3)) == "content: has too many entries; at most 3000 are allowed"


def test_fields_within_text_are_text() -> None:
    flood = FLOODS["messages"](10_000)
    counts(max_fields=10).check(nested(4, flood))
    counts(max_fields=10).check(nested(CHAT, nested(MESSAGES, nested(1, flood))))


def test_number_without_an_end_is_not_read_to_the_end() -> None:
    endless = CountedBytes(b"\x48" + b"\xff" * 1_000_000)
    counts().check(endless)
    assert endless.num_reads < 100


@pytest.mark.parametrize("cut", range(1, 40))
def test_what_ends_too_early_is_left_to_the_parser(cut: int) -> None:
    counts().check(nested(CHAT, nested(MESSAGES, nested(1, b"u" * SMALL_BYTES)))[:-cut])
    counts().check(nested(CHAT, nested(MESSAGES, nested(1, b"u" * 20)) * 1000)[:-cut])


@given(messages_of(REQUEST))
def test_message_within_the_limits_passes(message: inference_pb2.GenerateRequest) -> None:
    WireCounts(TYPE).check(message.SerializeToString())


@given(floods_of(TYPE))
def test_flood_that_passes_is_no_flood(flood: bytes) -> None:
    with suppress(RequestError):
        WireCounts(TYPE).check(flood)
        assert len(flood) < 20 * MAX_FIELDS
        with suppress(DecodeError):  # it may nest too deep
            REQUEST.FromString(flood)


@given(st.binary(min_size=1, max_size=60))
def test_no_bytes_keep_the_check_from_its_end(some: bytes) -> None:
    with suppress(RequestError):
        WireCounts(TYPE).check(some * (SMALL_BYTES // len(some) + 1))
