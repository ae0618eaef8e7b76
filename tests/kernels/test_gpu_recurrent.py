"""Recurrent layers on a GPU, under Triton's interpreter: the bits of a position do not depend on the steps, and logits
and tokens are those of transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence as ReadOnlyList
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    Lfm2Config,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
)

from inflight.common.kv_size import num_slots
from inflight.common.model_files.recurrent import MixerShape
from inflight.common.model_source import ModelError, resolve_model
from inflight.common.settings import SettingError
from inflight.executor.adapters.peft_files import parse, read_files
from inflight.executor.adapters.weights import AdapterLimits
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.graphs import Bucket, Capture
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.loader import load_executor
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.recurrent.gpu_mixer import GpuMixer
from inflight.executor.recurrent.gpu_states import GpuStates
from inflight.executor.recurrent.mixer import StateSizes, StateStep
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Overcommit, SchedulerLimits, SchedulerPolicy, StateLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import PlanRow, Sequence, StepPlan
from inflight.executor.settings import ExecutorSettings
from inflight.executor.step.batch import pack
from tests.kernels.test_gpu_graphs import Captured
from tests.kernels.test_gpu_network import Counted
from tests.kernels.test_gpu_runner import BLOCK_SIZE, LIMITS
from tests.property.test_hybrid_models import TOKENS, sequence_of
from tests.property.test_native_hybrid import WITH_EXPERTS
from tests.property.test_recurrent_mixers import (
    LENGTH,
    MAX_DRAFTS,
    NUM_SEQUENCES,
    SIZES,
    Layer,
    Progress,
    Row,
    run,
    step,
)
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.greedy import assert_greedy
from tests.support.device.mixers import num_columns, vector_sizes
from tests.support.scheduler.drafting import CHEAP, GuessingProposer, eager
from tests.support.scheduler.scheduling import run_overlapped
from tests.unit.test_adapter_logits import CONFIGS as ADAPTERS
from tests.unit.test_adapter_logits import peft_adapter

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_CHECKPOINTS = 40, 4
# Odd sizes: 5 heads of 12 on one KV head, four weights of a convolution, biases; and heads whose sizes are no powers of
# two, two heads of values for each of keys, and a rotary embedding of half a head.
FAMILY: dict[str, PretrainedConfig] = {
    "lfm2": Lfm2Config(
        **sizes(hidden_size=60, intermediate_size=72, num_hidden_layers=3, num_attention_heads=5, head_dim=12)
        | {"num_key_value_heads": 1},
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=4,
        conv_bias=True,
        block_auto_adjust_ff_dim=False,
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **sizes(hidden_size=52, head_dim=24, initializer_range=0.1),
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
}
FAMILY["granite_hybrid"] = GraniteMoeHybridConfig(
    **sizes(hidden_size=60, head_dim=12, initializer_range=0.1, attention_multiplier=0.3),
    layer_types=["linear_attention", "full_attention"],
    num_local_experts=0,
    shared_intermediate_size=72,
    mamba_n_heads=4,
    mamba_n_groups=2,
    mamba_d_state=20,
    residual_multiplier=0.6,
)
# Mamba 2 with experts behind it, Mamba 2 alone, and attention with a feed-forward layer.
NEMOTRON_H: dict[str, Any] = {
    **sizes(hidden_size=60, intermediate_size=72, num_attention_heads=5, num_key_value_heads=1, head_dim=12),
    "initializer_range": 0.1,
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
    "mamba_num_heads": 2,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.5,
}
FAMILY["nemotron_h"] = NemotronHConfig(**NEMOTRON_H)
WITHOUT_EXPERTS = NemotronHConfig(
    **NEMOTRON_H | {"layers_block_type": ["linear_attention", "linear_attention", "full_attention", "mlp"]}
)
SHAPES = {
    "lfm2": MixerShape(4, 10),
    "qwen3_5": MixerShape(4, 64, 1, 2, 12, 20),
    "granite_hybrid": MixerShape(4, 128, 2, 4, 12, 20, corrects=False),
}


def random_layer(name: str, device: torch.device, shape: MixerShape | None = None) -> Layer:
    """A recurrent layer between its projections, with random weights."""
    shape = shape or SHAPES[name]
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn((shape.conv_width, shape.channels), generator=generator).to(device)
    vectors = {name: torch.randn(size, generator=generator) for name, size in vector_sizes(shape).items()}
    # Some heads forget at once, others hardly.
    vectors |= {"rates": -torch.tensor([0.01, 3.0] * (shape.num_heads // 2))} if shape.num_heads else {}
    vectors |= {"limits": torch.tensor([0.1, float("inf")])} if "limits" in vectors else {}
    mixer = GpuMixer(shape, taps, tuple(vector.to(device) for vector in vectors.values()), 1)
    states = GpuStates(shape, 2, torch.float32, device)
    states.reserve(SIZES)
    columns = num_columns(shape)

    def compute(inputs: Tensor, step: StateStep) -> Tensor:
        rows = torch.from_numpy(states.follow(step.batch))
        batch = replace(step.batch, state_rows=rows).to(device)
        repeats = -(-columns // inputs.shape[1])
        projected = inputs.repeat(1, repeats)[:, :columns].contiguous().to(device)
        return mixer.mix(projected, batch, states.tensors, 1e-6).cpu()

    return compute


def check_bits(name: str, device: torch.device, seed: int, shape: MixerShape | None = None) -> None:
    """Asserts that positions alone have the bits that they have in random steps, with drafts that are not accepted, in
    other slots and behind checkpoints."""
    rng = random.Random(seed)
    alone = [run(random_layer(name, device, shape), [Row(n, n, 0, LENGTH)])[0] for n in range(NUM_SEQUENCES)]
    progress = Progress(random_layer(name, device, shape), list(range(NUM_SEQUENCES)))
    while any(place < LENGTH for place in progress.places):
        step(progress, rng)
    for number in range(NUM_SEQUENCES):
        found = torch.cat(progress.outputs[number])
        assert torch.equal(found, alone[number]), f"{(found != alone[number]).any(-1).nonzero()[:, 0].tolist()}"


def load(folder: Path, device_name: str = "cpu", dtype_name: str = "float32") -> PagedModel:
    source = resolve_model(str(folder))
    return load_model(source, dtype_name=dtype_name, backend_name="triton", device_name=device_name)


def check_logits(
    folder: Path, model: PagedModel, length: int, chunks: tuple[int, ...], merged: Any = None, slot: int | None = None
) -> None:
    """Asserts that logits of all positions are those of transformers, in float32. With the adapter in `slot` they are
    those of the `merged` model."""
    network: Any = merged or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert isinstance(model.forward, GpuForward)
    assert model.forward.states is not None
    model.forward.states.reserve(StateSizes(2, 0, MAX_DRAFTS))
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    sequence = sequence_of("r", TOKENS[:length], 1)
    sequence.state_slot, sequence.block_table = 1, list(range(1, 1 + -(-length // BLOCK_SIZE)))
    sequence.adapter_slot = slot
    logits, start = [], 0
    for chunk in chunks:
        batch = pack(StepPlan.of([PlanRow(sequence, start, chunk, samples=True)]), BLOCK_SIZE)
        logits.append(model.logits(replace(batch, logit_rows=torch.arange(chunk))).cpu())
        start += chunk
    with torch.inference_mode():
        expected = network(torch.tensor([TOKENS[:length]])).logits[0]
    assert (torch.cat(logits) - expected).abs().max() <= 1e-4


def limits_of(model: PagedModel, num_checkpoints: int = NUM_CHECKPOINTS, **changes: Any) -> SchedulerLimits:
    """Makes room for the state, and returns the limits."""
    assert model.forward.states is not None
    limits = replace(LIMITS, **{"context_length": 96, "max_num_tokens": 96} | changes)
    slots = num_slots(limits.max_num_sequences)
    model.forward.states.reserve(StateSizes(slots, num_checkpoints, limits.max_drafts))
    grid_tokens = max(BLOCK_SIZE, model.forward.states.grid_tokens)
    return replace(limits, states=StateLimits(slots, num_checkpoints, grid_tokens, frozenset({2})))


def runner_of(model: PagedModel, limits: SchedulerLimits, capture_graphs: Capture | None, **options: Any) -> GpuRunner:
    assert isinstance(model.forward, GpuForward)
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return GpuRunner(model.forward.decoder, model.kv, limits, BLOCK_SIZE, capture_graphs=capture_graphs, **options)


def check_runner(
    folder: Path, model: PagedModel, capture_graphs: Capture | None, num_tokens: int, max_graph_tokens: int = 16
) -> None:
    """Asserts that requests get the tokens of transformers, the later ones behind a checkpoint of the earlier."""
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    limits = limits_of(model)
    runner = runner_of(model, limits, capture_graphs, max_graph_tokens=max_graph_tokens)
    runner.prepare()
    scheduler = Scheduler(limits, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    for crowd in ((TOKENS[:70], TOKENS[100:119]), (TOKENS[:68], TOKENS[:64] + TOKENS[90:93], TOKENS[40:43])):
        sequences = [sequence_of(f"{len(prompt)} of {len(crowd)}", prompt, num_tokens) for prompt in crowd]
        for sequence in sequences:
            assert scheduler.offer(sequence) is None
        run_overlapped(scheduler, runner)
        for sequence, prompt in zip(sequences, crowd, strict=True):
            assert_greedy(network, list(prompt), sequence.token_ids[len(prompt) :])
    scheduler.check_when_idle()
    assert scheduler.prefix_cache.num_hit_tokens == 128, "both later prompts begin behind the checkpoint at 64"
    runner.close()


def check_drafts(
    model: PagedModel, capture_graphs: Capture | None, num_tokens: int, all_host_slots: ReadOnlyList[int] = (0,)
) -> None:
    """Asserts that requests get with drafts, of which some are wrong, and with so few blocks that they are preempted,
    the tokens that they get alone. With host slots their KV and states come back from host memory."""
    prompts = (TOKENS[:61], TOKENS[100:130], TOKENS[40:45])
    few = Overcommit(watermark=0.0, margin=0.0, max_steps_away=100_000)
    expected = []
    limits = limits_of(model, enable_prefix_cache=False)
    for number, prompt in enumerate(prompts):
        alone = sequence_of(str(number), prompt, num_tokens)
        run_requests(model, limits, [alone], Scheduler(limits, BlockPool(NUM_BLOCKS, BLOCK_SIZE)), capture_graphs)
        expected.append(alone.token_ids)

    def guess(ids: ReadOnlyList[int]) -> int:
        text = next((text for text in expected if text[:5] == list(ids[:5]) and len(ids) < len(text)), None)
        right = 0 if text is None else text[len(ids)]
        return (right + 1) % VOCABULARY_SIZE if len(ids) % 4 == 0 else right

    for num_host_slots in all_host_slots:
        limits = limits_of(model, max_drafts=MAX_DRAFTS, policy=SchedulerPolicy.MAX_UTILIZATION, overcommit=few)
        assert limits.states is not None
        host = replace(limits.states, num_host_slots=num_host_slots)
        limits = replace(limits, states=host, num_host_blocks=NUM_BLOCKS if num_host_slots else 0)
        drafting = eager(lambda: GuessingProposer(guess), checks_grammar=False)
        scheduler = Scheduler(limits, BlockPool(8, BLOCK_SIZE), drafting)
        drafted = [sequence_of(str(number), prompt, num_tokens) for number, prompt in enumerate(prompts)]
        for sequence in drafted:
            sequence.num_reserved_blocks = sequence.num_prompt_tokens // BLOCK_SIZE + 1
        run_requests(model, limits, drafted, scheduler, capture_graphs)
        assert [sequence.token_ids for sequence in drafted] == expected
        assert scheduler.num_preemptions > 0
        assert (scheduler.num_recomputed_tokens == 0) == (num_host_slots > 0)
        assert 0 < scheduler.draft_counts.num_accepted < scheduler.draft_counts.num_verified


def run_requests(
    model: PagedModel,
    limits: SchedulerLimits,
    sequences: list[Sequence],
    scheduler: Scheduler,
    capture_graphs: Capture | None,
) -> None:
    runner = runner_of(model, limits, capture_graphs, max_graph_tokens=16)
    runner.prepare()
    for sequence in sequences:
        assert scheduler.offer(sequence) is None
    run_overlapped(scheduler, runner, terms=CHEAP)
    runner.close()
    scheduler.check_when_idle()


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that compile kernels compile nothing in the interpreter."""
    monkeypatch.setattr("inflight.executor.gpu.runner.warm_up_lengths", lambda *_: [])


