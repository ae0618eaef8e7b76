"""How much more an executor serves because a block that sequences share is reserved once.

    python -m inflight.bench.placement.shared_blocks [--policy guaranteed_no_evict] [--kv-tokens 2048]

One executor with SmolLM2 and few KV blocks, a router and Redis on this machine. Each client sends its next request when
the one before has ended. All prompts have the same beginning of 512 tokens, then 16 of their own. In every other run
each prompt has a cache salt of its own, so that nothing is shared and everything is computed. To measure another
version, copy this folder into its tree.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inflight import AsyncClient
from inflight.bench.measures.run import percentile
from inflight.bench.placement.real_executors import real_executors
from inflight.bench.placement.token_ids import token_ids
from inflight.events import Delta

NUM_CLIENTS = 24
SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 512, 16, 64
RAMP_S = 10.0


@dataclass(slots=True)
class Load:
    """The clients of a run, and what they got while it `counts`."""

    client: AsyncClient
    shares: bool
    num_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    counts: bool = False

    async def run(self, seconds: float) -> tuple[float, float, float]:
        """Returns output tokens per second, and the median and 99th percentile of the TTFT in seconds."""
        clients = [asyncio.create_task(self._requests(number)) for number in range(NUM_CLIENTS)]
        await asyncio.sleep(RAMP_S)
        self.counts, began_s = True, time.perf_counter()
        await asyncio.sleep(seconds)
        self.counts, took_s = False, time.perf_counter() - began_s
        for client in clients:
            client.cancel()
        for failure in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(failure, Exception):
                raise failure
        return self.num_tokens / took_s, statistics.median(self.ttfts_s), percentile(self.ttfts_s, 0.99) or 0.0

    async def _requests(self, client: int) -> None:
        number = client
        while True:
            await self._request(number)
            number += NUM_CLIENTS

    async def _request(self, number: int) -> None:
        first_own = SHARED_TOKENS + number * OWN_TOKENS
        prompt = token_ids([*range(SHARED_TOKENS), *range(first_own, first_own + OWN_TOKENS)])
        salt = "" if self.shares else str(number)
        began_s, has_begun = time.perf_counter(), False
        stream = self.client.generate(
            token_ids=prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0, cache_salt=salt
        )
        async for event in stream.events():
            if not isinstance(event, Delta) or not event.num_tokens:
                continue
            if not has_begun and self.counts:
                self.ttfts_s.append(time.perf_counter() - began_s)
            has_begun = True
            self.num_tokens += event.num_tokens if self.counts else 0


async def measure(policy: str, kv_tokens: int, seconds: float, rounds: int) -> None:
    """Prints a line for each run."""
    args = (
        "--max-tokens-in-paged-kv-cache", str(kv_tokens), "--tokens-per-block", "16",
        "--max-num-sequences", str(NUM_CLIENTS), "--max-num-tokens", "512", "--batch-scheduler-policy", policy,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        async with real_executors(Path(folder), args, num_executors=1) as executors:
            for _ in range(rounds):
                for shares in (True, False):
                    rate, median_s, p99_s = await Load(executors.placing, shares).run(seconds)
                    words = "shared" if shares else "nothing shared"
                    print(
                        f"{policy}, {kv_tokens} tokens of KV, {words}: {rate:.0f} output tokens/s, "
                        f"TTFT p50 {1e3 * median_s:,.0f} ms, p99 {1e3 * p99_s:,.0f} ms",
                        flush=True,
                    )


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m inflight.bench.placement.shared_blocks", description=__doc__)
    policies = ("guaranteed_no_evict", "max_utilization")
    parser.add_argument("--policy", choices=policies, default=policies[0], help=f"(default: {policies[0]})")
    parser.add_argument("--kv-tokens", type=int, default=2048, help="KV cache of the executor (default: 2048)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run, after 10 s (default: 20)")
    parser.add_argument("--rounds", type=int, default=2, help="(default: 2)")
    options = parser.parse_args(argv)
    asyncio.run(measure(options.policy, options.kv_tokens, options.seconds, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
