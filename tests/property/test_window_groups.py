"""Layers with a sliding window that keep only their window: the tokens are those of one KV pool for all layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, MistralConfig, PretrainedConfig
from transformers import Gemma3TextConfig as Gemma3Config

from inflight.common.kv_size import WindowSize
from inflight.common.model_source import resolve_model
from inflight.executor.forward.native import NativeForward
from inflight.executor.loader import load_executor
from inflight.executor.main import identity
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.limits import KvWindow, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sampling, Sequence, StepPlan, StepResult, Stopping, TokenLogprobs
from inflight.executor.settings import ExecutorSettings
from inflight.executor.speculation.choice import choose_proposer
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.scheduler.drafting import CHEAP, EagerBudget
from tests.support.scheduler.scheduling import make_limits

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

BLOCK_SIZE, WINDOW, CONTEXT_LENGTH, MAX_DRAFTS = 16, 24, 256, 5
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "max_position_embeddings": CONTEXT_LENGTH}
GEMMA_2 = Gemma2Config(**sizes(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0))
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, PretrainedConfig] = {
    "gemma2": GEMMA_2,
    "gemma3": Gemma3Config(**sizes(**GEMMA, num_hidden_layers=3, layer_types=KINDS)),
    # All layers have a window.
    "mistral": MistralConfig(**sizes(sliding_window=WINDOW)),
}
FORMS: dict[str, dict[str, Any]] = {
    "native": {"backend_name": "cpu"},
    "int8-kv": {"backend_name": "cpu", "kv_cache_dtype": "int8"},
    "transformers": {"backend_name": "cpu", "forward_name": "transformers"},
    "reference": {"backend_name": "reference", "forward_name": "transformers"},
}
CASES = [("gemma2", "native"), ("mistral", "native"), ("gemma3", "int8-kv"), ("gemma3", "transformers")]
SLOW_CASES = [pytest.param(("gemma3", form), marks=pytest.mark.slow) for form in ("native", "reference")]
LIMITS = make_limits(max_num_sequences=4, num_standby_sequences=16, max_num_tokens=40, context_length=CONTEXT_LENGTH)
SIZE = WindowSize(WINDOW, CONTEXT_LENGTH, CONTEXT_LENGTH, MAX_DRAFTS, BLOCK_SIZE)
# As small as it may be, so that blocks are soon used again.
KV_WINDOW = KvWindow(WINDOW, SIZE.num_blocks(4), SIZE.num_sequences(4))
NUM_BLOCKS = 160
GENERATOR = torch.Generator().manual_seed(5)
SHARED = torch.randint(3, VOCABULARY_SIZE, (100,), generator=GENERATOR).tolist()


@dataclass(frozen=True, slots=True)
class Run:
    """The output and log probabilities of each request, and what happened meanwhile."""

    outputs: dict[str, tuple[list[int], list[TokenLogprobs | None]]]
    num_hit_tokens: int
    num_preemptions: int
    num_accepted: int


@pytest.fixture(scope="module", params=[*CASES, *SLOW_CASES], ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, form = request.param
    return name, form


@pytest.fixture(scope="module")
def models(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PagedModel, PagedModel]]:
    """The same model with one pool for all layers, and with two."""
    name, form = case
    folder = save_model(CONFIGS[name], tmp_path_factory.mktemp("models") / name, has_random_vectors=True)
    with torch_threads(1):
        options = {"dtype_name": "float32", "device_name": "cpu"} | FORMS[form]
        one, two = (load_model(resolve_model(str(folder)), **options) for _ in range(2))
        one.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        two.allocate_kv(NUM_BLOCKS, BLOCK_SIZE, KV_WINDOW.num_blocks)
        yield one, two


def requests(number: int, num_tokens: int = 60) -> list[Sequence]:
    """Prompts of several windows, some of which share their beginning; greedy and sampled."""
    made = []
    for i in range(number):
        prompt = [*SHARED[: (100, 0, 70)[i % 3]], *((j * (i + 3)) % 90 + 3 for j in range(5 + 31 * (i % 4)))]
        sampling = Sampling(0.0, 0, 1.0, 0) if i % 2 else Sampling(0.9, 20, 0.9, 1000 + i)
        stopping = Stopping(num_tokens, 0, frozenset())
        num_blocks = -(-(len(prompt) + num_tokens) // BLOCK_SIZE)
        request = Sequence(f"r{i}", 1, prompt, len(prompt), sampling, stopping, num_blocks, b"", num_top_logprobs=0)
        request.max_drafts = MAX_DRAFTS
        made.append(request)
    return made


def run(
    model: PagedModel, limits: SchedulerLimits, crowds: list[list[Sequence]], num_blocks: int, *, drafts: bool = False
) -> Run:
    """Runs crowds of requests one after the other, each with a step in flight beside the one that is planned."""
    drafting = Drafting(choose_proposer("suffix"), EagerBudget()) if drafts else None
    scheduler = Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE), drafting)
    runner = ModelRunner(model, limits, BLOCK_SIZE)
    launched: deque[tuple[StepPlan, Any]] = deque()
    outputs: dict[str, tuple[list[int], list[TokenLogprobs | None]]] = {}
    for number, crowd in enumerate(crowds):
        for request in crowd:
            request.request_id = f"{number}/{request.request_id}"
            assert scheduler.offer(request) is None
        while launched or not scheduler.is_idle:
            plan = scheduler.schedule(terms=CHEAP)
            scheduler.check()
            if plan.rows:
                launched.append((plan, runner.launch(plan)))
            while len(launched) > int(bool(plan.rows)):
                done, pending = launched.popleft()
                for event in scheduler.update(StepResult(done, pending.result(), pending.logprobs())).finished:
                    sequence = event.sequence
                    assert not event.error, event.error
                    ids = sequence.token_ids[sequence.num_prompt_tokens :]
                    logprobs = [sequence.logprobs.get(i) for i in range(len(ids))]
                    outputs[sequence.request_id] = ids, logprobs
    runner.close()
    scheduler.check_when_idle()
    return Run(
        outputs, scheduler.prefix_cache.num_hit_tokens, scheduler.num_preemptions, scheduler.draft_counts.num_accepted
    )


def with_window(limits: SchedulerLimits) -> SchedulerLimits:
    return replace(limits, kv_window=KV_WINDOW)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_tokens_and_logprobs_are_those_of_one_pool(models: tuple[PagedModel, PagedModel], is_chunked: bool) -> None:
    one, two = models
    limits = replace(LIMITS, enable_chunked_context=is_chunked)

    expected = run(one, limits, [requests(7, 40), requests(4, 20)], NUM_BLOCKS)
    found = run(two, with_window(limits), [requests(7, 40), requests(4, 20)], NUM_BLOCKS)

    assert tokens_of(found) == tokens_of(expected)
    assert_same_logprobs(found, expected, is_exact=isinstance(one.forward, NativeForward))
    # Prefixes are found in both: that of other requests and, in the second crowd, that of the same request before.
    assert found.num_hit_tokens > 64
    assert expected.num_hit_tokens >= found.num_hit_tokens


def test_preemption_changes_no_token(models: tuple[PagedModel, PagedModel]) -> None:
    one, two = models
    scarce = replace(LIMITS, policy=SchedulerPolicy.MAX_UTILIZATION)
    overcommitted = [replace_reservation(request) for request in requests(5, 110)]

    expected = run(one, LIMITS, [requests(5, 110)], NUM_BLOCKS)
    found = run(two, with_window(scarce), [overcommitted], 34)

    assert found.num_preemptions > 0
    assert tokens_of(found) == tokens_of(expected)


def test_drafts_change_no_token(models: tuple[PagedModel, PagedModel]) -> None:
    one, two = models
    expected = run(one, LIMITS, [requests(4, 80)], NUM_BLOCKS)
    found = run(two, with_window(LIMITS), [requests(4, 80)], NUM_BLOCKS, drafts=True)
    assert found.num_accepted > 0
    assert tokens_of(found) == tokens_of(expected)


def tokens_of(some: Run) -> dict[str, list[int]]:
    return {name: ids for name, (ids, _) in some.outputs.items()}


def assert_same_logprobs(found: Run, expected: Run, *, is_exact: bool) -> None:
    """The forward pass of transformers rounds by the other rows of a batch."""
    for name, (_, logprobs) in expected.outputs.items():
        for ours, theirs in zip(found.outputs[name][1], logprobs, strict=True):
            assert ours is not None
            assert theirs is not None
            assert ours.logprob == (theirs.logprob if is_exact else pytest.approx(theirs.logprob, abs=1e-4))


def replace_reservation(request: Sequence) -> Sequence:
    """Reserves less than the request needs."""
    request.num_reserved_blocks = (len(request.token_ids) + 1) // BLOCK_SIZE + 1
    return request


SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_tokens": 32,
    "max_num_sequences": 2,
    "kv_cache_free_host_mem_fraction": 1e-4,
}


def test_an_executor_holds_more_tokens_in_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["gemma3"]
    folder = save_model(config, tmp_path / "gemma3", has_random_vectors=True)
    monkeypatch.setattr("inflight.executor.loader.num_available_memory_bytes", lambda: 10_000_000_000)
    one, two, host = (
        load_executor(ExecutorSettings(model=str(folder), **SETTINGS, **changes))
        for changes in ({"kv_window_groups": "off"}, {}, {"kv_cache_host_memory_bytes": 1_000_000})
    )
    assert one.limits.kv_window is None
    assert two.limits.kv_window is not None
    # Host memory for KV needs one pool.
    assert (host.num_blocks, host.limits.kv_window) == (one.num_blocks, None)

    sizes_of = [sum(kv.num_bytes for kv in loaded.model.kv) for loaded in (one, two)]
    assert sizes_of[1] <= sizes_of[0]
    # Two of three layers have a window.
    assert two.num_blocks > 2 * one.num_blocks
    assert identity(ExecutorSettings(model=str(folder)), two).description.total_blocks == two.num_blocks

    crowd = [requests(3, 40), requests(2, 20)]
    assert (
        run(two.model, two.limits, crowd, two.num_blocks).outputs
        == run(one.model, one.limits, [requests(3, 40), requests(2, 20)], one.num_blocks).outputs
    )