@pytest.mark.parametrize("name", SHAPES)
def test_bits_do_not_depend_on_the_steps(name: str) -> None:
    check_bits(name, CPU, 3)


@pytest.mark.parametrize("name", FAMILY)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = save_model(FAMILY[name], tmp_path / name, has_random_vectors=True)
    check_logits(folder, load(folder), 67, (3, 1, 59, 1, 3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(FAMILY["lfm2"], "hybrid", id="lfm2"),
        pytest.param(FAMILY["granite_hybrid"], "outputs", id="granite_hybrid"),
        pytest.param(WITH_EXPERTS["lfm2_moe"], "outputs", id="lfm2_moe"),
    ],
)
def test_logits_with_an_adapter_are_those_of_the_merged_model(
    tmp_path: Path, config: PretrainedConfig, name: str
) -> None:
    folder, adapter = save_model(config, tmp_path / "model", has_random_vectors=True), tmp_path / "adapter"
    merged, model = peft_adapter(folder, adapter, ADAPTERS[name]), load(folder)
    assert isinstance(model.forward, GpuForward)
    decoder = model.forward.decoder
    decoder.reserve_adapters(2, 16)
    decoder.load_adapter(1, parse(read_files(adapter), AdapterLimits(decoder.shape, 16)))
    check_logits(folder, model, 35, (3, 1, 30, 1), merged, 1)
    check_logits(folder, model, 5, (4, 1))


