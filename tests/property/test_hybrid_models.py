"""Models with recurrent layers: logits are those of transformers, and tokens do not depend on how they are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    Lfm2Config,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
)

from inflight.common.kv_size import num_slots
from inflight.common.model_source import resolve_model
from inflight.executor.adapters.weights import AdapterLimits
from inflight.executor.forward.forward import StateMemory
from inflight.executor.forward.hybrid import HybridForward
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.limits import Overcommit, SchedulerLimits, SchedulerPolicy, StateLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import (
    PlanRow,
    Sampling,
    Sequence,
    StepPlan,
    StepResult,
    Stopping,
    TokenLogprobs,
)
from inflight.executor.speculation.choice import choose_proposer
from inflight.executor.step.batch import pack
from tests.property.test_shards import random_adapter
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.examples import examples
from tests.support.scheduler.drafting import CHEAP, EagerBudget
from tests.support.scheduler.scheduling import make_limits

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

BLOCK_SIZE, CONTEXT_LENGTH, MAX_DRAFTS, NUM_BLOCKS, NUM_ADAPTERS = 16, 256, 5, 160, 2
CONFIGS: dict[str, PretrainedConfig] = {
    # Odd sizes: 5 heads of 12 on one KV head, four weights of a convolution, biases.
    "lfm2": Lfm2Config(
        **sizes(
            hidden_size=60,
            intermediate_size=72,
            num_hidden_layers=5,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=12,
        ),
        layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
        conv_L_cache=4,
        conv_bias=True,
        block_auto_adjust_ff_dim=False,
    ),
}
CONFIGS["qwen3_5"] = Qwen3_5TextConfig(
    **sizes(num_hidden_layers=4, hidden_size=52, head_dim=24, initializer_range=0.1),
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=12,
    linear_value_head_dim=20,
    linear_conv_kernel_dim=4,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
)
# Heads of odd sizes, biases, multipliers; layers that are one of a mixer, attention, a feed-forward layer and experts.
CONFIGS["granite_hybrid"] = GraniteMoeHybridConfig(
    **sizes(num_hidden_layers=3, hidden_size=60, num_attention_heads=5, num_key_value_heads=1)
    | {"initializer_range": 0.1, "attention_multiplier": 0.3},
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_local_experts=0,
    shared_intermediate_size=72,
    mamba_n_heads=10,
    mamba_n_groups=2,
    mamba_d_state=20,
    mamba_proj_bias=True,
    embedding_multiplier=3.0,
    residual_multiplier=0.6,
    logits_scaling=2.0,
)
CONFIGS["nemotron_h"] = NemotronHConfig(
    **sizes(hidden_size=60, intermediate_size=72, num_attention_heads=5, num_key_value_heads=1, head_dim=12)
    | {"initializer_range": 0.1},
    layers_block_type=["mlp", "linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
    mamba_num_heads=6,
    mamba_head_dim=12,
    n_groups=3,
    ssm_state_size=20,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
    moe_shared_expert_intermediate_size=56,
)
# Heads of a size that the C++ code has; the others are computed by the code of transformers.
NATIVE = ("granite_hybrid-native", "lfm2-native", "nemotron_h-native", "qwen3_5-native")
CONFIGS["lfm2-native"] = Lfm2Config(
    **CONFIGS["lfm2"].to_dict() | {"head_dim": 16, "hidden_size": 52, "layer_types": list(CONFIGS["lfm2"].layer_types)}
)
CONFIGS["qwen3_5-native"] = Qwen3_5TextConfig(
    **CONFIGS["qwen3_5"].to_dict()
    | {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 48, "hidden_size": 60}
)
# Two tasks share the keys; a rotary embedding.
CONFIGS["granite_hybrid-native"] = GraniteMoeHybridConfig(
    **CONFIGS["granite_hybrid"].to_dict()
    | {"hidden_size": 80, "num_attention_heads": 5, "mamba_n_groups": 1, "mamba_d_head": 16, "mamba_d_state": 32}
    | {"position_embedding_type": "rope"}
)
# A mixer with nothing behind it, in the middle and at the end.
CONFIGS["nemotron_h-native"] = NemotronHConfig(
    **CONFIGS["nemotron_h"].to_dict()
    | {"head_dim": 16, "hidden_size": 64, "mamba_head_dim": 16, "ssm_state_size": 32, "routed_scaling_factor": 1.5}
    | {
        "layers_block_type": [
            "linear_attention",
            "moe",
            "linear_attention",
            "full_attention",
            "mlp",
            "linear_attention",
        ]
    }
)
GENERATOR = torch.Generator().manual_seed(5)
GREEDY = Sampling(0.0, 0, 1.0, 0)
TOKENS = torch.randint(3, VOCABULARY_SIZE, (400,), generator=GENERATOR).tolist()
LIMITS = make_limits(
    max_num_sequences=4,
    num_standby_sequences=16,
    max_num_tokens=512,
    context_length=CONTEXT_LENGTH,
    overcommit=Overcommit(max_steps_away=100_000),
)


# The ids of a request and what was reported with each.
Output = tuple[list[int], list[TokenLogprobs | None]]


class Request(NamedTuple):
    """A prompt that begins with `num_shared` tokens that others begin with as well, and has some of its own. `adapter`
    is a slot, which models in C++ have."""

    num_shared: int
    num_own: int
    is_greedy: bool
    adapter: int | None = None

    def sequence(self, name: str, num_tokens: int) -> Sequence:
        prompt = TOKENS[: self.num_shared] + TOKENS[200 : 200 + self.num_own]
        sampling = GREEDY if self.is_greedy else Sampling(0.9, 20, 0.9, self.num_own)
        made = sequence_of(name, prompt, num_tokens, sampling)
        if self.adapter is not None:
            made.adapter_slot, made.adapter_hash = self.adapter, bytes([self.adapter]) * 32
        return made


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the same by transformers."""

    model: PagedModel
    reference: Any
    outputs: dict[Request, Output]

    def alone(self, request: Request, num_tokens: int) -> Output:
        """Returns the first tokens of a request that runs alone, its prompt in one step."""
        if request not in self.outputs:
            sequence = request.sequence("alone", MOST_TOKENS)
            limits = self.limits(0, enable_prefix_cache=False)
            self.outputs[request] = run(self, limits, [[sequence]], NUM_BLOCKS).outputs["alone"]
        ids, logprobs = self.outputs[request]
        return ids[:num_tokens], logprobs[:num_tokens]

    @property
    def states(self) -> StateMemory:
        assert self.model.forward.states is not None
        return self.model.forward.states

    def limits(self, num_checkpoints: int, num_host_slots: int = 0, **changes: Any) -> SchedulerLimits:
        """Makes room for the state, and returns the limits."""
        limits = replace(LIMITS, **changes, num_host_blocks=NUM_BLOCKS if num_host_slots else 0)
        slots = num_slots(limits.max_num_sequences)
        self.states.reserve(StateSizes(slots, num_checkpoints, MAX_DRAFTS))
        grid_tokens = max(BLOCK_SIZE, self.states.grid_tokens)
        states = StateLimits(slots, num_checkpoints, grid_tokens, frozenset({2}), num_host_slots)
        return replace(limits, states=states)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name = request.param
    folder = save_model(CONFIGS[name], tmp_path_factory.mktemp("models") / name, has_random_vectors=True)
    with torch_threads(1):
        model = load_model(resolve_model(str(folder)), dtype_name="float32", device_name="cpu")
        assert isinstance(model.forward, NativeForward if name in NATIVE else HybridForward)
        model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        if isinstance(model.forward, NativeForward):
            decoder = model.forward.decoder
            decoder.reserve_adapters(NUM_ADAPTERS, 8)
            for slot in range(NUM_ADAPTERS):
                decoder.load_adapter(slot, random_adapter(AdapterLimits(decoder.shape, 8), 3 + slot, slot))
        yield Case(model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), {})


