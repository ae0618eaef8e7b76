"""Slots and checkpoints of recurrent state: where checkpoints are saved, which prefixes can be used, and the sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.common.kv_size import HybridSizes, KvBudget, StateSize, hybrid_sizes
from inflight.common.settings import SettingError
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import StateLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import FinishReason, Sampling, Sequence, StepPlan, StepResult, Stopping
from inflight.executor.scheduler.states import StatePool
from tests.support.device.fake_device import FakeDevice, solo_output
from tests.support.scheduler.scheduling import make_limits

BLOCK_SIZE, GRID = 4, 8
LIMITS = make_limits(
    max_num_sequences=3,
    num_standby_sequences=8,
    max_num_tokens=32,
    context_length=400,
    states=StateLimits(num_slots=4, num_checkpoints=20, grid_tokens=GRID),
)


class System:
    """A scheduler with a device that checks the state that each row begins with."""

    def __init__(self, num_checkpoints: int = 20) -> None:
        assert LIMITS.states is not None
        limits = replace(LIMITS, states=replace(LIMITS.states, num_checkpoints=num_checkpoints))
        pool = BlockPool(200, BLOCK_SIZE)
        self.scheduler = Scheduler(limits, pool)
        self.device = FakeDevice(pool)

    def run(self, prompt: list[int], max_tokens: int = 1) -> tuple[Sequence, list[int]]:
        """Runs a request to its end. Returns it, and the positions at which states were saved."""
        sampling, stopping = Sampling(0.0, 0, 1.0, 0), Stopping(max_tokens, 0, frozenset())
        num_blocks = -(-(len(prompt) + max_tokens) // BLOCK_SIZE)
        sequence = Sequence("r", 1, list(prompt), len(prompt), sampling, stopping, num_blocks, b"")
        sequence.request_id = f"r{id(sequence)}"
        expected = solo_output(sequence, LIMITS.context_length)
        assert self.scheduler.offer(sequence) is None
        saved = []
        while not self.scheduler.is_idle:
            plan = self.scheduler.schedule()
            saved += [save.position for save in plan.state_saves]
            self.scheduler.check()
            self.scheduler.update(StepResult(plan, self.device.run(plan)))
        self.scheduler.check_when_idle()
        assert (sequence.token_ids[len(prompt) :], FinishReason.LENGTH) == expected
        return sequence, saved


def test_states_are_saved_at_the_end_of_the_prompt_and_of_the_output() -> None:
    # The last token of the prompt is computed again, so 40 of its 41 tokens can be found; its output ends at 61.
    assert System().run([1] * 41, max_tokens=20)[1] == [40, 48, 56]


def test_a_prefix_is_found_as_far_as_its_last_checkpoint() -> None:
    system = System()
    system.run([1] * 45)
    again, saved = system.run([1] * 45)
    assert (again.num_cached_tokens, saved) == (40, [])
    # With 40 of 50 tokens found, the others are computed and their state is saved.
    longer, saved = system.run([1] * 45 + [2] * 5)
    assert (longer.num_cached_tokens, saved) == (40, [48])


def test_the_second_prompt_of_a_branch_saves_its_state_and_the_third_uses_it() -> None:
    system = System()
    system.run([1] * 30 + [2] * 30)
    second, saved = system.run([1] * 30 + [3] * 30)
    # Seven blocks were found, and no state before the end of the other prompt.
    assert (second.num_cached_tokens, saved) == (0, [24, 56])
    third, saved = system.run([1] * 30 + [4] * 30)
    assert (third.num_cached_tokens, saved) == (24, [56])


def test_the_next_turn_of_a_conversation_finds_the_output_of_the_last_one() -> None:
    system = System()
    first, _ = system.run([1] * 20, max_tokens=30)
    second, _ = system.run([*first.token_ids, 2, 2, 2])
    assert second.num_cached_tokens == 48
    # Only the newest state of the output was kept, besides that of the prompt.
    counts = system.scheduler.states.counts() if system.scheduler.states else None
    assert counts is not None
    assert (counts.saved, counts.kept_checkpoints, counts.loaded, counts.dropped) == (5, 2, 1, 0)


def test_the_checkpoint_that_was_used_least_recently_is_dropped() -> None:
    system = System(num_checkpoints=2)
    for token_id in (1, 2):
        system.run([token_id] * 17)
    assert system.run([1] * 17)[0].num_cached_tokens == 16
    system.run([3] * 17)
    assert system.run([2] * 17)[0].num_cached_tokens == 0
    # Prompt 2 took the place of prompt 1, which was used before prompt 3 was computed.
    assert system.run([3] * 17)[0].num_cached_tokens == 16


def test_without_checkpoints_no_prefix_is_found() -> None:
    system = System(num_checkpoints=0)
    system.run([1] * 40)
    again, saved = system.run([1] * 40)
    assert (again.num_cached_tokens, saved) == (0, [])


def test_checkpoints_of_a_failed_step_are_free_again() -> None:
    system = System()
    sequence = Sequence("r", 1, [1] * 20, 20, Sampling(0.0, 0, 1.0, 0), Stopping(4, 0, frozenset()), 6, b"")
    system.scheduler.offer(sequence)
    plan: StepPlan = system.scheduler.schedule()
    assert len(plan.state_saves) == 1
    system.device.corrupt(plan)
    system.scheduler.fail(plan, "lost")
    system.scheduler.check_when_idle()
    assert system.run([1] * 20)[0].num_cached_tokens == 0


def test_checkpoints_end_blocks() -> None:
    with pytest.raises(ValueError, match="checkpoints each 10 tokens do not end blocks of 4"):
        StatePool(StateLimits(1, 1, 10), 4)


STATE = StateSize(slot_bytes=1000, checkpoint_bytes=100, grid_tokens=64)


def sizes(budget: KvBudget, state: StateSize = STATE, num_seats_set: int = 0) -> HybridSizes:
    return hybrid_sizes(
        budget,
        16,
        160,
        state,
        context_length=1024,
        num_seats_set=num_seats_set,
        most_seats=64,
        keeps_prefixes=True,
    )


def test_kv_and_states_share_the_memory_of_the_cache() -> None:
    found = sizes(KvBudget(0, 2_000_000, 0.5), num_seats_set=8)
    used = found.num_blocks * 160 + found.num_slots * 1000 + found.num_checkpoints * 100
    assert 1_000_000 - 160 < used <= 1_000_000
    assert (found.num_seats, found.num_slots, found.checkpoint_tokens) == (8, 9, 64)
    # One for 256 tokens of KV is less than a quarter of what the slots leave.
    assert found.num_checkpoints == (1_000_000 - 9_000) // 160 * 16 // 256
    large = replace(STATE, checkpoint_bytes=10_000)
    assert (
        sizes(KvBudget(0, 2_000_000, 0.5), large, num_seats_set=8).num_checkpoints == (1_000_000 - 9_000) // 4 // 10_000
    )


def test_seats_are_fewer_where_their_state_is_large() -> None:
    small = sizes(KvBudget(0, 1_000_000, 1.0))
    large = sizes(KvBudget(0, 1_000_000, 1.0), replace(STATE, slot_bytes=50_000))
    assert small.num_seats == 64
    assert large.num_slots * 50_000 <= 500_000
    assert large.num_seats < small.num_seats


def test_a_set_number_of_tokens_leaves_the_state_in_addition() -> None:
    assert sizes(KvBudget(16 * 100, 10_000_000, 1.0), num_seats_set=4).num_blocks == 100
    with pytest.raises(SettingError, match="recurrent state of 64 seats takes 72000 bytes"):
        sizes(KvBudget(0, 50_000, 1.0), num_seats_set=64)
