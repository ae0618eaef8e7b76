"""Entry point of an executor process. It sets what must be set before torch is loaded, and checks settings and
addresses. Then it runs `inflight.executor.main`, whose imports take some seconds.

libgomp, torch's thread pool on a CPU, reads its environment when it is loaded. Its threads spin between operations,
about a millisecond by default. If another process uses a core, the threads then wait for one another at each of some
hundred operations of a step. Spinning a thirtieth of that is as fast while the cores are free, and delays a step less
when they are not. Measured on 2 cores, SmolLM2 in bfloat16, a step of 8 sequences at 300 tokens of context:

    spin count            300,000 (default)   40,000   10,000   2,000      0
    cores free                  40 ms          38 ms    39 ms   55 ms   72 ms
    one core busy              221 ms         252 ms   129 ms   73 ms
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from inflight.common.process import run_process
from inflight.common.rpc.server import check_listen
from inflight.common.settings import SettingError, describe, load
from inflight.common.telemetry.logs import start_logging
from inflight.executor.serving.router_auth import load_server_tls
from inflight.executor.settings import ExecutorSettings

log = logging.getLogger(__name__)

SPIN_COUNT = "10000"
# `device_index` is below it.
MAX_DEVICES = 64
DEVICES = "CUDA_VISIBLE_DEVICES"


def main(argv: Sequence[str]) -> int:
    """Runs an executor until it is told to stop. Returns the exit code."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    return run_process(lambda: _run_with_settings(argv))


def _run_with_settings(argv: Sequence[str]) -> int:
    settings = load(ExecutorSettings, "inflight executor", argv)
    start_logging("executor", settings.log_level, settings.log_format)
    for line in describe(settings):
        log.info("setting %s", line)
    if settings.device != "cpu" and settings.device_index:
        os.environ[DEVICES] = devices_from(settings.device_index, os.environ.get(DEVICES))
    if settings.tensor_parallel_rank:
        with _without_garbage_collection():
            from inflight.executor.ranks import check_parallel, run_worker
        check_parallel(settings)
        return run_worker(settings)
    tls = load_server_tls(settings)
    for listen in (settings.listen, settings.health_listen, settings.http_listen):
        if listen:
            check_listen(listen)
    if settings.engine == "vllm":
        from inflight.executor.vllm.main import run_vllm_executor

        return asyncio.run(run_vllm_executor(settings, tls))
    if settings.engine_args:
        raise SettingError("engine_args are the flags of another engine: set engine=vllm as well")
    with _without_garbage_collection():
        from inflight.executor.loader import load_executor
        from inflight.executor.main import run_executor
    return asyncio.run(run_executor(settings, load_executor(settings), tls))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Imports without collections, and excludes what they make for good. All of it stays, and the collector would go
    through it again and again: a fifth of the processor time until an executor serves."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def devices_from(first: int, visible: str | None) -> str:
    """Returns the GPUs that CUDA shows without those before `first`, which thus becomes the first. CUDA itself ignores
    numbers from the first on that it does not have."""
    devices = [str(number) for number in range(MAX_DEVICES)] if visible is None else visible.split(",")
    return ",".join(devices[first:])
