"""Graphs of the GPU runner without a GPU: a stand-in for a CUDA graph computes its step at once, and faulty stand-ins
are refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.attention.backend import StepAttention
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.device_step import DeviceStep, GraphedStep, StepForm
from inflight.executor.gpu.graph_check import StepResult, TrialRows, difference
from inflight.executor.gpu.graphs import Bucket, Graph, frozen_garbage
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from tests.kernels.test_gpu_drafts import check_drafts
from tests.kernels.test_gpu_runner import BLOCK_SIZE, LIMITS, NUM_BLOCKS, assert_same_sequences, load, outputs, requests

Compute = Callable[[Bucket], None]
DECODES = [Bucket.of_decodes(count) for count in (1, 2, 3)]
# Tokens of the largest step with chunks that has a graph here, and the buckets below.
MOST_TOKENS = 8
MIXED = [Bucket(MOST_TOKENS, 3, False)]


@dataclass
class StandIn:
    """Computes a captured step when it is replayed. `replays` counts by bucket."""

    bucket: Bucket
    compute: Compute
    replays: dict[Bucket, int]

    def replay(self) -> None:
        self.replays[self.bucket] = self.replays.get(self.bucket, 0) + 1
        self.compute(self.bucket)


@dataclass
class Captured:
    """Captures stand-ins; `fault` wraps what they compute."""

    replays: dict[Bucket, int]
    fault: Callable[[Compute], Compute] = lambda compute: compute

    def __call__(self, fill: Compute, compute: Compute, buckets: Iterable[Bucket]) -> Mapping[Bucket, Graph]:
        for bucket in buckets:
            fill(bucket)
            compute(bucket)
        return {bucket: StandIn(bucket, self.fault(compute), self.replays) for bucket in buckets}


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that compile kernels compile nothing in the interpreter, and `test_gpu_runner` runs them."""
    monkeypatch.setattr("inflight.executor.gpu.runner.warm_up_lengths", lambda *_: [])


@pytest.fixture
def model(folder: Path) -> PagedModel:
    return load(folder, "triton")


def runner_of(model: PagedModel, captured: Captured) -> GpuRunner:
    assert isinstance(model.forward, GpuForward)
    return GpuRunner(
        model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE, max_graph_tokens=MOST_TOKENS, capture_graphs=captured
    )


def test_replayed_steps_yield_the_tokens_of_the_generic_runner(
    folder: Path, model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, ours = requests(), requests()
    for some in (*expected[2:], *ours[2:]):
        some.num_top_logprobs, some.num_prompt_logprobs = 2, 1
    outputs(ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), expected)
    captured = Captured({})
    runner = runner_of(model, captured)
    runner.prepare()
    assert captured.replays == dict.fromkeys(DECODES + MIXED, 1), "each graph is checked once"
    forms: list[StepForm] = []
    compute = runner._graphed.compute

    def recorded(form: StepForm, attention: StepAttention | None, hidden_rows: Tensor | None) -> Tensor | None:
        forms.append(form)
        return compute(form, attention, hidden_rows)

    monkeypatch.setattr(runner._graphed, "compute", recorded)
    # Given steps of decodes, steps with chunks that fit a graph, and larger ones
    outputs(runner, ours)
    assert_same_sequences(ours, expected)
    assert all(captured.replays[bucket] > 1 for bucket in (DECODES[-1], *MIXED))
    launched = [form.layout.num_tokens for form in forms if form.bucket is None]
    assert launched
    assert min(launched) > MOST_TOKENS, "only steps that no graph holds are launched kernel by kernel"


def test_replayed_steps_in_fp8_yield_the_tokens_of_launched_ones(folder: Path) -> None:
    """Padding tokens have no attention, so rows of zeros are rounded, and are written to the spare block."""
    model = load_model(
        resolve_model(str(folder)),
        dtype_name="float32",
        backend_name="triton",
        device_name="cpu",
        weight_dtype="fp8",
        kv_cache_dtype="fp8",
    )
    assert isinstance(model.forward, GpuForward)
    found, replays = [], dict[Bucket, int]()
    for uses_graphs in (False, True):
        model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        runner = GpuRunner(
            *(model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE),
            uses_graphs=uses_graphs,
            max_graph_tokens=MOST_TOKENS,
            capture_graphs=Captured(replays),
        )
        runner.prepare()
        found.append(outputs(runner, requests()))
    assert found[0] == found[1]
    assert all(replays[bucket] > 1 for bucket in (DECODES[-1], *MIXED))


