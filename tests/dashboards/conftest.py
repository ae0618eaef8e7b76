"""A system of real processes that has served some traffic, for tests of its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from inflight import AsyncClient
from inflight.errors import InflightError
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.support.stack.http_pages import page, post_json

MODEL = "SmolLM2-135M-Instruct"
# Metrics that this system does not have: its executor serves no adapters, and no model with recurrent layers.
ELSEWHERE = ("inflight_adapter_", "inflight_state_")


@dataclass(frozen=True, slots=True)
class Scraped:
    """What `/metrics` of all processes says: every metric with the labels of its samples, buckets' `le` left out."""

    labels: dict[str, frozenset[str]]
    buckets: dict[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Watched:
    """The system: where its metrics are, and its router and gateway for more traffic."""

    targets: tuple[str, ...]
    router: str
    gateway: str

    async def ask(self) -> None:
        """Asks for some of everything: with an end, with drafts, refused, cancelled, over HTTP."""
        async with AsyncClient(self.router) as client:
            await asyncio.gather(*(client.complete(f"request {i}", max_tokens=24, ignore_eos=True) for i in range(4)))
            # The model goes on like this, so there are drafts. Those of a smaller model would not pay.
            await client.complete("again " * 8, max_tokens=48, temperature=0, ignore_eos=True)
            with suppress(InflightError):
                await client.complete("too long", max_tokens=1 << 20)
            async with client.generate("given up", max_tokens=400, ignore_eos=True) as stream:
                await anext(aiter(stream))
        await post_json(self.gateway, "/v1/completions", {"model": MODEL, "prompt": "over HTTP", "max_tokens": 4})

    async def scraped(self) -> Scraped:
        """Looks at every process."""
        labels: dict[str, frozenset[str]] = {}
        buckets: dict[str, frozenset[str]] = {}
        for target in self.targets:
            _, text = await page(target)
            for family in text_string_to_metric_families(text):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                of_samples = frozenset(label for sample in samples for label in sample.labels)
                labels[name] = labels.get(name, frozenset()) | of_samples - {"le"}
                buckets[name] = frozenset(sample.labels["le"] for sample in samples if "le" in sample.labels)
        return Scraped({name: of for name, of in labels.items() if not name.endswith("_created")}, buckets)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    """One router, one executor and one gateway, and some requests of which all are over."""
    folder: Path = tmp_path_factory.mktemp("watched")
    flags = [
        "--max-tokens-in-paged-kv-cache",
        "2048",
        "--max-num-sequences",
        "2",
        "--num-threads",
        "1",
        "--speculation",
        "ngram",
        "--executor-class",
        "small",
    ]
    usage = ("--executor-prices", "small=2.50", "--usage-metrics-tenants", "search")
    options = StackOptions(gateways=1, executor_args=tuple(flags), router_args=usage, run_dir=folder / "run")
    async with LocalStack(options) as stack:
        processes = (*stack.executors, *stack.routers)
        gateway = stack.gateways[0].address
        system = Watched((*(one.http_address for one in processes), gateway), stack.address, gateway)
        await system.ask()
        yield system
