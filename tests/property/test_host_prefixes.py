"""Conversations whose prefixes go to host memory and come back: every output is that of a run alone, blocks are
conserved in both memories, and what is in host memory is what its names say."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Batching, Overcommit, PreemptionCost, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import (
    FinishEvent,
    FinishReason,
    Sampling,
    Sequence,
    StepPlan,
    StepResult,
    Stopping,
)
from inflight.executor.scheduler.step_constraint import CopyCost, PrefillAllowance, PrefillCost
from inflight.executor.scheduler.step_record import HostPrefixCounts
from tests.support.device.fake_device import VOCABULARY_SIZE, FakeDevice, block_contents, solo_output
from tests.support.scheduler.scheduling import make_limits

BLOCK_SIZE = 2
NUM_BLOCKS = 24
LIMITS = make_limits(max_num_sequences=3, num_standby_sequences=2, max_num_tokens=16, context_length=40)
OVERCOMMIT = Overcommit(watermark=0.0, margin=0.1, cost=PreemptionCost(swap_token=0.1))
POLICIES = {
    "guaranteed": LIMITS,
    "static": replace(LIMITS, batching=Batching.STATIC),
    "whole prompts": replace(LIMITS, enable_chunked_context=False),
    "overcommitted": replace(LIMITS, policy=SchedulerPolicy.MAX_UTILIZATION, overcommit=OVERCOMMIT),
}


@dataclass(slots=True)
class Conversations:
    """Conversations of several turns on a pool that holds few of them."""

    limits: SchedulerLimits
    seed: int
    num_ahead: int
    scheduler: Scheduler = field(init=False)
    device: FakeDevice = field(init=False)
    numbers: random.Random = field(init=False)
    plans: deque[StepPlan] = field(default_factory=deque)
    turns: list[list[int]] = field(default_factory=list)
    running: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    contents: dict[bytes, list[int]] = field(default_factory=dict)
    num_offers: int = 0

    def __post_init__(self) -> None:
        self.numbers = random.Random(self.seed)
        pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler, self.device = Scheduler(self.limits, pool), FakeDevice(pool)
        self.turns = [[number % VOCABULARY_SIZE] * 3 + [number] for number in range(6)]

    def run(self, num_turns: int) -> HostPrefixCounts:
        """Runs so many turns, some of which are cancelled and some of which fail with their step."""
        while num_turns > 0 or not self.scheduler.is_idle:
            if num_turns > 0 and self.numbers.random() < 0.5:
                num_turns -= self._offer()
            if self.running and self.numbers.random() < 0.03:
                name = self.numbers.choice(sorted(self.running))
                event = self.scheduler.cancel(name, 1, FinishReason.CANCELLED)
                self._receive(() if event is None else (event,))
            self._step()
        self.scheduler.check_when_idle()
        return self.scheduler.kv_counts().host_prefixes

    def _offer(self) -> bool:
        number = self.numbers.randrange(len(self.turns))
        if any(number == one for one, _ in self.running.values()):
            return False
        said = self.turns[number]
        if len(said) > 26:
            del said[8:]
        prompt = [*said, *(self.numbers.randrange(VOCABULARY_SIZE) for _ in range(self.numbers.randint(1, 5)))]
        self.num_offers += 1
        max_tokens = self.numbers.randint(1, 6)
        num_blocks = -(-(len(prompt) + max_tokens) // BLOCK_SIZE)
        sequence = Sequence(
            request_id=f"r{self.num_offers}",
            attempt=1,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=Sampling(0.0, 0, 1.0, 0),
            stopping=Stopping(max_tokens, 0, frozenset()),
            num_reserved_blocks=len(prompt) // BLOCK_SIZE + 1 if self.limits.is_overcommitted else num_blocks,
            cache_salt=b"even" if number % 2 else b"odd",
        )
        if self.scheduler.offer(sequence) is not None:
            return False
        output, _ = solo_output(sequence, self.limits.context_length)
        self.running[sequence.request_id] = number, output
        self.contents.update(block_contents(sequence, output, BLOCK_SIZE))
        return True

    def _step(self) -> None:
        allowance, copy_cost = None, None
        if self.numbers.random() < 0.5:
            seconds = self.numbers.choice((0.0, 5.0, 12.0))
            allowance = PrefillAllowance(BLOCK_SIZE, seconds, PrefillCost(1.0), copy_s=1.0)
        if self.numbers.random() < 0.5:
            copy_cost = CopyCost(self.numbers.choice((0.5, 0.5, 9.0)), PrefillCost(1.0))
        plan = self.scheduler.schedule(allowance, None, copy_cost)
        self.scheduler.check()
        self._receive(self.scheduler.take_finished())
        self.plans += [plan] if plan.rows else []
        while len(self.plans) > (self.num_ahead if plan.rows else 0):
            self._retire(self.plans.popleft())

    def _retire(self, plan: StepPlan) -> None:
        if self.numbers.random() < 0.02:
            self.device.corrupt(plan)
            outcome = self.scheduler.fail(plan, "lost")
        else:
            outcome = self.scheduler.update(StepResult(plan, self.device.run(plan)))
        self._receive(outcome.finished)
        self.scheduler.check()
        self._check_contents()

    def _check_contents(self) -> None:
        coming = {host_block for plan in self.plans for _, host_block in plan.swaps_out}
        for host_block, block_hash in self.scheduler.host.content_names().items():
            assert host_block in coming or self.device.host_content(host_block) == self.contents[block_hash]

    def _receive(self, events: Iterable[FinishEvent]) -> None:
        for event in events:
            number, expected = self.running.pop(event.sequence.request_id)
            output = event.sequence.token_ids[event.sequence.num_prompt_tokens :]
            assert output == expected[: len(output)], "not the output of a run alone"
            if event.reason is FinishReason.LENGTH:
                assert output == expected
                self.turns[number] = list(event.sequence.token_ids)
            else:
                assert event.reason in (FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.PREEMPTED)


@pytest.mark.parametrize(("num_host_blocks", "num_ahead"), [(1, 1), (7, 0), (7, 1), (60, 1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_are_those_of_a_run_alone(policy: str, num_ahead: int, num_host_blocks: int) -> None:
    limits = replace(POLICIES[policy], num_host_blocks=num_host_blocks)
    counts = [Conversations(limits, seed, num_ahead).run(60) for seed in range(4)]

    # Then copies went both ways, and small host memory had to drop some.
    assert sum(one.stored_blocks for one in counts) > 50
    assert num_host_blocks == 1 or sum(one.restored_blocks for one in counts) > 20
    assert num_host_blocks > 7 or sum(one.dropped_blocks for one in counts) > 20


def test_without_host_memory_nothing_is_copied() -> None:
    assert Conversations(LIMITS, 0, 1).run(60) == HostPrefixCounts()
