"""Choice of the attention backend for a device, and the errors of unusable ones."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from inflight.common.model_source import ModelError
from inflight.executor.attention.backend import KvShape
from inflight.executor.attention.choice import choose_backend

CUDA = torch.device("cuda", 0)


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100, as torch would describe it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=108))


@pytest.mark.usefixtures("_gpu")
def test_gpu_gets_triton() -> None:
    choice = choose_backend("auto", CUDA, torch.bfloat16, [KvShape(8, 128)])
    assert (choice.backend.name, choice.is_fallback) == ("triton", False)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("capability", "has_triton", "head_dim", "reason"),
    [
        ((7, 5), True, 128, r"the GPU has compute capability \(7, 5\)"),
        ((9, 0), False, 128, "the package triton is not installed"),
        ((9, 0), True, 512, "heads of 512 numbers are larger than 256"),
    ],
)
def test_gpu_that_cannot_run_triton_gets_the_reference_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_triton: bool, head_dim: int, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if not has_triton:
        monkeypatch.setitem(sys.modules, "triton", None)
    shapes = [KvShape(8, head_dim)]

    choice = choose_backend("auto", CUDA, torch.bfloat16, shapes)

    assert (choice.backend.name, choice.is_fallback) == ("reference", True)
    with pytest.raises(ModelError, match=f"attention backend 'triton' cannot run: {reason}"):
        choose_backend("triton", CUDA, torch.bfloat16, shapes)


def test_triton_runs_on_a_cpu_only_where_its_interpreter_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", cpu, torch.float32).backend.name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ModelError, match="the device is cpu, and TRITON_INTERPRET=1 is not set"):
        choose_backend("triton", cpu, torch.float32)


def test_cpu_backend_is_refused_for_a_gpu() -> None:
    with pytest.raises(ModelError, match="attention backend 'cpu' cannot run: the device is cuda"):
        choose_backend("cpu", CUDA, torch.bfloat16)


def test_instructions_that_are_asked_for_by_name_are_not_replaced() -> None:
    cpu, shapes = torch.device("cpu"), [KvShape(2, 16)]
    with pytest.raises(ModelError, match="instruction set 'sse9' cannot be used: this processor has no sse9; it has"):
        choose_backend("auto", cpu, torch.float32, shapes, instructions="sse9")
    # where no kernels are wanted it does not matter
    assert choose_backend("reference", cpu, torch.float32, shapes, instructions="sse9").backend.name == "reference"


def test_backends_are_chosen_where_triton_is_not_installed() -> None:
    program = "import sys; sys.modules['triton'] = None; import inflight.executor.attention.choice"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
