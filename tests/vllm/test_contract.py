"""The fake backend passes the contract of the real one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from inflight.executor.vllm.backend import Backend
from tests.vllm.contract import CONTRACT
from tests.vllm.fake_backend import FakeBackend


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
async def test_fake_backend(rule: Callable[[Backend], Awaitable[None]]) -> None:
    backend = FakeBackend(automatic=True)
    await rule(backend)
    assert not backend.requests
