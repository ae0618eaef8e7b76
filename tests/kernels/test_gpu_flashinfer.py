"""Chunks by FlashInfer in the GPU runner, through a stand-in, under Triton's interpreter."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inflight.executor.attention.backend import KvShape
from inflight.executor.attention.flashinfer import FlashInfer, Heads
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.engine.runner import StepSizes
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu import graph_check
from inflight.executor.gpu.graph_check import AttentionCheck, TrialRows
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.kernels import tiling
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sampling
from tests.kernels.test_gpu_runner import BLOCK_SIZE, LIMITS, NUM_BLOCKS, load, outputs, sequence
from tests.support.device.flashinfer_stand_in import BatchPrefillWithPagedKVCacheWrapper as StandIn

# Few and small steps, since the interpreter is slow.
SMALL = replace(LIMITS, max_num_sequences=2, context_length=24)


@pytest.fixture
def model(folder: Path) -> PagedModel:
    return load(folder, "triton")


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that warm up compile nothing in the interpreter, and splits of decodes are tested elsewhere."""
    monkeypatch.setattr(tiling, "MAX_SPLITS", 1)
    monkeypatch.setattr("inflight.executor.gpu.runner.warm_up_lengths", lambda *_: [])
    monkeypatch.setattr(StandIn, "num_runs", 0)
    monkeypatch.setattr(StandIn, "scale_error", 1.0)
    monkeypatch.setattr(graph_check, "REPETITIONS", 1)


def timed(monkeypatch: pytest.MonkeyPatch, with_it_s: float, without_s: float) -> None:
    """Gives steps with and without FlashInfer these times."""

    def time_s(device: torch.device, compute: Callable[[], None]) -> float:
        before = StandIn.num_runs
        compute()
        return with_it_s if StandIn.num_runs > before else without_s

    monkeypatch.setattr(graph_check, "_time_s", time_s)


def flashinfer_of(model: PagedModel) -> FlashInfer:
    assert isinstance(model.forward, GpuForward)
    shape, scorings = model.forward.decoder.shape, model.forward.decoder.scorings
    heads = Heads(shape.num_heads, KvShape(shape.num_kv_heads, shape.head_dim), scorings)
    return FlashInfer(StandIn, heads, torch.float32, model.device, TritonAttention())


def runner_of(model: PagedModel) -> GpuRunner:
    assert isinstance(model.forward, GpuForward)
    return GpuRunner(model.forward.decoder, model.kv, SMALL, BLOCK_SIZE, flashinfer=flashinfer_of(model))


def test_runner_with_it_yields_the_tokens_of_the_generic_runner(
    folder: Path, model: PagedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timed(monkeypatch, 1.0, 2.0)
    runner = runner_of(model)
    with caplog.at_level(logging.INFO, "inflight.executor.gpu.runner"):
        runner.prepare()
    assert runner.uses_flashinfer
    times = "1000.00 ms for 16 tokens of 16, 2000.00 ms with triton; 1000.00 ms for 16 tokens of 24, 2000.00 ms"
    assert f"prompt chunks use flashinfer: {times}" in caplog.text
    assert all(not kv.keys.any() and not kv.values.any() for kv in model.kv), "nothing of the trial is left"
    StandIn.num_runs = 0
    expected = _outputs(ModelRunner(load(folder, "reference"), SMALL, BLOCK_SIZE))
    assert _outputs(runner) == expected
    assert StandIn.num_runs > 0, "steps with chunks are computed by it"


@pytest.mark.parametrize(("with_it_s", "name"), [(1.0, "flashinfer"), (3.0, "triton")])
def test_forward_pass_is_named_after_it_only_if_its_runner_uses_it(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch, with_it_s: float, name: str
) -> None:
    timed(monkeypatch, with_it_s, 2.0)
    assert isinstance(model.forward, GpuForward)
    forward = GpuForward(model.forward.decoder, model.forward.layout, flashinfer_of(model))
    assert forward.backend_name == "triton"
    forward.start_runner(model.kv, StepSizes(SMALL, BLOCK_SIZE, uses_graphs=False, max_graph_tokens=0)).close()
    assert forward.backend_name == name


def _outputs(runner: ModelRunner | GpuRunner) -> list[list[int]]:
    return outputs(
        runner, [sequence(0, 14, Sampling(0.0, 0, 1.0, 0))], Scheduler(SMALL, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    )


def failure_of(model: PagedModel) -> str:
    """Returns the warning of a runner that does not use it."""
    runner = runner_of(model)
    verdict = AttentionCheck(runner._step, SMALL).run(flashinfer_of(model))
    assert not verdict.is_used
    assert verdict.is_warning
    return verdict.reason


def test_wrong_results_leave_triton_with_a_warning(model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "scale_error", 1.3)
    assert "2 sequences its logits differ by" in failure_of(model)


def test_failing_one_leaves_triton_with_a_warning(model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvcc")

    monkeypatch.setattr(StandIn, "plan", fail)
    assert "cannot be used: FileNotFoundError: nvcc" in failure_of(model)


def test_row_of_one_sequence_has_blocks_for_all_tokens() -> None:
    rows = TrialRows.of_one(33, 16, 96)
    assert rows.sequences[0].block_table == [1, 2, 3]
    trial = rows.chunk(25, 8)
    assert (trial.plan.starts[0], trial.plan.lengths[0]) == (25, 8)
