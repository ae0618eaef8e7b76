"""The launches of a step on a GPU, for each way to compute one: few, as many for any number of rows, and of kernels
that were compiled at the start. The kernels are recorded and not run, so numbers have no meaning here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig
from triton.runtime.interpreter import InterpretedFunction

from inflight.common.model_source import resolve_model
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.forward.gpu_network import GpuNetworkForward
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.loader import load_model
from inflight.executor.recurrent.mixer import StateSizes
from tests.kernels.test_coded_experts import CASES as CODED_EXPERTS
from tests.kernels.test_gpu_graphs import Captured
from tests.kernels.test_gpu_network import CONFIGS as NETWORKS
from tests.kernels.test_gpu_quantized import CASES as QUANTIZED
from tests.kernels.test_gpu_recurrent import FAMILY
from tests.kernels.test_gpu_runner import BLOCK_SIZE, LIMITS
from tests.support.checkpoints.quantized_checkpoints import save_quantized
from tests.support.checkpoints.tiny_models import save_model, sizes

SEATS, MOST_TOKENS, MOST_GRAPH_TOKENS = 20, 300, 32
MANY = replace(LIMITS, max_num_sequences=SEATS, max_num_tokens=MOST_TOKENS, context_length=MOST_TOKENS + 1)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
Folder = Callable[[Path], Path]


def of(config: PretrainedConfig) -> Folder:
    return lambda path: save_model(config, path)


def quantized(family: str, encode: Any, config: Any) -> Folder:
    return lambda path: save_quantized(path, family, config, encode)


# A model for each way, and the type of its weights.
WAYS: dict[str, tuple[Folder, str]] = {
    "dense": (of(LlamaConfig(**sizes(num_hidden_layers=1))), "auto"),
    "fp8": (of(LlamaConfig(**sizes(num_hidden_layers=1))), "fp8"),
    "quantized": (quantized("llama", *QUANTIZED["gptq"]), "auto"),
    "experts": (of(Qwen3MoeConfig(**sizes(num_hidden_layers=1, **EXPERTS))), "auto"),
    "quantized-experts": (quantized(*CODED_EXPERTS["qwen3-moe in FP8 blocks"]), "auto"),
    "recurrent": (of(FAMILY["lfm2"]), "auto"),
    "recurrent-matrices": (of(FAMILY["qwen3_5"]), "auto"),
    "recurrent-mamba": (of(FAMILY["granite_hybrid"]), "auto"),
    "recurrent-experts": (of(FAMILY["nemotron_h"]), "auto"),
    "network": (of(NETWORKS["experts"]), "auto"),
}


class Launches(TorchDispatchMode):
    """The launches of Triton's kernels, which are not run, and the operations of torch while it is entered.

    A kernel is compiled for each of its `kinds`: its constants, the types of the other arguments, and which integers
    are 1 or multiples of 16.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[str] = []
        self.kinds: set[tuple[object, ...]] = set()
        self.operations: list[str] = []

        def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            bound = dict(zip(kernel.arg_names, arguments, strict=False)) | options
            self.kernels.append(kernel.__name__)
            self.kinds.add((kernel.__name__, *((name, kind_of(kernel, name, bound[name])) for name in bound)))

        monkeypatch.setattr(InterpretedFunction, "run", launch)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A view launches nothing, and neither does memory that is not filled.
        if not (function.is_view or "empty" in function.name()):
            self.operations.append(function.name())
        return function(*args, **(kwargs or {}))


def kind_of(kernel: Any, name: str, value: Any) -> object:
    """What Triton compiles a kernel for, of an argument or option."""
    is_constant = "constexpr" in str(kernel.fn.__annotations__.get(name)) or name not in kernel.arg_names
    if is_constant or value is None:
        return value
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, float) or name in (kernel.kwargs["do_not_specialize"] or ()):
        return type(value)
    return value == 1, value % 16 == 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr("inflight.executor.model.loader._check", lambda *_: None)
    monkeypatch.setattr("inflight.executor.gpu.runner.GraphCheck.run", lambda *_: None)
    return Launches(monkeypatch)


