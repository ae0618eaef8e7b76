"""Time to the first token by prompt length, in virtual time: the real loop and scheduler over a modelled device.

    python -m bench.engine.first_tokens [--seeds 3] [--seconds 200]

Most prompts are short and one in ten is long. Requests come at random (Poisson) at a share of what the device can
compute. The figures depend on the seeds alone, not on the machine.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from bench.report.table import Table
from bench.simulation.device import H200, TWO_CORES, ModelledDevice, StepCost
from bench.timeline.timeline import US_PER_S
from executor.engine.engine import Engine
from executor.engine.output import EngineOutput
from executor.scheduler.blocks import BlockPool
from executor.scheduler.limits import Batching, SchedulerLimits
from executor.scheduler.scheduler import Scheduler
from executor.scheduler.sequence import Sampling, Sequence, Stopping

BLOCK_SIZE = 16
NUM_SEATS = 32
SHORT, LONG = (50, 300), (2000, 6000)
LONG_SHARE = 0.1
OUTPUT_TOKENS = (20, 200)
DEVICES = {"two cores": (TWO_CORES, (0.5, 0.7)), "H200": (H200, (4.0, 8.0))}


@dataclass(slots=True)
class Traffic:
    """An executor under random traffic, in seconds of virtual time."""

    cost: StepCost
    seed: int
    arrived_s: dict[Sequence, float] = field(default_factory=dict)
    waited_s: dict[Sequence, float] = field(default_factory=dict)
    # Of the steps with decodes.
    step_s: list[float] = field(default_factory=list)
    _device: ModelledDevice = field(init=False)

    def run(self, requests_per_s: float, seconds: float) -> None:
        """Offers requests for `seconds`, and runs until all have ended."""
        limits = SchedulerLimits(
            max_num_sequences=NUM_SEATS,
            num_standby_sequences=100_000,
            max_num_tokens=1024,
            context_length=8192,
            enable_chunked_context=True,
            batching=Batching.INFLIGHT,
            enable_prefix_cache=False,
        )
        self._device = device = ModelledDevice(self.cost, lambda request_id, offset: 3)
        scheduler = Scheduler(limits, BlockPool(1_000_000, BLOCK_SIZE))
        engine = Engine(scheduler, device, self._publish, lambda error: None, clock=lambda: device.now_s)
        arrivals = self._arrivals(requests_per_s, seconds)
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

    def _arrivals(self, requests_per_s: float, seconds: float) -> Iterator[tuple[float, Sequence]]:
        chosen = random.Random(self.seed)
        now_s = 0.0
        while (now_s := now_s + chosen.expovariate(requests_per_s)) < seconds:
            num_tokens = chosen.randint(*(LONG if chosen.random() < LONG_SHARE else SHORT))
            max_tokens = chosen.randint(*OUTPUT_TOKENS)
            sequence = Sequence(
                request_id=f"r{now_s}",
                attempt=1,
                token_ids=[1] * num_tokens,
                num_prompt_tokens=num_tokens,
                sampling=Sampling(0.0, 0, 1.0, 0),
                stopping=Stopping(max_tokens, 0, frozenset()),
                num_reserved_blocks=-(-(num_tokens + max_tokens) // BLOCK_SIZE),
                cache_salt=None,
            )
            yield now_s, sequence

    def _publish(self, output: EngineOutput) -> None:
        read_s = self._device.read_us / US_PER_S
        if output.record is not None and output.record.plan.num_decodes:
            self.step_s.append(output.record.times.busy_s)
        for sequence, offset, _ in output.tokens:
            if offset == 0:
                self.waited_s[sequence] = read_s - self.arrived_s[sequence]


def figures(waited_s: SequenceOf[float]) -> list[str]:
    """Returns mean, median and 99th percentile in milliseconds."""
    ordered = sorted(waited_s)
    percentiles = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99)]
    return [f"{1000 * value:.0f}" for value in (sum(ordered) / len(ordered), *percentiles)]


def main(argv: SequenceOf[str] | None = None) -> int:
    """Prints a row for each device and load."""
    parser = argparse.ArgumentParser(description="Time to the first token by prompt length.")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each load")
    parser.add_argument("--seconds", type=float, default=200, help="virtual seconds of traffic in each run")
    arguments = parser.parse_args(argv)
    rows = []
    for device, (cost, rates) in DEVICES.items():
        for rate in rates:
            short: list[float] = []
            long: list[float] = []
            steps: list[float] = []
            for seed in range(arguments.seeds):
                traffic = Traffic(cost, seed)
                traffic.run(rate, arguments.seconds)
                steps += traffic.step_s
                for sequence, waited_s in traffic.waited_s.items():
                    (short if sequence.num_prompt_tokens <= SHORT[1] else long).append(waited_s)
            kinds = (short + long, short, long, steps)
            rows.append([device, f"{rate:g}", *(figure for kind in kinds for figure in figures(kind))])
    print("milliseconds to the first token of all, short and long prompts, and of steps with decodes")
    titles = [f"{kind} {name}" for kind in ("all", "short", "long", "step") for name in ("mean", "p50", "p99")]
    print(Table(["device", "requests/s", *titles], rows).text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