def test_steps_with_drafts_are_replayed(folder: Path) -> None:
    captured = Captured({})
    limits = replace(LIMITS, max_num_tokens=14, max_drafts=5)
    check_drafts(folder, "plain", limits, load, captures_graphs=True, capture_graphs=captured)
    assert captured.replays[Bucket(14, 3, False)] > 1


def test_without_a_limit_only_decodes_have_graphs(model: PagedModel) -> None:
    assert isinstance(model.forward, GpuForward)
    runner = GpuRunner(model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE, capture_graphs=(captured := Captured({})))
    runner.prepare()
    assert list(captured.replays) == DECODES


def test_without_graphs_none_is_captured_and_steps_have_no_padding(model: PagedModel) -> None:
    assert isinstance(model.forward, GpuForward)
    runner = GpuRunner(
        *(model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE),
        uses_graphs=False,
        max_graph_tokens=MOST_TOKENS,
        capture_graphs=(captured := Captured({})),
    )
    runner.prepare()
    assert captured.replays == {}
    assert outputs(runner, requests()[:1])[0]
    assert runner._step._states.numel() == 0


def test_graphs_are_checked_in_a_pool_of_one_block_too(model: PagedModel) -> None:
    model.allocate_kv(1, BLOCK_SIZE)
    runner_of(model, captured := Captured({})).prepare()
    assert captured.replays == dict.fromkeys(DECODES + MIXED, 1)


def writes_nothing(compute: Compute) -> Compute:
    return lambda bucket: None


def computes_fewer_rows(compute: Compute) -> Compute:
    return lambda bucket: compute(Bucket.of_decodes(max(1, bucket.num_sequences - 1)))


def of_mixed_steps(fault: Callable[[Compute], Compute]) -> Callable[[Compute], Compute]:
    """The fault in graphs of steps with chunks only."""

    def faulty(compute: Compute) -> Compute:
        broken = fault(compute)
        return lambda bucket: (compute if bucket.is_decodes else broken)(bucket)

    return faulty


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (writes_nothing, "1 decodes"),
        (computes_fewer_rows, "2 decodes"),
        (of_mixed_steps(writes_nothing), "8 tokens of 3 sequences"),
    ],
)
def test_graph_that_computes_something_else_is_refused(
    model: PagedModel, fault: Callable[[Compute], Compute], name: str
) -> None:
    runner = runner_of(model, Captured({}, fault))
    with pytest.raises(ModelError, match=f"the CUDA graph of {name} .* enable_cuda_graphs=false"):
        runner.prepare()


@pytest.mark.parametrize("name", ["1 decodes", "8 tokens of 3 sequences"])
def test_graph_of_another_pool_is_refused(model: PagedModel, name: str) -> None:
    """As if the pool had been allocated again after the capture."""
    old_kv = model.kv
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    assert isinstance(model.forward, GpuForward)
    decoder = model.forward.decoder
    runner: GpuRunner

    def of_old_pool(compute: Compute) -> Compute:
        step = DeviceStep(decoder, old_kv, runner._buffers, BLOCK_SIZE, 1)
        step.logits, step._states = runner._step.logits, runner._step._states
        return GraphedStep(step, 1, ())._compute_captured

    runner = runner_of(model, Captured({}, of_old_pool if "decodes" in name else of_mixed_steps(of_old_pool)))
    with pytest.raises(ModelError, match=f"the CUDA graph of {name} .*: its logits differ by"):
        runner.prepare()


def test_graph_that_draws_another_token_is_refused(model: PagedModel) -> None:
    runner: GpuRunner

    def shifts_ids(compute: Compute) -> Compute:
        def computed(bucket: Bucket) -> None:
            compute(bucket)
            runner._buffers.sampled_ids += 1

        return computed

    runner = runner_of(model, Captured({}, shifts_ids))
    with pytest.raises(ModelError, match="it draws a token that is not the likeliest"):
        runner.prepare()


