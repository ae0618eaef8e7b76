"""The class that runs vLLM's workers on a CPU. Only its base class is a stand-in."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

INTERFACE = "vllm.v1.executor.multiproc_executor"
MODULE = "inflight.executor.vllm.waiting"


def test_engine_process_sleeps_until_its_workers_notify_it_or_for_a_quarter_of_the_time_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits_ms: list[int] = []

    class Base:
        def _init_executor(self) -> None:
            condition = SimpleNamespace(
                busy_loop_s=1.0, last_read=100.0, wait=lambda *, timeout_ms: waits_ms.append(timeout_ms)
            )
            local = SimpleNamespace(_spin_condition=condition)
            self.response_mqs = [local, SimpleNamespace(_spin_condition=None), SimpleNamespace()]

    parts = INTERFACE.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    vllm: Any = sys.modules[INTERFACE]
    vllm.MultiprocExecutor = Base
    module = importlib.import_module(MODULE)
    executor = module.WaitingExecutor()
    del sys.modules[MODULE]
    executor._init_executor()
    condition = executor.response_mqs[0]._spin_condition
    assert condition.busy_loop_s == 0.0
    for now_s, timeout_ms in ((100.0, None), (100.04, 5000), (100.04, 1), (160.0, None)):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda now_s=now_s: now_s))
        condition.wait(timeout_ms=timeout_ms)
    assert waits_ms == [2, 10, 1, 16]
