"""Tokens after a stop string: the executor does not see the stop, and they are no gap."""

from __future__ import annotations

from inflight.router.ledger.types import Demand
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2


def test_tokens_behind_a_stop_text_are_dropped_and_none_is_missing() -> None:
    stream = RequestStream(Demand("r", 2, 1), executor_pb2.Submit(), 0.0)
    assert stream.tokens(0, [10])
    stream.stop()
    assert all(stream.tokens(offset, [10 + offset]) for offset in (1, 2, 3))
    assert stream.output_ids == [10]


def test_token_that_is_missing_before_the_end_is_noticed() -> None:
    stream = RequestStream(Demand("r", 2, 1), executor_pb2.Submit(), 0.0)
    assert not stream.tokens(1, [11])
