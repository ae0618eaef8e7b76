"""A storm of loads and unloads of LoRA adapters under traffic: nothing of it is left in the processes or the ledger."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from inflight import AsyncClient
from inflight.bench.fleet.health import Leak, leak_of
from inflight.bench.measures.processes import resident_bytes
from inflight.bench.soak.readings import num_open_files
from inflight.errors import InflightError
from inflight.executor.adapters.peft_files import WEIGHTS_FILE
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.support.checkpoints.adapter_files import save_adapter
from tests.support.stack.http_pages import page

MODEL = "tiny"
NUM_SLOTS = 2
MAX_RANK = 64
NAMES = tuple(f"lora-{index}" for index in range(8))
NUM_VERSIONS = 3
REQUESTS_PER_ROUND = 150
# Few, so that requests seldom find the adapter of another one.
AT_ONCE = 4
SERVED = ""
# How many descriptors may differ: connections that come and go.
FEW_FILES = 4
EXECUTOR_ARGS = (
    *("--dtype", "float32"),
    *("--num-threads", "1"),
    *("--max-num-sequences", "6"),
    *("--max-tokens-in-paged-kv-cache", "2048"),
    *("--max-adapters", str(NUM_SLOTS)),
    *("--max-adapter-rank", str(MAX_RANK)),
)


@dataclass(frozen=True, slots=True)
class Storm:
    """A stack that serves the links in `served`, which lead to versions in `kept`."""

    stack: LocalStack
    client: AsyncClient
    served: Path
    kept: Path

    def serve(self, name: str, version: int) -> None:
        """Replaces the files under a name."""
        new = self.served / f".{name}"
        new.symlink_to(self.kept / f"{name}.{version}")
        new.replace(self.served / name)

    def remove(self, name: str) -> None:
        """Removes the files under a name."""
        (self.served / name).unlink(missing_ok=True)

    async def listed(self, names: set[str], hashes_before: set[str]) -> set[str]:
        """Waits until the router lists these names, with contents of which none is among `hashes_before`. Returns the
        contents."""
        async with asyncio.timeout(200):
            while True:
                (model,) = await self.client.list_models()
                hashes = {adapter.hash for adapter in model.adapters}
                if {adapter.name for adapter in model.adapters} == names and not hashes & hashes_before:
                    return hashes
                await asyncio.sleep(0.05)

    async def traffic(self, seed: int) -> int:
        """Sends short requests with random adapters and the base. Returns how many of them were served."""
        choices = random.Random(seed)
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(adapter: str, prompt: str) -> str:
            async with turns:
                try:
                    await self.client.complete(prompt, adapter_id=adapter, max_tokens=2, ignore_eos=True)
                except InflightError as error:
                    return error.reason
                return SERVED

        wanted = [one(choices.choice((*NAMES, "")), f"request {index % 40}") for index in range(REQUESTS_PER_ROUND)]
        reasons = Counter(await asyncio.gather(*wanted))
        # The adapters of the others were unloaded or replaced meanwhile.
        assert reasons.keys() <= {SERVED, "UNKNOWN_ADAPTER", "NEVER_FITS", "NO_EXECUTOR"}
        return reasons[SERVED]

    async def round(self, version: int) -> int:
        """Replaces half of the adapters and unloads the other half under traffic, loads those again, and lets traffic
        evict each of them many times. Returns how many requests were served."""
        replaced, unloaded = NAMES[::2], NAMES[1::2]
        (model,) = await self.client.list_models()
        before = {adapter.hash for adapter in model.adapters}
        traffic = asyncio.create_task(self.traffic(version))
        for name in replaced:
            self.serve(name, version % NUM_VERSIONS)
        for name in unloaded:
            self.remove(name)
        replacing = await self.listed(set(replaced), before)
        for name in unloaded:
            self.serve(name, version % NUM_VERSIONS)
        await self.listed(set(NAMES), before)
        assert len(replacing) == len(replaced)
        return await traffic + await self.traffic(-version)

    async def metrics(self) -> dict[str, float]:
        """The sums of the executor's metrics of adapters and blocks."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families((await page(self.stack.executors[0].http_address))[1]):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
        return sums

    def resident_bytes(self) -> dict[str, int]:
        """The memory of each process."""
        found = {child.name: resident_bytes(child.pid) for child in (*self.stack.executors, *self.stack.routers)}
        return {name: size for name, size in found.items() if size is not None}

    def open_files(self) -> dict[str, int]:
        """The descriptors of each process."""
        return {child.name: num_open_files(child.pid) for child in (*self.stack.executors, *self.stack.routers)}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def storm(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Storm]:
    """An executor with eight adapters in two slots."""
    folder = tmp_path_factory.mktemp("storm")
    for index, name in enumerate(NAMES):
        for version in range(NUM_VERSIONS):
            save_adapter(folder / "kept" / f"{name}.{version}", seed=NUM_VERSIONS * index + version, rank=MAX_RANK)
    (folder / "served").mkdir()
    options = StackOptions(
        model=str(tiny_model),
        executor_args=(*EXECUTOR_ARGS, "--adapter-folder", str(folder / "served")),
        run_dir=folder / "run",
    )
    async with LocalStack(options) as running, AsyncClient(running.address) as client:
        storm = Storm(running, client, folder / "served", folder / "kept")
        for name in NAMES:
            storm.serve(name, 0)
        await storm.listed(set(NAMES), set())
        yield storm


@pytest.mark.asyncio(loop_scope="session")
async def test_storm_of_loads_and_unloads_under_traffic_leaks_nothing(storm: Storm) -> None:
    adapter_bytes = (storm.kept / f"{NAMES[0]}.0" / WEIGHTS_FILE).stat().st_size
    for version in (1, 2):  # allocators and caches grow to their size
        assert await storm.round(version) > 0
    memory, files, counts = storm.resident_bytes(), storm.open_files(), await storm.metrics()

    num_served = sum([await storm.round(version) for version in (3, 4, 5)])
    assert num_served > REQUESTS_PER_ROUND

    executor, router = storm.stack.executors[0], storm.stack.routers[0]
    leak = await leak_of(storm.client, storm.stack.redis_admin_url, MODEL, 30.0, [executor.http_address])
    assert leak == Leak(0, 0, 0)
    after = await storm.metrics()
    num_loads = after["inflight_adapter_loads_total"] - counts["inflight_adapter_loads_total"]
    assert num_loads >= 100
    assert after["inflight_adapter_slots"] == NUM_SLOTS
    assert after["inflight_adapter_slots_used"] <= NUM_SLOTS
    assert after["inflight_blocks_used"] == after["inflight_blocks_reserved"] == 0

    # A tenth of what the loads read: neither files nor weights are kept
    grown = {name: size - memory[name] for name, size in storm.resident_bytes().items()}
    bound = num_loads * adapter_bytes / 10
    assert grown[executor.name] < bound, (grown, num_loads, adapter_bytes)
    assert grown[router.name] < bound
    assert all(number - files[name] <= FEW_FILES for name, number in storm.open_files().items())

    # Every slot can be had, and both versions of a name say what they said
    async with asyncio.timeout(200):
        for name in (*NAMES, *NAMES):
            await storm.client.complete("afterwards", adapter_id=name, max_tokens=1)
