"""A driver's messages of a run, turned into outcomes and a time line. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.bench.measures.run import Outcome, SeatSample, TokenTimes
from inflight.bench.workloads.plan import Workload

SAMPLE_INTERVAL_S = 0.1


class DriverRecord:
    """Takes the lines of one run in the order in which they came."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._requests: dict[int, TokenTimes] = {}

    def take(self, line: Mapping[str, Any]) -> int:
        """Takes a line and returns how many tokens came with it."""
        for request_id, at_s in line.get("sent", ()):
            self._requests[request_id] = TokenTimes(at_s)
        for request_id, number in line.get("tokens", ()):
            self._requests[request_id].take(line["at_s"], number)
        return sum(number for _, number in line.get("tokens", ()))

    def outcomes(self) -> list[Outcome]:
        """How each planned request went. One that never left, or came back short, went wrong."""
        outcomes = []
        for index, planned in enumerate(self._workload.requests):
            times = self._requests.get(index, TokenTimes(planned.arrival_s))
            short = times.num_tokens != planned.output_tokens
            error = f"{times.num_tokens} tokens came of {planned.output_tokens}" if short else None
            outcomes.append(times.outcome(times.last_s, error))
        return outcomes

    def samples(self, until_s: float, seats: int) -> list[SeatSample]:
        """Returns the seats over time. A driver sees tokens: from its first to its last one a request holds a seat."""
        outcomes = self.outcomes()
        num_samples = int(until_s / SAMPLE_INTERVAL_S) + 1
        return [self._sample(index * SAMPLE_INTERVAL_S, outcomes, seats) for index in range(num_samples)]

    def _sample(self, at_s: float, outcomes: list[Outcome], seats: int) -> SeatSample:
        begun = [o for o in outcomes if o.first_token_s is not None and o.first_token_s <= at_s]
        used = sum(at_s < outcome.ended_s for outcome in begun)
        arrived = sum(outcome.sent_s <= at_s for outcome in outcomes)
        return SeatSample(
            at_s=round(at_s, 3),
            num_executors=1,
            seats_total=seats,
            seats_used=used,
            num_queued=max(0, arrived - len(begun)),
            blocks_used=0,
            num_steps=0,
        )
