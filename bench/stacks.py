"""The local stacks that a benchmark compares, and the requests that they get. Plain data; starts nothing."""

from __future__ import annotations

from pathlib import Path

from bench.options import BenchOptions
from bench.workloads import GATE_TOKENS, Workload, build_workload
from client.stack.options import StackOptions

# Room for the gate, for the sequences that an executor holds beyond its seats, and for the prefix cache.
EXTRA_SEATS = 4
# Most tokens by which a block outgrows what it holds.
BLOCK_SLACK_TOKENS = 16


def stack_options(options: BenchOptions, mode: str) -> StackOptions:
    """The stack of one mode. Everything but the mode is the same, the size of the KV pool included."""
    workloads = (planned_workload(options, name, vocabulary_size=1) for name in options.workloads)
    longest = max(GATE_TOKENS, *(workload.max_request_tokens for workload in workloads))
    flags = {
        "--batching": mode,
        "--max-num-sequences": options.seats,
        "--max-tokens-in-paged-kv-cache": (options.seats + EXTRA_SEATS) * (longest + BLOCK_SLACK_TOKENS),
    }
    return StackOptions(
        executors=options.executors,
        model=options.model,
        executor_args=tuple(str(part) for flag in flags.items() for part in flag),
        run_dir=Path("run") / f"bench-{mode}",
    )


def planned_workload(options: BenchOptions, name: str, vocabulary_size: int, variant: int = 0) -> Workload:
    """A workload as the options want it."""
    return build_workload(
        name,
        vocabulary_size=vocabulary_size,
        scale=options.scale,
        num_requests=options.num_requests,
        seed=options.seed,
        variant=variant,
    )
