"""A sequence without a usable logit ends with an error on every backend, and the others of its steps go on."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.executor.engine.runner import PendingStep, StepRunner
from inflight.executor.formats import loading
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.loader import load_model
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import INVALID_LOGITS, Scheduler
from inflight.executor.scheduler.sequence import (
    FinishEvent,
    FinishReason,
    Sampling,
    Sequence,
    StepPlan,
    StepResult,
    Stopping,
)
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.scheduler.scheduling import make_limits

BLOCK_SIZE = 16
NUM_BLOCKS = 8
LIMITS = make_limits(max_num_sequences=4, num_standby_sequences=4, max_num_tokens=24, context_length=64)
BACKENDS = {"native": "cpu", "torch": "reference", "triton": "triton"}
GREEDY = Sampling(0.0, 0, 1.0, 0)


def broken_id() -> int:
    """A token that the self-check of a model at its start does not use."""
    used = torch.randint(VOCABULARY_SIZE, (31,), generator=torch.Generator().manual_seed(0)).tolist()
    return next(token_id for token_id in range(VOCABULARY_SIZE) if token_id not in used)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one token's embedding is NaN."""
    path = save_model(LlamaConfig(**sizes(num_hidden_layers=1)), tmp_path_factory.mktemp("model") / "tiny")
    network: Any = AutoModelForCausalLM.from_pretrained(str(path))
    with torch.no_grad():
        network.get_input_embeddings().weight[broken_id()] = float("nan")
    network.save_pretrained(str(path))
    return path


def runner_of(folder: Path, backend: str) -> StepRunner:
    source = resolve_model(str(folder))
    with pytest.MonkeyPatch.context() as patch:
        # Loading refuses weights that are not numbers. Here one stands for an overflow that only some prompts cause.
        patch.setattr(loading, "_check_numbers", lambda network: None)
        model = load_model(source, dtype_name="float32", backend_name=BACKENDS[backend], device_name="cpu")
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    if backend != "triton":
        return ModelRunner(model, LIMITS, BLOCK_SIZE)
    assert isinstance(model.forward, GpuForward)
    return GpuRunner(model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE)


def make_sequence(name: str, sampling: Sampling, *, is_broken: bool, num_top_logprobs: int | None) -> Sequence:
    """A prompt of more than a step, in the middle of which the broken token may stand."""
    usable = [token_id for token_id in range(3, VOCABULARY_SIZE) if token_id != broken_id()]
    prompt = [usable[(7 * i + 11 * len(name)) % len(usable)] for i in range(18)]
    if is_broken:
        prompt[5] = broken_id()
    stopping = Stopping(4, 0, frozenset())
    return Sequence(name, 1, prompt, 18, sampling, stopping, 2, b"", num_top_logprobs=num_top_logprobs)


def run(runner: StepRunner, sequences: list[Sequence]) -> tuple[dict[str, FinishEvent], Scheduler]:
    """The ends of all of them, each step launched before the one before is read."""
    scheduler = Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    ends: dict[str, FinishEvent] = {}
    launched: deque[tuple[StepPlan, PendingStep]] = deque()
    for sequence in sequences:
        assert scheduler.offer(sequence) is None
        scheduler.check()
    while launched or not scheduler.is_idle:
        plan = scheduler.schedule()
        if plan.sequences:
            launched.append((plan, runner.launch(plan)))
        if len(launched) > (1 if plan.sequences else 0):
            done, pending = launched.popleft()
            outcome = scheduler.update(StepResult(done, pending.result(), pending.logprobs()))
            ends |= {event.sequence.request_id: event for event in outcome.finished}
    return ends, scheduler


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("samplings", [(GREEDY, GREEDY), (Sampling(0.8, 5, 0.9, 7), Sampling(1.0, 0, 1.0, 3))])
@pytest.mark.parametrize("num_top_logprobs", [None, 2])
def test_only_the_sequence_without_numbers_ends_with_an_error(
    folder: Path, backend: str, samplings: tuple[Sampling, Sampling], num_top_logprobs: int | None
) -> None:
    def pair(first: str, second: str, *, is_broken: bool) -> list[Sequence]:
        names = zip((first, second * 2), samplings, strict=True)
        return [make_sequence(*one, is_broken=is_broken, num_top_logprobs=num_top_logprobs) for one in names]

    # Given four sequences on their seats, two of them broken
    runner = runner_of(folder, backend)
    healthy, broken = pair("a", "b", is_broken=False), pair("x", "y", is_broken=True)

    ends, scheduler = run(runner, [healthy[0], broken[0], healthy[1], broken[1]])

    for sequence in broken:
        event = ends[sequence.request_id]
        assert (event.reason, event.error) == (FinishReason.ERROR, INVALID_LOGITS)
        assert (sequence.num_output_tokens, sequence.logprobs) == (0, {})
    assert scheduler.num_invalid_logits == 2
    # Then the others get what they get without those, and so do two that take over the blocks
    later = pair("c", "d", is_broken=False)
    ends |= run(runner, later)[0]
    for one, other in zip(healthy, later, strict=True):
        assert ends[one.request_id].reason is ends[other.request_id].reason is FinishReason.LENGTH
        assert one.token_ids == other.token_ids
        assert sorted(one.logprobs) == ([] if num_top_logprobs is None else [0, 1, 2, 3])
    runner.close()
