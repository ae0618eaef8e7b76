"""The requests of a workload. Pure except for reading files: name, seed and scale give the same requests everywhere.

A workload is one of the published shapes by name (*mixed* traffic, *short* and *long* answers, *prefill* with long
prompts and hardly any answer, *chat* with prompts in groups that share their beginning, arriving one by one), a shape
of the user's own (`.json`), or a recorded trace (`.jsonl`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.bench.workloads.plan import PlannedRequest, Workload
from inflight.bench.workloads.shapes import SHAPES, Shape, read_shape
from inflight.bench.workloads.trace import read_trace

DEFAULT_SEED = 0
TRACE_SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come instead of when the workload says.

    Open loop: `rate_per_s`, a Poisson process. Closed loop: `concurrency`, each as soon as one before it has ended.
    """

    rate_per_s: float | None = None
    concurrency: int | None = None


AS_PLANNED = Arrivals()


def build_workload(
    name: str,
    *,
    vocabulary_size: int,
    scale: float = 1.0,
    num_requests: int | None = None,
    seed: int = DEFAULT_SEED,
    variant: int = 0,
    arrivals: Arrivals = AS_PLANNED,
) -> Workload:
    """Returns the requests of a workload. `scale` shrinks prompts and outputs; `num_requests` replaces the workload's.

    Variants differ in the token ids alone, so that a run cannot find the KV of an earlier one in the prefix cache.
    """
    if name.endswith(TRACE_SUFFIX):
        rng = random.Random(f"{seed}/ids/{variant}")
        requests = read_trace(Path(name), lambda num_tokens: _token_ids(rng, num_tokens, vocabulary_size), scale)
        requests = requests[:num_requests]
    else:
        shape = SHAPES[name] if name in SHAPES else read_shape(Path(name))
        requests = shaped_requests(
            shape, name, vocabulary_size, scale=scale, num_requests=num_requests, seed=seed, variant=variant
        )
    workload = Workload(Path(name).stem if name not in SHAPES else name, tuple(requests), arrivals.concurrency)
    return _arriving(workload, arrivals, random.Random(f"{name}/{seed}/times"))


def shaped_requests(
    shape: Shape,
    name: str,
    vocabulary_size: int,
    *,
    scale: float = 1.0,
    num_requests: int | None = None,
    seed: int = DEFAULT_SEED,
    variant: int = 0,
) -> list[PlannedRequest]:
    """Returns the requests of a shape. `name` seeds them together with seed and variant."""
    # One source each, so that no length depends on how many ids came before it.
    lengths, ids, times = (random.Random(f"{name}/{seed}/{use}") for use in ("lengths", f"ids/{variant}", "times"))
    arrivals = _poisson(shape.arrivals_per_s, times)
    prefix: tuple[int, ...] = ()
    requests = []
    for index in range(num_requests or shape.num_requests):
        if index % shape.group_size == 0:
            prefix = _token_ids(ids, _scaled(shape.shared_prompt_tokens, scale), vocabulary_size)
        length = max(1, _scaled(lengths.randint(*shape.prompt_tokens), scale))
        own = _token_ids(ids, max(0, length - len(prefix)), vocabulary_size)
        output_tokens = max(1, _scaled(lengths.randint(*shape.output_tokens), scale))
        requests.append(PlannedRequest((prefix + own)[:length], output_tokens, next(arrivals)))
    return requests


def _arriving(workload: Workload, arrivals: Arrivals, times: random.Random) -> Workload:
    """Returns the same requests at other times."""
    if arrivals.concurrency is not None:
        return replace(workload, requests=tuple(replace(request, arrival_s=0.0) for request in workload.requests))
    if arrivals.rate_per_s is not None:
        at = _poisson(arrivals.rate_per_s, times)
        return replace(workload, requests=tuple(replace(request, arrival_s=next(at)) for request in workload.requests))
    return workload


def _poisson(rate_per_s: float | None, rng: random.Random) -> Iterator[float]:
    """Arrival times: all 0, or a Poisson process."""
    if rate_per_s is None:
        return itertools.repeat(0.0)
    rate = rate_per_s
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


def _token_ids(rng: random.Random, num_tokens: int, vocabulary_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocabulary_size) for _ in range(num_tokens))


def _scaled(num_tokens: int, scale: float) -> int:
    return round(num_tokens * scale)
