"""Speeds that reports have: of steps by vLLM's own count, without those that compile something."""

from __future__ import annotations

import pytest

from inflight.executor.engine.output import ReportedSequence
from inflight.executor.vllm.steps import Standing, StepCounts, StepWork

MAX_NUM_TOKENS = 100


class Steps:
    """Steps of an engine that always has work, and their clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.counts = StepCounts(lambda: self.now_s, MAX_NUM_TOKENS)
        self.standing = Standing(10, 1, 0, 0, 1, 4, 0, 1, 0, 0, 0, (ReportedSequence("a", 1, 1),), draining=False)
        self.counts.wake()

    def make(self, seconds: float, count: int = 1, *, num_steps: int = 1, num_prompt_tokens: int = 0) -> None:
        for _ in range(count):
            self.now_s += seconds
            self.counts.add(StepWork(num_steps=num_steps, num_prompt_tokens=num_prompt_tokens), self.standing)

    @property
    def step_ms(self) -> float:
        return self.counts.status(self.standing).step_ms

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.counts.status(self.standing).prefill_tokens_per_s


def test_steps_that_were_taken_together_have_their_mean_time() -> None:
    steps = Steps()
    steps.make(0.15, num_steps=3, num_prompt_tokens=60)
    assert steps.step_ms == pytest.approx(50)
    assert steps.prefill_tokens_per_s == pytest.approx(60 / 0.15)
    assert steps.counts.num_steps == 1


def test_prompt_of_several_chunks_counts_as_what_its_last_step_could_compute() -> None:
    steps = Steps()
    steps.make(0.1, 3)
    steps.make(0.1, num_prompt_tokens=4 * MAX_NUM_TOKENS)
    assert steps.prefill_tokens_per_s == pytest.approx(MAX_NUM_TOKENS / 0.1)


def test_step_that_compiles_is_forgotten_with_the_next_one() -> None:
    steps = Steps()
    steps.make(35.0, num_prompt_tokens=20)
    steps.make(0.05, num_prompt_tokens=20)
    assert steps.step_ms == pytest.approx(50)
    assert steps.prefill_tokens_per_s == pytest.approx(400)


def test_step_that_compiles_later_hardly_counts_and_lasting_slowness_does() -> None:
    steps = Steps()
    steps.make(0.05, 30)
    steps.make(35.0)
    assert 50 < steps.step_ms < 70
    steps.make(0.05, 60)
    assert steps.step_ms == pytest.approx(50, rel=0.05)
    steps.make(2.0, 60)
    assert steps.step_ms == pytest.approx(2000, rel=0.1)


def test_reports_right_after_each_other_are_no_fast_steps() -> None:
    steps = Steps()
    steps.make(0.05, 30)
    steps.make(0.0001)
    assert 47 < steps.step_ms < 50