@pytest.mark.parametrize("config", [FAMILY["qwen3_5"], WITHOUT_EXPERTS], ids=["gates of attention", "no gates"])
def test_adapters_of_products_that_slots_have_not_are_refused(config: PretrainedConfig, tmp_path: Path) -> None:
    folder = save_model(config, tmp_path / "model")
    settings = ExecutorSettings(
        model=str(folder), device="cpu", dtype="float32", attention_backend="triton", adapter_folder=tmp_path
    )
    with pytest.raises(SettingError, match="adapters of models with gates of attention"):
        load_executor(settings)


def test_experts_with_projections_in_common_are_refused(tmp_path: Path) -> None:
    folder = save_model(NemotronHConfig(**NEMOTRON_H | {"moe_latent_size": 32}), tmp_path / "model")
    with pytest.raises(ModelError, match="its experts have projections in common"):
        load(folder)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_logits_of_models_with_experts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Loading compares them, in chunks and decodes."""
    folder = save_model(WITH_EXPERTS[name], tmp_path / name, has_random_vectors=True)
    assert isinstance(load(folder).forward, GpuForward)


# A layer has four products of torch's, two norms and the gate of the feed-forward layer; attention has one kernel that
# writes KV and two that read it, a convolution one kernel and a gated delta net three. One norm, two products of
# embedding and head, and the gates of Qwen3.5's attention.
@pytest.mark.parametrize(("name", "num_operations", "num_kernels"), [("lfm2", 14, 15), ("qwen3_5", 12, 13)])
def test_decodes_have_few_launches_whatever_their_number(
    name: str, num_operations: int, num_kernels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(save_model(FAMILY[name], tmp_path / name))
    assert isinstance(model.forward, GpuForward)
    assert model.forward.states is not None
    model.forward.states.reserve(StateSizes(3, 0, MAX_DRAFTS))
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    for num_sequences in (1, 3):
        rows = []
        for slot in range(num_sequences):
            sequence = sequence_of(str(slot), [5], 1)
            sequence.state_slot, sequence.block_table = slot, [1 + slot]
            rows.append(PlanRow(sequence, 0, 1, samples=True))
        batch = pack(StepPlan.of(rows), BLOCK_SIZE)
        states = model.forward.decoder.recurrent_states
        assert states is not None
        batch = replace(batch, state_rows=torch.from_numpy(states.follow(batch)))
        with Counted(monkeypatch) as counted:
            model.forward.decoder.forward(batch, model.kv)
        assert (counted.num_operations, counted.num_kernels) == (num_operations, num_kernels)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
def test_tokens_of_replayed_steps_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = save_model(FAMILY[name], tmp_path / name, has_random_vectors=True)
    captured = Captured({})
    # Checking graphs of steps with chunks takes most of the time, and does not depend on the kind of layer.
    check_runner(folder, load(folder), captured, 4, 16 if name == "lfm2" else 0)
    assert captured.replays[Bucket.of_decodes(2)] > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
def test_tokens_do_not_depend_on_drafts_and_preemption(tmp_path: Path, name: str) -> None:
    folder = save_model(FAMILY[name], tmp_path / name, has_random_vectors=True)
    check_drafts(load(folder), None, 8, (0, 3))
