"""Tests that need an NVIDIA GPU, with kernels that run on it: `make test-gpu`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    """Skips, with the reason, where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no NVIDIA GPU here")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this run; `make test-gpu` runs them on the GPU")
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", 0)
