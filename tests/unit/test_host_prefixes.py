"""Prefix blocks that are evicted to host memory, and come back for a sequence that has their prefix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from inflight.executor.scheduler.blocks import HostBlocks
from inflight.executor.scheduler.limits import Overcommit, PreemptionCost
from inflight.executor.scheduler.prefix_cache import chain_hashes
from inflight.executor.scheduler.scheduler import Scheduler, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.sequence import FinishReason, Sequence, StepPlan, StepResult
from inflight.executor.scheduler.step_constraint import CopyCost, PrefillAllowance, PrefillCost
from tests.support.scheduler.scheduling import (
    BLOCK_SIZE,
    LIMITS,
    ends_of,
    make_scheduler,
    make_sequence,
    retire,
    rows_of,
    run_until_idle,
    step,
)

TIER = replace(LIMITS, num_host_blocks=20, max_num_tokens=64)
NUM_BLOCKS = 10
POLICIES = [TIER, replace(TIER, policy=SchedulerPolicy.MAX_UTILIZATION, overcommit=Overcommit(watermark=0.0))]
either_policy = pytest.mark.parametrize("limits", POLICIES, ids=["guaranteed", "overcommitted"])


def chat(name: str, first_id: int, num_tokens: int = 17, **fields: object) -> Sequence:
    """A prompt of four blocks and a token, that has its end with the next one."""
    sequence = make_sequence(name, range(first_id, first_id + num_tokens), max_tokens=1)
    return replace(sequence, **fields)  # type: ignore[arg-type]


def run(scheduler: Scheduler, *sequences: Sequence) -> list[StepPlan]:
    """Runs them one after the other, and returns the plans."""
    plans = []
    for sequence in sequences:
        assert scheduler.offer(sequence) is None
        while not scheduler.is_idle:
            plans.append(scheduler.schedule())
            retire(scheduler, plans[-1])
            scheduler.check()
    return plans


def evicted(limits: SchedulerLimits = TIER) -> Scheduler:
    """A scheduler whose pool had to give up the blocks of chat "a" for those of "b" and "c"."""
    scheduler = make_scheduler(limits, NUM_BLOCKS)
    run(scheduler, chat("a", 100), chat("b", 200), chat("c", 300))
    return scheduler


class TestEviction:
    def test_copies_the_blocks_out_in_the_plan_that_reuses_them(self) -> None:
        scheduler = make_scheduler(TIER, NUM_BLOCKS)
        run(scheduler, chat("a", 100), chat("b", 200))
        (plan,) = run(scheduler, chat("c", 300))
        table = set(plan.boarded[0].block_table)

        # Two blocks were free, of the three that are missing the tail of "a" is the least recently used.
        assert len(plan.swaps_out) == len(plan.stored) == 3
        assert plan.swapped == ()
        assert not table, "the sequence has ended and given its blocks back"
        assert scheduler.kv_counts().host_prefixes[:4] == (3, 3, 0, 0)

    def test_keeps_the_head_of_a_prefix_longer_than_its_tail(self) -> None:
        # Given a pool with room for one chat at a time, and host memory for half of one.
        scheduler = make_scheduler(replace(TIER, num_host_blocks=2), 5)
        run(scheduler, chat("a", 100), chat("b", 200), chat("c", 300))

        head = chain_hashes(range(200, 208), BLOCK_SIZE, b"")
        assert set(scheduler.host.content_names().values()) == set(head)
        assert scheduler.kv_counts().host_prefixes.dropped_blocks == 2

    def test_does_not_copy_what_host_memory_has_already(self) -> None:
        # Given a pool with room for one chat at a time, and host memory for all.
        scheduler = make_scheduler(TIER, 5)
        run(scheduler, chat("a", 100), chat("b", 200), chat("c", 300), chat("d", 400))
        assert scheduler.host.num_stored == 12

        plans = run(scheduler, chat("a2", 100), chat("b2", 200), chat("c2", 300))

        assert [len(plan.swaps_out) for plan in plans] == [4, 0, 0]
        assert [len(plan.swaps_in) for plan in plans] == [4, 4, 4]

    @pytest.mark.parametrize("limits", [replace(LIMITS), replace(TIER, enable_prefix_cache=False)])
    def test_copies_nothing_without_the_tier_or_the_prefix_cache(self, limits: SchedulerLimits) -> None:
        scheduler = make_scheduler(limits, NUM_BLOCKS)
        plans = run(scheduler, chat("a", 100), chat("b", 200), chat("c", 300), chat("d", 100))

        assert not any(plan.swaps_out or plan.swaps_in for plan in plans)
        assert scheduler.pool.evicted is None

    def test_of_sequences_without_a_salt_copies_nothing(self) -> None:
        scheduler = make_scheduler(TIER, NUM_BLOCKS)
        plans = run(scheduler, *(chat(str(i), 100 * i, cache_salt=None) for i in range(6)))

        assert not any(plan.swaps_out or plan.swaps_in for plan in plans)

    def test_stays_within_the_time_of_the_step_beside_decodes(self) -> None:
        scheduler = make_scheduler(replace(POLICIES[1], max_num_sequences=4), 24)
        run(scheduler, chat("a", 100, 60))
        scheduler.offer(make_sequence("decodes", [1, 2, 3], max_tokens=8))
        step(scheduler)
        scheduler.offer(chat("b", 200, 60))

        # All blocks of "b" are taken at once, and there is time for a block of its tokens, and a copy for each.
        plan = scheduler.schedule(PrefillAllowance(BLOCK_SIZE, 0.0, PrefillCost(1.0), copy_s=1.0))

        assert len(plan.boarded[0].block_table) == 16
        assert [length for _, _, length, _ in rows_of(plan)] == [1, BLOCK_SIZE]
        assert len(plan.stored) <= 2
        scheduler.check()


class TestReturn:
    @either_policy
    def test_continues_the_device_s_prefix_and_computes_the_rest_in_the_same_step(
        self, limits: SchedulerLimits
    ) -> None:
        scheduler = evicted(limits)
        again = chat("a2", 100, 22)
        assert scheduler.offer(again) is None
        plan = scheduler.schedule()

        assert rows_of(plan) == [("a2", 16, 6, True)]
        (restored,) = plan.restored
        num_found = restored.start // BLOCK_SIZE
        assert [block for _, block in plan.swaps_in] == again.block_table[num_found:4] == list(restored.blocks)
        assert (again.num_cached_tokens, again.num_host_tokens) == (16, 16 - restored.start)
        retire(scheduler, plan)
        assert scheduler.kv_counts().host_prefixes.hit_tokens == 16 - restored.start
        assert scheduler.kv_counts().host_prefixes.restored_blocks == 4 - num_found
        scheduler.check()

    @either_policy
    def test_makes_blocks_findable_on_the_device_when_their_step_has_retired(self, limits: SchedulerLimits) -> None:
        scheduler = evicted(limits)
        scheduler.offer(again := chat("a2", 100, 22))
        plan = scheduler.schedule()
        hashes = again.block_hashes[:4]
        assert not all(scheduler.pool.is_findable(block_hash) for block_hash in hashes)
        retire(scheduler, plan)

        assert all(scheduler.pool.is_findable(block_hash) for block_hash in hashes)

    def test_waits_for_another_sequence_that_gets_the_same_blocks_back(self) -> None:
        scheduler = evicted()
        for name in ("first", "second"):
            assert scheduler.offer(make_sequence(name, range(100, 117), max_tokens=2)) is None
        plan = scheduler.schedule()
        assert [sequence.request_id for sequence in plan.boarded] == ["first"]
        retire(scheduler, plan)

        assert rows_of(scheduler.schedule())[1:] == [("second", 16, 1, True)]

    def test_is_refused_to_another_salt(self) -> None:
        scheduler = evicted()
        scheduler.offer(other := chat("a2", 100, 22, cache_salt=b"other"))
        plan = scheduler.schedule()

        assert (plan.swaps_in, other.num_cached_tokens) == ((), 0)

    def test_is_refused_to_another_adapter(self) -> None:
        scheduler = evicted()
        scheduler.offer(other := chat("a2", 100, 22, adapter_hash=b"adapter", adapter_slot=0))
        plan = scheduler.schedule()

        assert (plan.swaps_in, other.num_cached_tokens) == ((), 0)

    @pytest.mark.parametrize(("block_s", "comes_back"), [(0.9, True), (1.1, False)])
    def test_depends_on_whether_copying_is_predicted_to_be_faster(self, block_s: float, comes_back: bool) -> None:
        scheduler = evicted()
        scheduler.offer(again := chat("a2", 100, 22))
        plan = scheduler.schedule(copy_cost=CopyCost(block_s, PrefillCost(1.0 / BLOCK_SIZE)))

        assert bool(plan.swaps_in) == bool(again.num_host_tokens) == comes_back
        assert plan.rows[0].start == again.num_cached_tokens
        scheduler.check()

    def test_takes_several_steps_where_the_time_between_tokens_is_short(self) -> None:
        scheduler = evicted(replace(TIER, max_num_sequences=3))
        scheduler.offer(make_sequence("decodes", [1, 2, 3], max_tokens=8))
        step(scheduler)
        scheduler.offer(again := chat("a2", 100, 22))
        num_missing = 4 - len(scheduler.pool.share(scheduler.prefix_cache.name_blocks(again)))
        scheduler = evicted(replace(TIER, max_num_sequences=3))
        scheduler.offer(make_sequence("decodes", [1, 2, 3], max_tokens=8))
        step(scheduler)
        scheduler.offer(again := chat("a2", 100, 22))

        # Each block can displace another one, so a block takes two copies.
        plans: list[StepPlan] = []
        while not plans or again.host_prefix is not None:
            plans.append(scheduler.schedule(PrefillAllowance(0, 2.5, PrefillCost(0.1), copy_s=1.0)))
            assert len(plans[-1].swaps_in) == 1
            assert rows_of(plans[-1])[0][0] == "decodes"
            scheduler.check()
            retire(scheduler, plans[-1])

        assert len(plans) == num_missing > 1
        assert again.num_cached_tokens == 16
        assert [row[:3] for plan in plans for row in rows_of(plan)[1:]] == [("a2", 16, 5)]

    @either_policy
    def test_leaves_a_token_to_compute_where_the_step_has_no_decode(self, limits: SchedulerLimits) -> None:
        scheduler = evicted(limits)
        scheduler.offer(again := chat("a2", 100, 22))

        # Least tokens for one block, no time beyond, and more than that comes back.
        plan = scheduler.schedule(PrefillAllowance(BLOCK_SIZE, 0.0, PrefillCost(1.0), copy_s=1.0))

        assert plan.swaps_in
        assert rows_of(plan) == [("a2", 16, 1, False)]
        retire(scheduler, plan)
        assert not again.host_prefix
        assert [event.reason for event in run_until_idle(scheduler)] == [FinishReason.LENGTH]
        scheduler.check()

    def test_needs_no_more_device_blocks_than_the_sequence_has_reserved(self) -> None:
        scheduler = evicted()
        sequence = chat("a2", 100, 20)
        assert scheduler.offer(make_sequence("b2", range(50, 60), max_tokens=6)) is None
        assert scheduler.offer(sequence) is None
        while not scheduler.is_idle:
            step(scheduler)
            scheduler.check()
            assert len(sequence.block_table) <= sequence.num_reserved_blocks

    def test_ends_when_the_sequence_is_cancelled_half_way(self) -> None:
        scheduler = evicted(replace(TIER, max_num_sequences=3))
        scheduler.offer(make_sequence("decodes", [1, 2, 3], max_tokens=8))
        step(scheduler)
        scheduler.offer(again := chat("a2", 100, 22))
        plan = scheduler.schedule(PrefillAllowance(0, 2.5, PrefillCost(0.1), copy_s=1.0))
        assert again.host_prefix is not None

        assert scheduler.cancel("a2", 1, FinishReason.CANCELLED) is not None

        scheduler.check()
        retire(scheduler, plan)
        run_until_idle(scheduler)
        scheduler.check_when_idle()


class TestFailedStep:
    def overlapped(self) -> tuple[Scheduler, StepPlan, StepPlan]:
        """A plan that stores blocks of "a", and one behind it that brings some of them back."""
        scheduler = make_scheduler(replace(TIER, max_num_sequences=4), NUM_BLOCKS)
        run(scheduler, chat("a", 100), chat("b", 200))
        scheduler.offer(make_sequence("c", range(300, 315), max_tokens=4))
        storing = scheduler.schedule()
        assert storing.stored
        scheduler.offer(chat("a2", 100))
        reading = scheduler.schedule()
        assert {host for host, _ in reading.swaps_in} & {host for _, host in storing.swaps_out}
        return scheduler, storing, reading

    def test_loses_the_blocks_that_it_was_to_store_and_ends_who_gets_them_back(self) -> None:
        scheduler, storing, reading = self.overlapped()

        assert sorted(ends_of(scheduler.fail(storing, "lost"))) == [
            ("a2", FinishReason.ERROR),
            ("c", FinishReason.ERROR),
        ]
        assert not set(storing.stored) & set(scheduler.host.content_names().values())
        retire(scheduler, reading)
        again = chat("a3", 100)
        hashes = scheduler.prefix_cache.name_blocks(again)
        assert [scheduler.pool.is_findable(one) for one in hashes] == [one not in storing.stored for one in hashes]
        assert run(scheduler, again)
        scheduler.check_when_idle()

    def test_leaves_the_blocks_that_it_was_to_bring_back(self) -> None:
        scheduler, storing, reading = self.overlapped()
        retire(scheduler, storing)

        scheduler.fail(reading, "lost")

        assert set(storing.stored) <= set(scheduler.host.content_names().values())
        assert run(scheduler, chat("a3", 100))[0].rows[0].start == 16
        scheduler.check_when_idle()

    def test_row_without_a_usable_logit_withdraws_its_blocks_in_host_memory(self) -> None:
        scheduler = evicted()
        scheduler.offer(again := chat("a2", 100, 22))
        plan = scheduler.schedule()
        scheduler.update(StepResult(plan, (None,)))

        assert not set(again.block_hashes) & set(scheduler.host.content_names().values())
        scheduler.check_when_idle()


class TestSmallHostMemory:
    def test_of_one_block_keeps_one_prefix_block(self) -> None:
        scheduler = make_scheduler(replace(TIER, num_host_blocks=1), NUM_BLOCKS)
        run(scheduler, *(chat(str(i), 100 * (i % 4)) for i in range(9)))

        assert scheduler.host.num_prefix_blocks == 1
        scheduler.check()

    def test_keeps_copies_of_preempted_sequences_before_prefixes(self) -> None:
        host = HostBlocks(4)
        store(host, b"abcd")
        assert not host.num_available, "no plan writes a block twice"
        host.begin_plan()

        copy = host.allocate(3)

        assert copy is not None
        assert (host.num_prefix_blocks, host.num_in_copies, host.num_dropped) == (1, 3, 3)
        assert host.find([b"d"])
        assert host.allocate(2) is None
        store(host, b"e")
        assert (host.find([b"d"]), host.num_available) == ([], 0)
        host.check([copy])

    def test_swaps_a_preempted_sequence_out_although_prefixes_fill_it(self) -> None:
        overcommit = Overcommit(watermark=0.0, margin=0.1, cost=PreemptionCost(swap_token=0.01))
        limits = replace(POLICIES[1], max_num_sequences=4, num_host_blocks=6, overcommit=overcommit)
        scheduler = make_scheduler(limits, 6)
        run(scheduler, chat("a", 100), chat("b", 200), chat("c", 300))
        assert scheduler.host.num_prefix_blocks == 6
        crowd = [make_sequence(name, [number], max_tokens=20, salt=None) for number, name in enumerate("xy")]
        for sequence in crowd:
            sequence.num_reserved_blocks = 1
            assert scheduler.offer(sequence) is None
        while not scheduler.num_used_host_blocks:
            step(scheduler)
            scheduler.check()

        assert scheduler.host.num_prefix_blocks + scheduler.num_used_host_blocks <= 6
        run_until_idle(scheduler)
        assert scheduler.num_recomputed_tokens == 0


class TestHostBlocks:
    def test_drops_what_the_pool_has_as_well_before_the_least_recently_stored(self) -> None:
        host = HostBlocks(3)
        store(host, b"abc")
        host.begin_plan()
        back = host.find([b"b"])
        host.hold(back)
        host.unhold(back, are_in_pool=True)
        host.begin_plan()

        store(host, b"d")

        assert [bool(host.find([name])) for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]

    def test_drops_nothing_that_a_sequence_is_to_get_back_or_that_the_plan_reads(self) -> None:
        host = HostBlocks(2)
        store(host, b"ab")
        host.begin_plan()
        held = host.find([b"a", b"b"])
        host.hold(held)
        assert not host.num_available
        host.unhold(held, are_in_pool=False)
        assert host.allocate(1) is None, "the plan may read them still"
        host.begin_plan()
        assert host.store(b"c") == held[0]
        host.check([])

    def test_content_that_is_forgotten_while_it_is_held_is_free_afterwards(self) -> None:
        host = HostBlocks(1)
        store(host, b"a")
        host.begin_plan()
        held = host.find([b"a"])
        host.hold(held)
        assert host.forget([b"a", b"unknown"]) == held
        host.check([], [held])
        assert host.find([b"a"]) == []
        host.unhold(held, are_in_pool=True)
        host.begin_plan()
        assert host.allocate(1) == held


def store(host: HostBlocks, names: Iterable[int]) -> list[int]:
    """Stores a block of each name, the next to be dropped first."""
    return [host.store(bytes([name])) for name in names]
