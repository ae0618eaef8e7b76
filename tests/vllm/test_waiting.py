"""The class that runs vLLM's workers on a CPU. Only its base class is a stand-in."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

INTERFACE = "vllm.v1.executor.multiproc_executor"
MODULE = "inflight.executor.vllm.waiting"


def test_engine_process_does_not_spin_for_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        def _init_executor(self) -> None:
            local = SimpleNamespace(_spin_condition=SimpleNamespace(busy_loop_s=1.0))
            self.response_mqs = [local, SimpleNamespace(_spin_condition=None), SimpleNamespace()]

    parts = INTERFACE.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    vllm: Any = sys.modules[INTERFACE]
    vllm.MultiprocExecutor = Base
    executor = importlib.import_module(MODULE).WaitingExecutor()
    del sys.modules[MODULE]
    executor._init_executor()
    assert executor.response_mqs[0]._spin_condition.busy_loop_s == 0.0
