"""The system of this folder: two routers, two executors and a Redis, started once for each file."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from inflight import AsyncClient
from inflight.bench.chaos.setting import TINY_STEP_MS
from inflight.bench.fleet.fleet import running_fleet
from inflight.bench.fleet.health import Observer
from inflight.bench.fleet.tiny_model import NAME, write_tiny_model
from inflight.local.options import StackOptions
from tests.chaos.system import BRAKED_FROM, PATIENCE_S, System
from tests.support.stack.braked import ProcessBrake
from tests.support.stack.forked import forked_processes


@pytest.fixture(scope="session", autouse=True)
def _forked_processes() -> Iterator[None]:
    with forked_processes():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """The running system, whole and idle."""
    folder = tmp_path_factory.mktemp("chaos")
    brake = ProcessBrake(folder / "brake")
    poisoned = (sys.executable, "-P", "-m", "tests.chaos.poisoned", str(brake.path))
    options = StackOptions(
        executors=2,
        routers=2,
        model=str(write_tiny_model(folder)),
        run_dir=folder / "run",
        program=(*poisoned, str(BRAKED_FROM), str(TINY_STEP_MS)),
        executor_args=(
            *("--dtype", "float32"),
            *("--max-num-sequences", "4"),
            *("--num-standby-sequences", "0"),
            *("--max-tokens-in-paged-kv-cache", "1024"),
        ),
        # Poison takes both executors away for as long as it takes to start one.
        router_args=("--no-executor-grace-s", str(PATIENCE_S)),
    )
    async with (
        running_fleet(options, copies=True) as fleet,
        AsyncClient(*fleet.addresses) as client,
        Observer(fleet, NAME) as observer,
    ):
        await observer.wait_until_whole(PATIENCE_S)
        yield System(fleet, client, observer, brake)
