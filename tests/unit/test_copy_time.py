"""What is learned about copies between device and host memory, and how they count in a step's time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.prefill_budget import CopyTime, PrefillBudget
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import StepPlan
from inflight.executor.scheduler.step_constraint import DecodeLoad, PrefillAllowance, PrefillCost
from tests.support.device.modelled_device import BLOCK_SIZE, ModelledDevice
from tests.support.scheduler.scheduling import LIMITS, make_sequence

TIER = replace(LIMITS, max_num_tokens=512, context_length=2048, num_host_blocks=400)


def copies(num_out: int, num_in: int) -> StepPlan:
    pairs = tuple((number, number) for number in range(num_out + num_in))
    return replace(StepPlan.of(()), swaps_out=pairs[:num_out], swaps_in=pairs[num_out:])


def test_time_of_a_block_is_the_mean_over_both_directions() -> None:
    copy_time = CopyTime()
    assert copy_time.block_s == 0
    for _ in range(20):
        copy_time.observe(copies(3, 1), 0.004)
        copy_time.observe(copies(0, 0), 0.0)
    assert copy_time.block_s == pytest.approx(0.001)


def test_a_single_long_copy_counts_little_and_many_are_believed() -> None:
    copy_time = CopyTime()
    for _ in range(50):
        copy_time.observe(copies(4, 0), 0.004)
    copy_time.observe(copies(4, 0), 4.0)
    assert copy_time.block_s < 0.0011
    for _ in range(400):
        copy_time.observe(copies(4, 0), 0.008)
    assert copy_time.block_s == pytest.approx(0.002, rel=0.01)


@pytest.fixture(scope="module")
def served() -> tuple[PrefillBudget, Scheduler]:
    """A budget that has seen conversations on a pool which is too small for them, and the scheduler."""
    device, budget = ModelledDevice(jitter=0.0, copy_s=80e-6), PrefillBudget()
    pool = BlockPool(60, BLOCK_SIZE)
    scheduler = Scheduler(TIER, pool)
    outputs: list[EngineOutput] = []
    engine = Engine(
        scheduler,
        device,
        outputs.append,
        lambda error: None,
        prefill_budget=budget,
        clock=lambda: device.now_s,
    )
    for turn in range(6):
        for number in range(5):
            prompt = range(1000 * number, 1000 * number + 300 + 40 * turn)
            sequence = make_sequence(f"{number}/{turn}", prompt, max_tokens=8)
            engine.submit(replace(sequence, num_reserved_blocks=-(-(len(prompt) + 8) // BLOCK_SIZE)))
            engine.step()
            while not scheduler.is_idle:
                engine.step()
    return budget, scheduler


def test_engine_learns_the_copies_apart_from_the_rest_of_a_step(served: tuple[PrefillBudget, Scheduler]) -> None:
    budget, scheduler = served
    assert scheduler.kv_counts().host_prefixes.restored_blocks > 50
    assert budget.copy_time.block_s == pytest.approx(80e-6)
    cost = budget.copy_cost()
    assert cost is not None
    assert cost.prefill.of(64, 320) == pytest.approx(64 * (150e-6 + 0.1e-6 * 352), rel=0.15)
    assert cost.is_cheaper(20, BLOCK_SIZE, 0)


def test_tokens_beside_decodes_pay_for_the_blocks_that_they_displace(served: tuple[PrefillBudget, Scheduler]) -> None:
    budget, _ = served
    allowance = budget.allowance(DecodeLoad(4, 2000, 50.0), BLOCK_SIZE)
    cost = budget.step_time.prefill_cost()
    assert allowance.copy_s == budget.copy_time.block_s
    assert allowance.cost.of(BLOCK_SIZE, 0) == pytest.approx(cost.of(BLOCK_SIZE, 0) + allowance.copy_s)


def test_copies_take_from_the_time_of_prompts() -> None:
    allowance = PrefillAllowance(0, 1.01, PrefillCost(0.1), copy_s=0.1)
    assert (allowance.fitting_copies(20), allowance.fitting_restores(20, 4)) == (10, 5)
    allowance.take_restores(3, 4)
    assert allowance.seconds == pytest.approx(0.41)
    assert allowance.fitting(10, 0) == 4


def test_a_block_comes_back_in_any_case_where_prompts_are_late() -> None:
    allowance = PrefillAllowance(4, -1.0, PrefillCost(0.1), copy_s=0.1)
    assert allowance.fitting_restores(20, 4) == 1
    allowance.take_restores(1, 4)
    assert allowance.fitting_restores(20, 4) == 0
