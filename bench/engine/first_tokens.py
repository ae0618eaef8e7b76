"""Time to the first token and between tokens by class, in virtual time: the real loop and scheduler over a modelled
device.

    python -m inflight.bench.engine.first_tokens [--seeds 3] [--requests 400]

Most prompts are short and one in ten is long. Requests come at random (Poisson) at a share of what the device can
compute. Each load runs under two rules, one after the other, with the same requests: with steps of at most twice the
time of their decodes, as before there were targets, and with the targets of the classes. The figures depend on the
seeds alone, not on the machine.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from inflight.bench.report.table import Table
from inflight.bench.simulation.device import H200, TWO_CORES, ModelledDevice, StepCost
from inflight.bench.timeline.timeline import US_PER_S
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.prefill_budget import PrefillBudget
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Batching, InterTokenTargets, SchedulerLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sampling, Sequence, Stopping
from inflight.executor.scheduler.step_constraint import DecodeLoad

BLOCK_SIZE = 16
NUM_SEATS = 32
# More than all requests in line reserve.
NUM_BLOCKS = 50_000
SHORT, LONG = (50, 300), (2000, 6000)
LONG_SHARE = 0.1
OUTPUT_TOKENS = (20, 200)
TARGETS = InterTokenTargets()
# By priority, with shares of the requests.
CLASSES = {1: "interactive", 0: "standard", -1: "batch"}
MIXES: Mapping[str, Mapping[int, float]] = {
    "all standard": {0: 1.0},
    "all classes": {1: 0.4, 0: 0.4, -1: 0.2},
}


@dataclass(frozen=True, slots=True)
class Load:
    """A device, the token budget of its steps, and the rates of requests that it gets."""

    name: str
    cost: StepCost
    max_num_tokens: int
    rates: tuple[float, ...]


LOADS = (
    Load("two cores", TWO_CORES, 1024, (0.7, 2.0)),
    Load("H200", H200, 1024, (24.0,)),
    Load("H200, 8192 tokens per step", H200, 8192, (24.0,)),
)


class TwiceTheDecodes(PrefillBudget):
    """The rule before targets: a step takes twice the time of its decodes, unless more sequences wait for their first
    token than decode."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def longest_step_s(self, decodes: DecodeLoad, decode_s: float) -> float | None:
        scheduler = self._scheduler
        num_free_seats = NUM_SEATS - scheduler.num_running
        num_behind = scheduler.num_running - decodes.num_decodes + min(scheduler.num_waiting, num_free_seats)
        return None if num_behind > decodes.num_decodes else 2 * decode_s


RULES: Mapping[str, Callable[[Scheduler], PrefillBudget]] = {
    "twice the decodes": TwiceTheDecodes,
    "targets": lambda scheduler: PrefillBudget(),
}


