"""The figures of a simulated run: speeds, waits and waste. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from inflight.bench.measures.run import percentile
from inflight.bench.simulation.invariants import Record, RequestOutcome
from inflight.bench.simulation.world import World
from inflight.bench.timeline.timeline import US_PER_MS, US_PER_S

# Of the window in which requests arrive: what comes before fills an empty system.
WARM_FRACTION = 0.2


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. `extra` are what one experiment asks for."""

    num_requests: int
    output_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    inter_token_p50_ms: float | None
    inter_token_p99_ms: float | None
    extra: dict[str, float] = field(default_factory=dict)


def measured(
    world: World, counts: Callable[[Record], bool] = lambda record: True, warm_fraction: float = WARM_FRACTION
) -> Figures:
    """Returns the figures of a run, over the requests that count."""
    duration_us = round(world.settings.duration_s * US_PER_S)
    begin_us, end_us = world.begin_us + round(warm_fraction * duration_us), world.begin_us + duration_us
    records = [one for one in world.checker.records.values() if one.arrived_us >= begin_us and counts(one)]
    waits_ms = [wait for one in records if (wait := ttft_ms(one, end_us)) is not None]
    gaps_ms = [gap / US_PER_MS for gap in world.checker.gaps_us]
    return Figures(
        num_requests=len(records),
        output_tokens_per_s=world.checker.tokens_between(begin_us, end_us) / ((end_us - begin_us) / US_PER_S),
        ttft_p50_ms=percentile(waits_ms, 0.5),
        ttft_p99_ms=percentile(waits_ms, 0.99),
        inter_token_p50_ms=percentile(gaps_ms, 0.5),
        inter_token_p99_ms=percentile(gaps_ms, 0.99),
        extra=_waste(world),
    )


def ttft_ms(record: Record, end_us: int) -> float | None:
    """Until its first token; for one that still waits at the end, so far. None where it was refused or dropped."""
    if record.first_token_us is not None:
        return (record.first_token_us - record.arrived_us) / US_PER_MS
    return None if record.outcome is not None else (end_us - record.arrived_us) / US_PER_MS


def wait_figures(world: World, records: Iterable[Record]) -> dict[str, float]:
    """The waits before first tokens: in the ledger's queue, in standby on the executor, for the prompt."""
    begin_us = world.begin_us + round(WARM_FRACTION * world.settings.duration_s * US_PER_S)
    waits_us = [
        (one.placed_us - one.arrived_us, one.boarded_us - one.placed_us, one.first_token_us - one.boarded_us)
        for one in records
        if one.arrived_us >= begin_us and one.placed_us and one.boarded_us and one.first_token_us
    ]
    figures = {}
    for place, name in enumerate(("in line", "in standby", "in prefill")):
        for percent in (50, 99):
            wait_us = percentile([waits[place] for waits in waits_us], percent / 100)
            figures[f"{name} p{percent} ms"] = (wait_us or 0.0) / US_PER_MS
    return figures


def tokens_per_s(world: World, records: Iterable[Record]) -> float:
    """Output tokens that these requests got, over the whole run."""
    return sum(record.num_tokens for record in records) / world.settings.duration_s


def deadline_figures(world: World, records: Iterable[Record]) -> dict[str, float]:
    """What deadlines came to: goodput, and work for requests that were dead."""
    kept = late = dead = 0
    refused = 0
    errors = []
    for record in records:
        deadline_ms = record.request.first_token_deadline_ms
        assert deadline_ms is not None
        due_us = record.arrived_us + deadline_ms * US_PER_MS
        refused += record.outcome is RequestOutcome.REFUSED
        kept += record.first_token_us is not None and record.first_token_us <= due_us
        late += record.first_token_us is not None and record.first_token_us > due_us
        dead += record.boarded_us is not None and record.boarded_us > due_us
        if record.estimated_wait_ms is not None and record.placed_us is not None:
            errors.append(abs(record.estimated_wait_ms - (record.placed_us - record.arrived_us) / US_PER_MS))
    figures = {
        "goodput requests/s": kept / world.settings.duration_s,
        "first token too late": float(late),
        "begun when dead": float(dead),
        "refused at once": float(refused),
    }
    if errors:
        figures["estimate off p50 ms"] = percentile(errors, 0.5) or 0.0
    return figures


def _waste(world: World) -> dict[str, float]:
    schedulers = [executor.scheduler for executor in world.executors]
    computed = sum(scheduler.num_computed_tokens for scheduler in schedulers)
    recomputed = sum(scheduler.num_recomputed_tokens for scheduler in schedulers)
    steps = sum(executor.engine.num_steps for executor in world.executors)
    return {
        "preemptions": float(sum(scheduler.num_preemptions for scheduler in schedulers)),
        "recomputed %": 100 * recomputed / computed if computed else 0.0,
        "computed tokens": float(computed),
        "tokens per step": world.checker.num_tokens / steps if steps else 0.0,
    }
