"""Counts and latencies of the models behind one name, for comparing them.

Bounded: counts, and the newest thousand values of each latency.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from inflight.v1 import inference_pb2
from router.config.tenants import Variant, share_of
from router.stream.request_stream import RequestStream

NUM_KEPT = 1000


class VariantMeter:
    """One model under one name."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_refused = 0
        self._num_ended = 0
        self._output_tokens = 0
        self._ttft_ms: deque[float] = deque(maxlen=NUM_KEPT)
        self._inter_token_ms: deque[float] = deque(maxlen=NUM_KEPT)

    def arrive(self) -> None:
        """Counts a request."""
        self._num_requests += 1

    def refuse(self) -> None:
        """Counts a refusal."""
        self._num_refused += 1

    def end(self, stream: RequestStream, *others: RequestStream) -> None:
        """Records the end of a request. Its latencies are those of the first choice."""
        clock, num_tokens = stream.clock, len(stream.output_ids)
        self._num_ended += 1
        self._output_tokens += num_tokens + sum(len(other.output_ids) for other in others)
        if clock.first_token is None or clock.last_token is None:
            return
        self._ttft_ms.append((clock.first_token - clock.arrived) * 1000)
        if num_tokens > 1:
            self._inter_token_ms.append((clock.last_token - clock.first_token) * 1000 / (num_tokens - 1))

    def to_proto(self, model: str, variant: Variant, share: float) -> inference_pb2.VariantCapacity:
        """Returns the figures."""
        capacity = inference_pb2.VariantCapacity(
            model=model,
            variant=variant.model,
            share=share,
            num_requests=self._num_requests,
            num_refused=self._num_refused,
            num_ended=self._num_ended,
            output_tokens=self._output_tokens,
        )
        if self._ttft_ms:
            capacity.ttft_p50_ms = percentile(self._ttft_ms, 0.5)
            capacity.ttft_p99_ms = percentile(self._ttft_ms, 0.99)
        if self._inter_token_ms:
            capacity.inter_token_p50_ms = percentile(self._inter_token_ms, 0.5)
            capacity.inter_token_p99_ms = percentile(self._inter_token_ms, 0.99)
        return capacity


class VariantMeters:
    """The meters of all requested names; their number is bounded by the models that this router serves."""

    def __init__(self) -> None:
        self._meters: dict[tuple[str, str], VariantMeter] = {}

    def meter(self, model: str, variant: str) -> VariantMeter:
        """Returns the meter of a model under a name."""
        return self._meters.setdefault((model, variant), VariantMeter())

    def to_proto(self, model: str, variants: tuple[Variant, ...]) -> Iterable[inference_pb2.VariantCapacity]:
        """Returns the figures of a name's models."""
        for variant in variants:
            yield self.meter(model, variant.model).to_proto(model, variant, share_of(variant, variants))


def percentile(values: Iterable[float], fraction: float) -> float:
    """Returns the smallest value that the given fraction of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * fraction // 1) - 1)]
