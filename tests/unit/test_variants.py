"""The choice among several models of one name, and its measurement."""

from __future__ import annotations

import pytest

from inflight.router.api.service import sticky_key
from inflight.router.config.tenants import Variant, choose_variant, share_of
from inflight.router.dispatch.pools import NUM_KEPT_LATENCIES, VariantMeter, VariantMeters, percentile
from inflight.router.ledger.types import Demand
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2, inference_pb2

A, B, C = Variant("a", 90), Variant("b", 10), Variant("c", 25)
KEYS = [f"session-{i}" for i in range(4000)]


def test_models_are_chosen_in_proportion_to_their_weights() -> None:
    num_a = sum(choose_variant((A, B), key) is A for key in KEYS)
    assert num_a / len(KEYS) == pytest.approx(0.9, abs=0.02)
    assert share_of(A, (A, B)) == 0.9


def test_same_key_always_has_the_same_model_in_any_order() -> None:
    assert all(choose_variant((A, B, C), key) is choose_variant((C, B, A), key) for key in KEYS)


def test_added_model_takes_its_share_and_moves_no_other() -> None:
    moved = [key for key in KEYS if choose_variant((A, B, C), key) is not choose_variant((A, B), key)]
    assert all(choose_variant((A, B, C), key) is C for key in moved)
    assert len(moved) / len(KEYS) == pytest.approx(0.2, abs=0.02)


def test_session_sticks_then_tenant_then_request() -> None:
    request = inference_pb2.GenerateRequest(session_id="s", tenant="t", request_id="r")
    keys = []
    for field in ("session_id", "tenant", "request_id"):
        keys.append(sticky_key(request))
        request.ClearField(field)
    assert keys == ["s", "t", "r"]
    assert sticky_key(request) != sticky_key(request)


def stream_of(num_tokens: int, first_s: float, between_s: float) -> RequestStream:
    stream = RequestStream(Demand("r", 2, 1), executor_pb2.Submit(), 100.0)
    stream.output_ids = [0] * num_tokens
    stream.clock.first_token = 100.0 + first_s
    stream.clock.last_token = 100.0 + first_s + between_s * (num_tokens - 1)
    return stream


def test_meter_counts_and_times() -> None:
    meter = VariantMeter()
    for number in range(4):
        meter.arrive()
        if number:
            meter.end(stream_of(5, first_s=number, between_s=0.25))
        else:
            meter.refuse()
    capacity = meter.to_proto("name", A, 0.9)
    assert (capacity.num_requests, capacity.num_refused, capacity.num_ended, capacity.output_tokens) == (4, 1, 3, 15)
    assert (capacity.ttft_p50_ms, capacity.ttft_p99_ms) == (2000, 3000)
    assert capacity.inter_token_p50_ms == pytest.approx(250)


def test_meter_without_tokens_has_no_times() -> None:
    meter = VariantMeter()
    meter.end(RequestStream(Demand("r", 2, 1), executor_pb2.Submit(), 0.0))
    capacity = meter.to_proto("name", A, 0.9)
    assert not capacity.HasField("ttft_p50_ms")
    assert not capacity.HasField("inter_token_p99_ms")


def test_meter_remembers_only_the_newest() -> None:
    meter = VariantMeter()
    meter.end(stream_of(1, first_s=50.0, between_s=0))
    for _ in range(NUM_KEPT_LATENCIES):
        meter.end(stream_of(1, first_s=1.0, between_s=0))
    assert meter.to_proto("name", A, 1.0).ttft_p99_ms == 1000


def test_meters_tell_of_every_model_of_a_name_also_before_its_first_request() -> None:
    meters = VariantMeters()
    meters.meter("name", "b").arrive()
    told = list(meters.to_proto("name", (A, B)))
    assert [(one.variant, one.num_requests, round(one.share, 3)) for one in told] == [("a", 0, 0.9), ("b", 1, 0.1)]


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)])
def test_percentile_is_a_value_that_was_measured(fraction: float, expected: float) -> None:
    assert percentile([4, 1, 3, 2], fraction) == expected