@dataclass(slots=True)
class Traffic:
    """An executor under random traffic, in seconds of virtual time."""

    load: Load
    mix: Mapping[int, float]
    seed: int
    arrived_s: dict[Sequence, float] = field(default_factory=dict)
    waited_s: dict[Sequence, float] = field(default_factory=dict)
    # Between the tokens of the sequences of a priority.
    gaps_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _read_s: dict[Sequence, float] = field(default_factory=dict)
    _device: ModelledDevice = field(init=False)

    def run(self, rule: Callable[[Scheduler], PrefillBudget], requests_per_s: float, num_requests: int) -> None:
        """Offers the requests, and runs until all have ended."""
        limits = SchedulerLimits(
            max_num_sequences=NUM_SEATS,
            num_standby_sequences=100_000,
            max_num_tokens=self.load.max_num_tokens,
            context_length=8192,
            enable_chunked_context=True,
            batching=Batching.INFLIGHT,
            enable_prefix_cache=False,
        )
        self._device = device = ModelledDevice(self.load.cost, lambda request_id, offset: 3)
        scheduler = Scheduler(limits, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
        engine = Engine(
            scheduler,
            device,
            self._publish,
            lambda error: None,
            prefill_budget=rule(scheduler),
            clock=lambda: device.now_s,
        )
        arrivals = self._arrivals(requests_per_s, num_requests)
        following = next(arrivals, None)
        while following is not None or not scheduler.is_idle:
            if following is not None and scheduler.is_idle:
                device.now_s = max(device.now_s, following[0])
            while following is not None and following[0] <= device.now_s:
                self.arrived_s[following[1]] = following[0]
                engine.submit(following[1])
                following = next(arrivals, None)
            engine.step()
            device.now_s = max(device.now_s, device.read_us / US_PER_S)

    def _arrivals(self, requests_per_s: float, num_requests: int) -> Iterator[tuple[float, Sequence]]:
        chosen, classes = random.Random(self.seed), random.Random(f"classes/{self.seed}")
        now_s = 0.0
        for _ in range(num_requests):
            now_s += chosen.expovariate(requests_per_s)
            num_tokens = chosen.randint(*(LONG if chosen.random() < LONG_SHARE else SHORT))
            max_tokens = chosen.randint(*OUTPUT_TOKENS)
            (priority,) = classes.choices(list(self.mix), list(self.mix.values()))
            sequence = Sequence(
                request_id=f"r{now_s}",
                attempt=1,
                token_ids=[1] * num_tokens,
                num_prompt_tokens=num_tokens,
                sampling=Sampling(0.0, 0, 1.0, 0),
                stopping=Stopping(max_tokens, 0, frozenset()),
                num_reserved_blocks=-(-(num_tokens + max_tokens) // BLOCK_SIZE),
                cache_salt=None,
                priority=priority,
                inter_token_target_ms=TARGETS.of(priority),
            )
            yield now_s, sequence

    def _publish(self, output: EngineOutput) -> None:
        read_s = self._device.read_us / US_PER_S
        for sequence, offset, _ in output.tokens:
            if offset == 0:
                self.waited_s[sequence] = read_s - self.arrived_s[sequence]
            else:
                self.gaps_s[sequence.priority].append(read_s - self._read_s[sequence])
            self._read_s[sequence] = read_s


def percentiles(seconds: SequenceOf[float]) -> list[str]:
    """Returns median and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    return [f"{1000 * ordered[int(share * (len(ordered) - 1))]:.0f}" for share in (0.5, 0.99)]


def rows_of(load: Load, rate: float, mix: str, seeds: int, num_requests: int) -> Iterator[list[str]]:
    """Yields a row for each class and rule."""
    runs: dict[str, list[Traffic]] = {rule: [] for rule in RULES}
    for seed in range(seeds):
        for rule, budget in RULES.items():
            traffic = Traffic(load, MIXES[mix], seed)
            traffic.run(budget, rate, num_requests)
            runs[rule].append(traffic)
    for priority in MIXES[mix]:
        for rule, traffics in runs.items():
            waited_s = {
                is_long: [
                    waited_s
                    for traffic in traffics
                    for sequence, waited_s in traffic.waited_s.items()
                    if sequence.priority == priority and (sequence.num_prompt_tokens > SHORT[1]) == is_long
                ]
                for is_long in (False, True)
            }
            gaps_s = [gap_s for traffic in traffics for gap_s in traffic.gaps_s[priority]]
            kinds = (waited_s[False] + waited_s[True], waited_s[False], waited_s[True], gaps_s)
            figures = [figure for kind in kinds for figure in percentiles(kind)]
            yield [load.name, f"{rate:g}", mix, CLASSES[priority], rule, *figures]


def main(argv: SequenceOf[str] | None = None) -> int:
    """Prints a row for each device, load, class and rule."""
    parser = argparse.ArgumentParser(description="Time to the first token and between tokens by class.")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each load")
    parser.add_argument("--requests", type=int, default=400, help="requests in each run")
    arguments = parser.parse_args(argv)
    rows = [
        row
        for load in LOADS
        for rate in load.rates
        for mix in MIXES
        for row in rows_of(load, rate, mix, arguments.seeds, arguments.requests)
    ]
    print("milliseconds to the first token of all, short and long prompts, and between tokens")
    titles = [f"{kind} {name}" for kind in ("all", "short", "long", "between") for name in ("p50", "p99")]
    print(Table(["device", "requests/s", "requests", "class", "rule", *titles], rows).text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
