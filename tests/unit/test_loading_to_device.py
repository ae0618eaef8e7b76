"""Loading of weights directly to a device. `meta` stands for a GPU: what is copied there takes no host memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.quantized_weight import Matrix
from inflight.executor.formats.loading import load_network
from inflight.executor.formats.network import placed
from tests.support.checkpoints.tiny_models import save_model, sizes

CPU, META = torch.device("cpu"), torch.device("meta")


def peak_memory_bytes() -> int:
    """Returns the largest resident memory of this process so far, as Linux reports it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Resets the peak to the memory that is resident now, and returns it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pytest.skip("the kernel does not let this process reset its peak memory")
    return peak_memory_bytes()


def test_host_memory_never_holds_the_model(tmp_path: Path) -> None:
    # Given weights of about 100 MB, which take half of that in bfloat16
    config = LlamaConfig(**sizes(num_hidden_layers=8) | {"hidden_size": 1024, "intermediate_size": 1024})
    folder = save_model(config, tmp_path / "model")
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert num_bytes > 60_000_000
    source = resolve_model(str(folder))
    load_network(source, torch.bfloat16, META)  # imports what loading needs

    before = forget_peak()
    network, _ = load_network(source, torch.bfloat16, META)
    on_device = peak_memory_bytes() - before
    before = forget_peak()
    load_network(source, torch.bfloat16, CPU)
    on_host = peak_memory_bytes() - before

    assert {parameter.device for parameter in network.parameters()} == {META}
    assert on_device < 0.2 * num_bytes
    assert on_host > 0.4 * num_bytes, "the measurement sees a model in host memory"


def test_weights_are_copied_one_after_the_other() -> None:
    read: list[weakref.ref[Tensor]] = []

    def weights() -> Iterator[tuple[str, Matrix]]:
        for name in ("a", "b", "c"):
            assert all(one() is None for one in read[:-1]), "an earlier weight is still in host memory"
            weight = torch.ones(3)
            read.append(weakref.ref(weight))
            yield name, weight

    names = []
    for name, weight in placed(weights(), META):
        assert isinstance(weight, Tensor)
        assert weight.device == META
        names.append(name)
    assert names == ["a", "b", "c"]
