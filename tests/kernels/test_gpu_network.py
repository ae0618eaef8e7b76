"""The network of transformers in the steps of `GpuRunner`, by Triton's interpreter: models outside the families."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Ernie4_5_MoeConfig, Glm4Config
from triton.runtime.interpreter import GridExecutor

from inflight.common.model_source import resolve_model
from inflight.executor.engine.runner import PendingStep, StepSizes
from inflight.executor.forward.gpu_network import GpuNetworkForward
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import NO_PROCESSORS, Sampling, StepPlan, StepResult, Stopping
from tests.kernels.test_gpu_runner import (
    BLOCK_SIZE,
    LIMITS,
    NUM_BLOCKS,
    assert_same_sequences,
    changed_requests,
    outputs,
    sequence,
)
from tests.support.checkpoints.tiny_models import save_model, sizes

# Three decodes are in a step of four.
SEATS = replace(LIMITS, max_num_sequences=4)
EXPERTS = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 96, "moe_layer_start_index": 0}
CONFIGS = {
    "experts": Ernie4_5_MoeConfig(**sizes(**EXPERTS)),
    "rotary-of-neighbours": Glm4Config(**sizes(num_hidden_layers=1)),
}


def load(folder: Path, backend_name: str) -> PagedModel:
    model = load_model(
        resolve_model(str(folder)), dtype_name="float32", backend_name=backend_name, device_name="cpu",
        forward_name="auto" if backend_name == "triton" else "transformers",
    )  # fmt: skip
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return model


def runner_of(model: PagedModel) -> GpuRunner:
    assert isinstance(model.forward, GpuNetworkForward)
    return model.forward.start_runner(model.kv, StepSizes(SEATS, BLOCK_SIZE, uses_graphs=True, max_graph_tokens=64))


@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_are_those_of_the_generic_runner(tmp_path: Path, name: str) -> None:
    folder = save_model(CONFIGS[name], tmp_path / name)
    expected, ours = changed_requests()[:4], changed_requests()[:4]
    scheduler = Scheduler(SEATS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    outputs(ModelRunner(load(folder, "reference"), SEATS, BLOCK_SIZE), expected, scheduler, num_ahead=0)
    outputs(runner_of(load(folder, "triton")), ours, Scheduler(SEATS, BlockPool(NUM_BLOCKS, BLOCK_SIZE)))
    assert_same_sequences(ours, expected)
    assert any(some.processors != NO_PROCESSORS for some in ours)


class Counted(TorchDispatchMode):
    """The operations of torch, and the launches of Triton's kernels, while it is entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operations = 0
        self.num_kernels = 0
        call = GridExecutor.__call__

        def launch(executor: Any, *arguments: Any, **options: Any) -> Any:
            self.num_kernels += 1
            with torch.utils._python_dispatch._disable_current_modes():
                return call(executor, *arguments, **options)

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A view launches nothing, and neither does memory that is not filled.
        self.num_operations += not (function.is_view or "empty" in function.name())
        return function(*args, **(kwargs or {}))


def test_launches_of_a_step_do_not_grow_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given rows that draw from few tokens, for which torch needs hundreds of operations a row
    config = Ernie4_5_MoeConfig(**sizes(num_hidden_layers=1, **EXPERTS | {"moe_num_experts": 2}))
    runner = runner_of(load(save_model(config, tmp_path / "one-layer"), "triton"))
    scheduler = Scheduler(SEATS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    launches = []
    for number in range(3):
        drawn = sequence(number, 3, Sampling(0.8, 5, 0.9, 7))
        drawn.stopping = Stopping(20, 0, frozenset())
        assert scheduler.offer(drawn) is None
        prefill = scheduler.schedule()
        retire(scheduler, prefill, runner.launch(prefill))
        plan = scheduler.schedule()
        assert plan.num_decodes == plan.num_rows == number + 1
        with Counted(monkeypatch) as counted:
            step = runner.launch(plan)
        launches.append((counted.num_operations, counted.num_kernels))
        retire(scheduler, plan, step)
    runner.close()
    # Then one more row is one more row of each launch
    assert len(set(launches)) == 1, launches
    num_operations, num_kernels = launches[0]
    assert num_operations <= 80
    assert num_kernels <= 7


def retire(scheduler: Scheduler, plan: StepPlan, step: PendingStep) -> None:
    scheduler.update(StepResult(plan, step.result(), step.logprobs()))
