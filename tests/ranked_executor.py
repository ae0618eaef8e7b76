"""The model and the runner of an executor with ranks, in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from executor.engine.runner import StepRunner
from executor.main import Loaded, load_model, start_runner
from executor.scheduler.blocks import BlockPool
from executor.scheduler.scheduler import Scheduler
from executor.settings import ExecutorSettings


@contextmanager
def start_ranks(settings: ExecutorSettings) -> Iterator[tuple[Loaded, StepRunner]]:
    """Yields an executor's model and its runner. The workers end with the context."""
    loaded = load_model(settings)
    try:
        yield loaded, start_runner(settings, loaded)
    finally:
        if loaded.group is not None:
            loaded.group.close()


def scheduler_of(loaded: Loaded, block_size: int) -> Scheduler:
    """Returns a scheduler over the model's KV blocks."""
    return Scheduler(loaded.limits, BlockPool(loaded.num_blocks, block_size))
