"""How long the torch sampler and the C++ sampler take for a row of logits, in turn on one thread.

    python -m bench.engine.samplers [--rows 32] [--vocabulary 49152] [--rounds 5]

Prints the medians and their ratio for each way of sampling, and on how many rows the two agree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from executor.cpu.sampler import NativeSampler, choose_sampler
from executor.scheduler.sequence import Sampling
from executor.step.sampling import SampleRow, sample
from executor.step.sampling_columns import SamplingBatch

# Name, temperature, top_k, top_p.
WAYS = (
    ("greedy", 0.0, 0, 1.0),
    ("temperature", 1.0, 0, 1.0),
    ("top_k 50", 0.7, 50, 1.0),
    ("top_p 0.9", 1.0, 0, 0.9),
    ("top_k 50, top_p 0.9", 0.7, 50, 0.9),
)
# Standard deviation of the logits. With 5 a few tokens hold most of the probability; with 1 it takes half the
# vocabulary to hold 0.9 of it.
SPREADS = (5.0, 1.0)


def main(argv: Sequence[str]) -> int:
    """Prints the table; 1 where there is no C++ sampler."""
    parser = argparse.ArgumentParser(description="Compares the torch sampler with the C++ sampler.")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    native = choose_sampler(torch.device("cpu"))
    if native is None:
        return 1
    torch.set_num_threads(1)
    print(f"{'spread':>6}  {'sampling':<20}  {'torch ms/row':>12}  {'C++ ms/row':>10}  {'ratio':>6}  same ids")
    for spread in SPREADS:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(options.rows, options.vocabulary, generator=generator) * spread
        for name, temperature, top_k, top_p in WAYS:
            rows = [SampleRow(Sampling(temperature, top_k, top_p, i), i, frozenset()) for i in range(options.rows)]
            print(f"{spread:>6g}  {name:<20}  {_compare(logits, rows, native, options.rounds)}", flush=True)
    return 0


def _compare(logits: Tensor, rows: Sequence[SampleRow], native: NativeSampler, rounds: int) -> str:
    sampling = SamplingBatch.of(rows)
    times_ms: dict[str, list[float]] = {"torch": [], "native": []}
    for _ in range(rounds + 1):  # the first fills caches
        expected, torch_ms = _timed(lambda: sample(logits, rows))
        found, native_ms = _timed(lambda: native.sample(logits, sampling))
        times_ms["torch"].append(torch_ms / len(rows))
        times_ms["native"].append(native_ms / len(rows))
    torch_ms, native_ms = (statistics.median(times[1:]) for times in times_ms.values())
    agreeing = int((expected == found).sum())
    return f"{torch_ms:>12.3f}  {native_ms:>10.4f}  {torch_ms / native_ms:>6.1f}  {agreeing}/{len(rows)}"


def _timed(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