def runner_of(name: str, folder: Path, **options: Any) -> GpuRunner:
    """The runner of a model, before it is prepared."""
    make, weight_dtype = WAYS[name]
    model = load_model(
        resolve_model(str(make(folder))),
        dtype_name="float32",
        backend_name="triton",
        device_name="cpu",
        weight_dtype=weight_dtype,
    )
    forward = model.forward
    assert isinstance(forward, GpuForward | GpuNetworkForward)
    if forward.states is not None:
        forward.states.reserve(StateSizes(SEATS, 0, 0))
    decoder: Any = forward.decoder if isinstance(forward, GpuForward) else forward._decoder
    kv = forward.allocate_kv(4, BLOCK_SIZE)
    return GpuRunner(decoder, kv, MANY, BLOCK_SIZE, **options)


def compute(runner: GpuRunner, lengths: Sequence[int]) -> None:
    """Computes a step with these numbers of new tokens, kernel by kernel."""
    layout = runner._upload_idle(lengths)
    with torch.inference_mode():
        runner._step.compute(layout, len(lengths) if max(lengths) == 1 else 0)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("uses_graphs", [False, True])
def test_no_step_needs_a_kernel_that_the_start_has_not_compiled(
    name: str, uses_graphs: bool, launches: Launches, tmp_path: Path
) -> None:
    """A kernel is compiled at its first launch, which takes seconds in which no sequence gets a token."""
    options = {"max_graph_tokens": MOST_GRAPH_TOKENS, "capture_graphs": Captured({})} if uses_graphs else {}
    runner = runner_of(name, tmp_path / "model", **options if name != "network" else {})
    runner.prepare()
    assert launches.kinds
    known = launches.kinds.copy()
    # Given decodes of each number, and chunks that no graph holds, alone and beside decodes
    for count in range(1, SEATS + 1):
        compute(runner, [1] * count)
    for num_tokens in range(MOST_GRAPH_TOKENS + 1 if uses_graphs else 2, MOST_TOKENS + 1):
        compute(runner, [num_tokens])
        if num_tokens > SEATS:
            compute(runner, [1] * 7 + [num_tokens - 7])
    # Then
    assert not launches.kinds - known


# Kernels and operations of torch in a step of decodes. Each has one kernel that fills in tokens, three that draw and a
# last norm, and torch's embedding and product with the output layer. A layer of attention has two norms, a kernel that
# writes KV and two that read it, and one for the gate or, in FP8, two that round; one of experts has six in its place.
# A short convolution is one kernel, a gated delta net and Mamba 2 three. Products are four a layer; of codes one or
# two kernels each, and an operation that puts inputs in order with act-order.
STEPS = {
    "dense": (11, 6),
    "fp8": (12, 6),
    "quantized": (25, 10),
    "experts": (16, 4),
    "quantized-experts": (19, 2),
    "recurrent": (19, 14),
    "recurrent-matrices": (17, 12),
    "recurrent-mamba": (17, 14),
    "recurrent-experts": (27, 12),
    "network": (10, 134),
}


@pytest.mark.parametrize("name", WAYS)
def test_decodes_have_few_launches_whatever_their_number(name: str, launches: Launches, tmp_path: Path) -> None:
    runner = runner_of(name, tmp_path / "model")
    compute(runner, [1])
    found = []
    for count in (4, SEATS):
        layout = runner._upload_idle([1] * count)
        launches.kernels.clear()
        launches.operations.clear()
        with torch.inference_mode(), launches:
            runner._step.compute(layout, count)
        found.append((len(launches.kernels), len(launches.operations)))
    num_kernels, num_operations = STEPS[name]
    assert found[0] == found[1]
    assert found[0][0] == num_kernels
    # Those of transformers' modules depend on its version.
    assert found[0][1] <= num_operations
