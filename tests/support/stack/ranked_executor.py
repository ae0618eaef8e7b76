"""The model and the runner of an executor with ranks, in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from inflight.executor.engine.runner import StepRunner
from inflight.executor.loader import Loaded, load_executor
from inflight.executor.main import start_runner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.settings import ExecutorSettings


@contextmanager
def load_ranks(settings: ExecutorSettings) -> Iterator[Loaded]:
    """Yields an executor's model. The workers end with the context, and so does the process group.

    A group that has failed leaves its process group to the end of the executor's process. In a process of tests the
    next one could not be opened.
    """
    group = None
    try:
        loaded = load_executor(settings)
        group = loaded.group
        yield loaded
    finally:
        if group is not None:
            group.close()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def start_ranks(settings: ExecutorSettings) -> Iterator[tuple[Loaded, StepRunner]]:
    """Yields an executor's model and its runner. The workers end with the context."""
    with load_ranks(settings) as loaded:
        yield loaded, start_runner(settings, loaded)


def scheduler_of(loaded: Loaded, block_size: int) -> Scheduler:
    """Returns a scheduler over the model's KV blocks."""
    return Scheduler(loaded.limits, BlockPool(loaded.num_blocks, block_size))