def result(logits: list[list[float]], token_ids: list[int], dtype: torch.dtype = torch.bfloat16) -> StepResult:
    return StepResult(torch.tensor(logits).to(dtype), torch.tensor(token_ids, dtype=torch.int32))


LAUNCHED = result([[4.0, 3.9375, -4.0, -4.0]], [0])


def test_rounding_may_choose_another_token_only_where_two_are_nearly_equal() -> None:
    # Given two logits within the rounding of each other, and two that are not
    assert difference(LAUNCHED, result([[3.9375, 4.0, -4.0, -4.0]], [1])) is None
    apart = result([[4.0, 3.25, -4.0, -4.0]], [0])
    assert "its logits differ" in str(difference(apart, result([[3.25, 4.0, -4.0, -4.0]], [1])))


def test_one_wide_change_in_many_logits_is_seen_by_its_margin() -> None:
    # Given a vocabulary so large that a single logit hardly changes the distance
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(2, 50_000, generator=generator).clamp(-3, 3)
    expected[:, 7] = 5.0
    found = expected.clone()
    found[1, 9] = 6.0
    ids = torch.tensor([7, 9], dtype=torch.int32)
    launched = StepResult(expected.bfloat16(), torch.tensor([7, 7], dtype=torch.int32))
    assert "chooses another token" in str(difference(launched, StepResult(found.bfloat16(), ids)))


@pytest.mark.parametrize("token_id", [-1, -3, 4])
def test_token_that_is_no_id_of_the_vocabulary_is_refused(token_id: int) -> None:
    assert difference(LAUNCHED, replace(LAUNCHED, token_ids=torch.tensor([token_id]))) is not None


def test_numbers_that_are_none_are_refused() -> None:
    assert difference(LAUNCHED, replace(LAUNCHED, logits=LAUNCHED.logits * float("nan"))) is not None


@pytest.mark.parametrize(("most", "num_blocks", "context_length"), [(1, 1, 64), (8, 3, 64), (4, 100, 2000), (5, 6, 9)])
def test_no_two_trial_rows_share_a_block(most: int, num_blocks: int, context_length: int) -> None:
    rows = TrialRows.of(most, num_blocks, BLOCK_SIZE, context_length, 100)
    blocks = [block for sequence in rows.sequences for block in sequence.block_table]
    assert len(rows.sequences) == min(most, num_blocks)
    assert len(set(blocks)) == len(blocks)
    assert set(blocks) <= set(range(1, num_blocks + 1))
    for sequence in rows.sequences:
        assert 2 <= sequence.num_tokens <= context_length
        assert len(sequence.block_table) * BLOCK_SIZE >= sequence.num_tokens
    written = [0] * len(rows.sequences)
    for trial in rows.prefills(16):
        (seat,) = trial.seats
        assert trial.plan.starts == [written[seat]]
        written[seat] += trial.plan.lengths[0]
    assert written == [sequence.num_tokens - 1 for sequence in rows.sequences]


@pytest.mark.parametrize(
    "bucket", [Bucket(1, 1, False), Bucket(8, 3, False), Bucket(512, 16, False), DECODES[2]], ids=str
)
@pytest.mark.parametrize("num_blocks", [1, 5, 100])
def test_trial_steps_fit_their_bucket_and_yield_a_token_for_each_row(bucket: Bucket, num_blocks: int) -> None:
    rows = TrialRows.of(16, num_blocks, BLOCK_SIZE, 2000, 100)
    trial = rows.fill(bucket)
    count = min(bucket.num_sequences, len(rows.sequences))
    assert sorted(trial.seats) == list(range(count))
    assert trial.plan.sequences == [rows.sequences[seat] for seat in trial.seats]
    assert trial.plan.num_tokens <= bucket.num_tokens
    assert all(trial.plan.samples)
    ends = [start + length for start, length in zip(trial.plan.starts, trial.plan.lengths, strict=True)]
    assert ends == [sequence.num_tokens for sequence in trial.plan.sequences]
    assert trial.plan.num_decodes >= count // 2
    if bucket.is_decodes:
        assert trial.plan.num_decodes == count
    elif bucket.num_tokens > count:
        assert max(trial.plan.lengths) > 1
        assert min(trial.plan.starts) > 0


def test_no_garbage_is_collected_while_graphs_are_captured() -> None:
    with frozen_garbage():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
