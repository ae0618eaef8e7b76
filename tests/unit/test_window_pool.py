"""The blocks of layers with a sliding window: which prefixes can be used, what leaves the window, and the sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.common.kv_size import WindowSize, kv_groups
from inflight.executor.scheduler.blocks import BlockPool, WindowPool
from inflight.executor.scheduler.limits import KvWindow
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import FinishReason, Sampling, Sequence, StepPlan, StepResult, Stopping
from tests.support.device.fake_device import FakeDevice, solo_output
from tests.support.scheduler.scheduling import make_limits

HASHES = [bytes([i]) * 32 for i in range(10)]


def filled(num_blocks: int, window: int, pool_blocks: int = 20) -> WindowPool:
    """A pool of blocks of 4 tokens in which a sequence has published its blocks and ended."""
    pool = WindowPool(pool_blocks, 4, window, max_tables=3)
    table = pool.open()
    assert pool.grow(table, 4 * num_blocks)
    for index in range(num_blocks):
        pool.publish(table, index, HASHES[index])
        pool.trim(table, 4 * (index + 1))
    pool.close(table)
    pool.check([])
    return pool


def test_a_prefix_is_usable_if_the_window_before_its_end_is_there() -> None:
    # Blocks 0 to 7 are used again, last first but one: an eviction begins with what was released first.
    pool = filled(8, window=9, pool_blocks=8)
    assert pool.num_usable(HASHES[:8]) == 8
    other = pool.open()
    assert pool.grow(other, 4 * 6)
    # Blocks 6 and 7 are left. Position 32 sees positions 24 to 32, which begin with block 6.
    assert pool.num_usable(HASHES[:8]) == 8
    assert pool.num_usable(HASHES[:7]) == 0
    assert pool.open(HASHES[:8]).first == 6


def test_a_prefix_whose_window_is_incomplete_is_used_as_far_as_another_window_is_complete() -> None:
    pool = filled(8, window=5)
    table = pool.open(HASHES[:6])
    assert (table.first, len(table.blocks)) == (5, 1)
    # The content of block 6 is wrong.
    pool.retract(table, [HASHES[6]])
    assert pool.num_usable(HASHES[:7]) == 5
    assert pool.num_usable(HASHES[:8]) == 8


def test_blocks_that_leave_the_window_are_released() -> None:
    pool = WindowPool(6, 4, 5, max_tables=1)
    table = pool.open()
    assert pool.grow(table, 16)
    pool.trim(table, 11)
    # Position 11 sees 7 to 11, the last of block 1 first.
    assert (table.first, len(table.blocks)) == (1, 3)
    pool.trim(table, 12)
    assert (table.first, len(table.blocks)) == (2, 2)
    assert pool.covers(table, 15)
    assert not pool.covers(table, 16)
    assert not pool.grow(table, 36)
    assert pool.grow(table, 32)
    pool.check([table])


LIMITS = make_limits(max_num_sequences=3, num_standby_sequences=8, max_num_tokens=32, context_length=400)


def sequence(number: int, num_prompt: int) -> Sequence:
    prompt = [(i * number) % 5 for i in range(num_prompt)]
    return Sequence(
        f"r{number}", 1, prompt, num_prompt, Sampling(0.0, 0, 1.0, 0), Stopping(60, 0, frozenset()), 90, b""
    )


def run(num_window_blocks: int, max_tables: int) -> dict[str, tuple[list[int], FinishReason]]:
    """Ends of sequences that run with two steps in flight."""
    window = KvWindow(20, num_window_blocks, max_tables)
    pool = BlockPool(1000, 4)
    scheduler = Scheduler(replace(LIMITS, kv_window=window), pool)
    device = FakeDevice(pool, scheduler.windows, 20)
    for number in range(6):
        assert scheduler.offer(sequence(number, 90 + 31 * number)) is None
    launched: list[StepPlan] = []
    ends: dict[str, tuple[list[int], FinishReason]] = {}
    while launched or not scheduler.is_idle:
        plan = scheduler.schedule()
        scheduler.check()
        launched += [plan] if plan.rows else []
        finished = list(scheduler.take_finished())
        if len(launched) > int(bool(plan.rows)):
            done = launched.pop(0)
            finished += scheduler.update(StepResult(done, device.run(done))).finished
        for event in finished:
            ends[event.sequence.request_id] = (
                event.sequence.token_ids[event.sequence.num_prompt_tokens :],
                event.reason,
            )
    scheduler.check_when_idle()
    return ends


SIZE = WindowSize(20, 32, 400, 0, 4)


def test_with_the_computed_size_every_sequence_gets_its_blocks() -> None:
    ends = run(SIZE.num_blocks(3), SIZE.num_sequences(3))
    assert ends == {f"r{n}": solo_output(sequence(n, 90 + 31 * n), 400) for n in range(6)}


def test_a_sequence_without_a_window_block_ends_alone() -> None:
    """This cannot happen with the computed size."""
    ends = run(20, SIZE.num_sequences(3))
    assert FinishReason.ERROR in {reason for _, reason in ends.values()}
    whole = {name: end for name, end in ends.items() if end[1] is not FinishReason.ERROR}
    assert whole
    assert all(end == solo_output(sequence(int(name[1:]), 90 + 31 * int(name[1:])), 400) for name, end in whole.items())


def test_window_groups_take_the_memory_of_one_pool_and_hold_more() -> None:
    # Five of six layers have a window of 512; a step has 2048 tokens.
    size = WindowSize(512, 2048, 32768, 0, 16)
    groups = kv_groups(8192, 1, 5, size, num_seats_set=32, most_seats=64, is_limited=False, keeps_prefixes=False)
    assert groups is not None
    assert groups.num_window_blocks == (32 + 4) * (32 + 2) + 2 * 128
    assert groups.num_blocks + 5 * groups.num_window_blocks == 6 * 8192
    assert groups.num_blocks > 5 * 8192


@pytest.mark.parametrize("num_blocks", [2000, 8192, 100_000])
def test_seats_that_are_not_set_are_as_many_as_the_blocks_fill(num_blocks: int) -> None:
    size = WindowSize(512, 512, 32768, 0, 16)
    groups = kv_groups(num_blocks, 1, 5, size, num_seats_set=0, most_seats=64, is_limited=False, keeps_prefixes=True)
    assert groups is not None
    assert groups.num_blocks > num_blocks
    assert groups.num_window_blocks >= size.num_blocks(groups.num_seats)
    assert groups.num_blocks + 5 * groups.num_window_blocks <= 6 * num_blocks


def test_one_pool_is_kept_where_windows_save_nothing() -> None:
    size = WindowSize(512, 2048, 600, 0, 16)
    assert kv_groups(500, 1, 5, size, num_seats_set=32, most_seats=64, is_limited=False, keeps_prefixes=True) is None


def test_a_set_number_of_tokens_stays_and_takes_less_memory() -> None:
    size = WindowSize(512, 512, 32768, 0, 16)
    groups = kv_groups(8192, 1, 5, size, num_seats_set=16, most_seats=64, is_limited=True, keeps_prefixes=False)
    assert groups is not None
    assert groups.num_blocks == 8192
    assert groups.num_window_blocks < 8192


def test_a_model_with_windows_in_all_layers_holds_the_longest_contexts_of_all_seats() -> None:
    size = WindowSize(512, 512, 32768, 0, 16)
    groups = kv_groups(2048, 0, 6, size, num_seats_set=8, most_seats=64, is_limited=False, keeps_prefixes=True)
    assert groups is not None
    assert (groups.num_blocks, groups.num_window_blocks) == (8 * 2048, 2048)