def sequence_of(name: str, prompt: list[int], num_tokens: int, sampling: Sampling = GREEDY) -> Sequence:
    """A request that may draft, with all blocks that it needs reserved."""
    num_blocks = -(-(len(prompt) + num_tokens) // BLOCK_SIZE)
    stopping = Stopping(num_tokens, 0, frozenset())
    made = Sequence(name, 1, list(prompt), len(prompt), sampling, stopping, num_blocks, b"", num_top_logprobs=0)
    made.max_drafts = MAX_DRAFTS
    return made


@pytest.mark.parametrize("chunks", [(200,), (1,) * 70, (63, 1, 1, 64, 71), (5, 130, 1, 1, 63)], ids=str)
def test_logits_are_those_of_transformers(case: Case, chunks: tuple[int, ...]) -> None:
    case.limits(0)
    prompts = TOKENS[: sum(chunks)], TOKENS[200 : 200 + sum(chunks)]
    sequences = [sequence_of(f"r{slot}", prompt, 1) for slot, prompt in enumerate(prompts)]
    for slot, sequence in enumerate(sequences):
        sequence.state_slot, sequence.block_table = slot, list(range(1 + slot * 20, 21 + slot * 20))
    with torch.inference_mode():
        expected = [case.reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    start = 0
    for chunk in chunks:
        batch = pack(StepPlan.of(PlanRow(one, start, chunk, samples=True) for one in sequences), BLOCK_SIZE)
        # Of all positions, not only those that sample.
        logits = case.model.logits(replace(batch, logit_rows=torch.arange(2 * chunk)))
        for of_one, theirs in zip(logits.split(chunk), expected, strict=True):
            assert (of_one - theirs[start : start + chunk]).abs().max() <= 1e-4
        start += chunk


@dataclass(frozen=True, slots=True)
class Run:
    """The output and log probabilities of each request, and what happened meanwhile."""

    outputs: dict[str, Output]
    num_preemptions: int
    num_recomputed_tokens: int
    num_swapped_in: int


def run(
    case: Case,
    limits: SchedulerLimits,
    crowds: list[list[Sequence]],
    num_blocks: int,
    *,
    drafts: bool = False,
    ahead: bool = False,
) -> Run:
    """Runs crowds of requests one after the other, with a step in flight beside the one that is planned if `ahead`."""
    drafting = Drafting(choose_proposer("suffix"), EagerBudget()) if drafts else None
    scheduler = Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE), drafting)
    runner = ModelRunner(case.model, limits, BLOCK_SIZE)
    launched: deque[tuple[StepPlan, Any]] = deque()
    outputs: dict[str, Output] = {}
    num_swapped_in = 0
    for crowd in crowds:
        waiting = crowd
        while waiting or launched or not scheduler.is_idle:
            waiting = [request for request in waiting if scheduler.offer(request) is not None]
            for request in waiting:
                request.attempt += 1
            plan = scheduler.schedule(terms=CHEAP)
            scheduler.check()
            if plan.rows:
                launched.append((plan, runner.launch(plan)))
                num_swapped_in += len(plan.state_swaps_in)
            while len(launched) > int(bool(plan.rows) and ahead):
                done, pending = launched.popleft()
                for event in scheduler.update(StepResult(done, pending.result(), pending.logprobs())).finished:
                    sequence = event.sequence
                    assert not event.error, event.error
                    ids = sequence.token_ids[sequence.num_prompt_tokens :]
                    outputs[sequence.request_id] = ids, [sequence.logprobs.get(i) for i in range(len(ids))]
    runner.close()
    scheduler.check_when_idle()
    return Run(outputs, scheduler.num_preemptions, scheduler.num_recomputed_tokens, num_swapped_in)


