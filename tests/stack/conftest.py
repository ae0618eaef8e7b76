"""Real stacks for the tests of this folder: two routers, two executors, one Redis, SmolLM2 in float32; one with default
settings; and a model that is quick to load, for stacks of which the processes matter and not what they say.

Their processes are forks (`tests.support.stack.forked`). A test of what they get from their start has a `program`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from inflight.bench.fleet.tiny_model import write_tiny_model
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.support.stack.executors_linked import wait_for_executors
from tests.support.stack.forked import forked_processes

# Small enough that requests wait: 40 blocks of 16 tokens, three seats.
EXECUTOR_ARGS = (
    *("--dtype", "float32"),
    *("--max-tokens-in-paged-kv-cache", "640"),
    *("--max-num-sequences", "3"),
    *("--num-standby-sequences", "1"),
    *("--max-num-tokens", "64"),
    *("--num-threads", "1"),
)


@pytest.fixture(scope="session", autouse=True)
def _forked_processes() -> Iterator[None]:
    with forked_processes():
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """The stack; started once, since loading the model twice takes seconds."""
    run_dir = tmp_path_factory.mktemp("stack")
    options = StackOptions(executors=2, routers=2, executor_args=EXECUTOR_ARGS, run_dir=run_dir)
    async with LocalStack(options) as running:
        await wait_for_executors(running.address, options.executors)
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def default_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """As `inflight up --gateway` starts it."""
    options = StackOptions(gateways=1, run_dir=tmp_path_factory.mktemp("default") / "run")
    async with LocalStack(options) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of two small layers."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))
