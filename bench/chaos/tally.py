"""The figures of a chaos run: the counts of its last line, and everything in the report. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inflight.bench.chaos.gaps import Gaps, Window, gaps_by_kind
from inflight.bench.chaos.load import Sent
from inflight.bench.fleet.fleet import Exit
from inflight.bench.fleet.health import Leak
from inflight.bench.fleet.usage import Costs


@dataclass(frozen=True, slots=True)
class Tally:
    """The figures of a run. `leak` and `costs` None: they were not looked for, since the run was interrupted."""

    circumstances: Mapping[str, str]
    num_requests: int
    num_tokens: int
    manners: Mapping[str, int]
    deaths: Mapping[str, int]
    faults: Mapping[str, int]
    num_unrecovered: int
    num_resumed: int
    num_migrated: int
    lost: int
    duplicated: int
    refusals: Mapping[str, int]
    failures: tuple[str, ...]
    leak: Leak | None
    gaps: tuple[Gaps, ...]
    was_interrupted: bool
    num_adapted: int = 0
    costs: Costs | None = None

    @property
    def is_right(self) -> bool:
        """Whether every promise was kept that this run can judge."""
        is_whole = not (self.lost or self.duplicated or self.failures or self.leak or self.num_unrecovered)
        return is_whole and not self.cost_problems

    @property
    def cost_problems(self) -> tuple[str, ...]:
        """How the ledger's usage differs from that of executors."""
        return () if self.costs is None else self.costs.problems

    @property
    def last_line(self) -> str:
        """The line for machines."""
        leaked = "unknown" if self.leak is None else str(self.leak.num_blocks)
        return (
            f"chaos: requests={self.num_requests} deaths={sum(self.deaths.values())} resumed={self.num_resumed} "
            f"lost={self.lost} duplicated={self.duplicated} leaked_blocks={leaked}"
        )


def tally(
    circumstances: Mapping[str, str],
    sent: Sequence[Sent],
    windows: Sequence[Window],
    exits: Sequence[Exit],
    leak: Leak | None,
    costs: Costs | None = None,
    *,
    was_interrupted: bool,
) -> Tally:
    streams = [one.observed for one in sent]
    return Tally(
        circumstances=circumstances,
        num_requests=len(sent),
        num_tokens=sum(stream.num_tokens for stream in streams),
        num_adapted=sum(bool(stream.sample.model) for stream in streams),
        manners=_counted(one.manner.value for one in sent),
        deaths=_counted(_death(ended) for ended in exits),
        faults=_counted(window.fault.kind.value for window in windows),
        num_unrecovered=sum(window.whole_s is None for window in windows) if not was_interrupted else 0,
        num_resumed=sum(bool(stream.resumed_s) for stream in streams),
        num_migrated=sum(bool(stream.migrated_s) for stream in streams),
        lost=sum(one.verdict.lost for one in sent),
        duplicated=sum(one.verdict.duplicated for one in sent),
        refusals=_counted(_refusal(one) for one in sent if one.refused),
        failures=tuple(_failure(one) for one in sent if one.failed),
        leak=leak,
        gaps=tuple(gaps_by_kind(windows, streams)),
        was_interrupted=was_interrupted,
        costs=costs,
    )


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names))


def _death(ended: Exit) -> str:
    return f"{ended.role} {'killed' if ended.code < 0 else 'drained' if ended.code == 0 else 'failed'}"


def _refusal(one: Sent) -> str:
    error = one.observed.error
    assert error is not None
    return f"{error.code.name} {error.reason}".strip()


def _failure(one: Sent) -> str:
    observed = one.observed
    what = f"request {one.number} ({observed.request_id}), {observed.sample.name}, {one.manner.value}"
    what += f", after {observed.num_tokens} tokens"
    if observed.has_timed_out:
        return f"{what}: its stream did not end"
    if observed.error is not None:
        reason = f" {observed.error.reason}" if observed.error.reason else ""
        return f"{what}:{reason} {observed.error}"
    return f"{what}: {one.verdict.problem or 'a token came twice or was missing'}"