REQUESTS = st.builds(
    Request,
    st.sampled_from((0, 16, 17, 48, 63, 64, 65, 128, 150)),
    st.sampled_from((1, 17, 30)),
    st.booleans(),
    st.sampled_from((None, *range(NUM_ADAPTERS))),
)
MOST_TOKENS = 24
# They come one after the other. Each request asks for some tokens.
CROWDS = st.lists(
    st.lists(st.tuples(REQUESTS, st.integers(1, MOST_TOKENS)), min_size=1, max_size=3), min_size=1, max_size=2
)


@settings(max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    crowds=CROWDS,
    max_num_tokens=st.sampled_from((4, 7, 20, 63, 64, 65, 300)),
    max_num_sequences=st.integers(1, 4),
    num_checkpoints=st.sampled_from((0, 1, 3, 60)),
    drafts=st.booleans(),
    ahead=st.booleans(),
    num_blocks=st.sampled_from((17, 24, NUM_BLOCKS)),
    num_host_slots=st.sampled_from((0, 1, 4)),
)
def test_a_request_gets_the_same_tokens_however_it_is_computed(
    case: Case,
    crowds: list[list[tuple[Request, int]]],
    max_num_tokens: int,
    max_num_sequences: int,
    num_checkpoints: int,
    drafts: bool,
    ahead: bool,
    num_blocks: int,
    num_host_slots: int,
) -> None:
    """Alone; in a batch, in any chunks, behind any prefix, with any number of seats, after preemption, with drafts,
    among rows of other adapters."""
    if not isinstance(case.model.forward, NativeForward):
        crowds = [[(request._replace(adapter=None), num_tokens) for request, num_tokens in crowd] for crowd in crowds]
    expected = {
        f"{i}/{j}": case.alone(request, num_tokens)
        for i, crowd in enumerate(crowds)
        for j, (request, num_tokens) in enumerate(crowd)
    }
    sequences = [
        [request.sequence(f"{i}/{j}", num_tokens) for j, (request, num_tokens) in enumerate(crowd)]
        for i, crowd in enumerate(crowds)
    ]
    if num_blocks < NUM_BLOCKS:
        for sequence in chain.from_iterable(sequences):
            sequence.num_reserved_blocks = len(sequence.token_ids) // BLOCK_SIZE + 1
    policy = SchedulerPolicy.GUARANTEED_NO_EVICT if num_blocks == NUM_BLOCKS else SchedulerPolicy.MAX_UTILIZATION
    limits = case.limits(
        num_checkpoints,
        num_host_slots,
        max_num_tokens=max_num_tokens,
        max_num_sequences=max_num_sequences,
        policy=policy,
    )

    found = run(case, limits, sequences, num_blocks, drafts=drafts, ahead=ahead)

    assert {name: ids for name, (ids, _) in found.outputs.items()} == {name: ids for name, (ids, _) in expected.items()}
    for name, (_, logprobs) in expected.items():
        for ours, theirs in zip(found.outputs[name][1], logprobs, strict=True):
            assert ours is not None
            assert theirs is not None
            # The products of transformers' modules round by the rows of a batch.
            tolerance = 0.0 if isinstance(case.model.forward, NativeForward) else 1e-4
            assert ours.logprob == pytest.approx(theirs.logprob, rel=0.0, abs=tolerance)


def test_a_state_of_one_adapter_is_never_used_with_another(case: Case) -> None:
    if not isinstance(case.model.forward, NativeForward):
        pytest.skip("only models in C++ have adapters")
    # Given a prompt that the base and each adapter have computed, whose checkpoints are all kept
    adapters = (None, *range(NUM_ADAPTERS))
    requests = [Request(128, 17, is_greedy=True, adapter=adapter) for adapter in adapters]
    expected = [case.alone(request, 8) for request in requests]
    assert len({str(output) for output in expected}) == len(requests)

    # When each comes twice, one after the other
    names = [(f"{turn}/{number}", request) for turn in range(2) for number, request in enumerate(requests)]
    crowds = [[request.sequence(name, 8)] for name, request in names]
    limits = case.limits(60)
    found = run(case, limits, crowds, NUM_BLOCKS)

    # Then the second time of each finds its own prefix, and no other
    for name, output in found.outputs.items():
        assert output == expected[int(name[-1])]
    assert limits.states is not None
    grid, length = limits.states.grid_tokens, len(crowds[0][0].token_ids) - 8
    num_cached = [sequence.num_cached_tokens for (sequence,) in crowds]
    assert num_cached == [0] * len(requests) + [length // grid * grid] * len(requests)


@pytest.mark.parametrize("num_checkpoints", [0, 60])
def test_a_preempted_request_goes_on_with_its_state_from_host_memory(case: Case, num_checkpoints: int) -> None:
    # Given requests that share no block, and as many blocks as two of them need
    requests = [Request(*lengths, is_greedy=True) for lengths in ((1, 60), (2, 88), (3, 27), (4, 71))]
    few = Overcommit(watermark=0.0, margin=0.0, max_steps_away=100_000)
    found = {}
    for num_host_slots in (0, 4):
        sequences = [request.sequence(str(number), MOST_TOKENS) for number, request in enumerate(requests)]
        for sequence in sequences:
            sequence.num_reserved_blocks = sequence.num_prompt_tokens // BLOCK_SIZE + 1
        limits = case.limits(num_checkpoints, num_host_slots, policy=SchedulerPolicy.MAX_UTILIZATION, overcommit=few)
        found[num_host_slots] = run(case, limits, [sequences], 18, ahead=True)

    computed, copied = found[0], found[4]
    assert copied.num_swapped_in == copied.num_preemptions > 0
    assert computed.num_recomputed_tokens > 0 == copied.num_recomputed_tokens
    for name, (ids, logprobs) in copied.outputs.items():
        expected_ids, expected = case.alone(requests[int(name)], MOST_TOKENS)
        assert ids == expected_ids
        if isinstance(case.model.forward, NativeForward):
            assert logprobs == expected
