"""Preemption: choice of the victim, its cost, and what happens to the preempted sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inflight.executor.scheduler.blocks import HostBlocks
from inflight.executor.scheduler.limits import Overcommit, PreemptionCost
from inflight.executor.scheduler.max_utilization import (
    Candidate,
    MaxUtilization,
    PreemptedKv,
    choose_victim,
    is_swap_cheaper,
    recompute_cost,
    swap_cost,
)
from inflight.executor.scheduler.plan_builder import StepBuilder
from inflight.executor.scheduler.scheduler import Batching, Refusal, Scheduler, SchedulerPolicy
from inflight.executor.scheduler.sequence import BATCH_PRIORITY, FinishReason, Sequence, StepPlan
from tests.support.scheduler.scheduling import (
    BLOCK_SIZE,
    LIMITS,
    STOP_ID,
    ends_of,
    make_scheduler,
    make_sequence,
    retire,
    run_until_idle,
    step,
)

TIGHT = replace(
    LIMITS,
    max_num_sequences=4,
    max_num_tokens=16,
    policy=SchedulerPolicy.MAX_UTILIZATION,
    overcommit=Overcommit(watermark=0.0, margin=0.1),
)


def modest(request_id: str, prompt: list[int], max_tokens: int = 12, **fields: object) -> Sequence:
    """A sequence that has just its prompt and one token reserved."""
    sequence = make_sequence(request_id, prompt, max_tokens=max_tokens, salt=None)
    sequence.num_reserved_blocks = len(prompt) // BLOCK_SIZE + 1
    return replace(sequence, **fields)  # type: ignore[arg-type]


def run_until_preempted(scheduler: Scheduler) -> list[Sequence]:
    """Steps until a sequence gives up its seat; returns it."""
    while True:
        plan = scheduler.schedule()
        retire(scheduler, plan)
        if plan.preempted:
            return list(plan.preempted)


def crowded(**limits: object) -> tuple[Scheduler, Sequence, Sequence]:
    """Two sequences that need six blocks each, in a pool of six."""
    scheduler = make_scheduler(replace(TIGHT, **limits), num_blocks=6)  # type: ignore[arg-type]
    first, second = modest("a", [1, 2], max_tokens=20), modest("b", [3, 4], max_tokens=20)
    assert scheduler.offer(first) is None
    assert scheduler.offer(second) is None
    return scheduler, first, second


class TestVictims:
    @pytest.mark.parametrize(
        ("fields", "victim"),
        [
            # Lowest priority first, whatever it costs.
            ([{"priority": 1, "cost": 1.0}, {"priority": -1, "cost": 9.0}], 1),
            # Then who has no deadline, then the latest one.
            ([{"deadline_ms": 50, "cost": 1.0}, {"deadline_ms": None, "cost": 9.0}], 1),
            ([{"deadline_ms": 50, "cost": 1.0}, {"deadline_ms": 90, "cost": 9.0}], 1),
            ([{"priority": 0, "deadline_ms": None}, {"priority": -1, "deadline_ms": 5}], 1),
            # Then the cheapest, then who came last.
            ([{"cost": 3.0}, {"cost": 2.0}, {"cost": 4.0}], 1),
            ([{"arrival": 1}, {"arrival": 2}], 1),
        ],
    )
    def test_are_chosen_by_class_then_deadline_then_cost_then_arrival(
        self, fields: list[dict[str, Any]], victim: int
    ) -> None:
        candidates = [
            Candidate(modest(str(i), [1], **{k: v for k, v in change.items() if k != "cost"}), change.get("cost", 0.0))
            for i, change in enumerate(fields)
        ]

        assert choose_victim(candidates, None) is candidates[victim].sequence

    def test_are_never_the_same_twice_running_while_there_is_another(self) -> None:
        cheap, dear = Candidate(modest("a", [1]), 1.0), Candidate(modest("b", [1], priority=1), 9.0)

        assert choose_victim([cheap, dear], cheap.sequence) is dear.sequence
        assert choose_victim([cheap], cheap.sequence) is cheap.sequence
        assert choose_victim([], None) is None

    def test_are_of_class_batch_while_it_has_a_seat(self) -> None:
        first, second = (
            Candidate(modest(name, [1], priority=BATCH_PRIORITY), cost) for name, cost in (("a", 1), ("b", 2))
        )
        other = Candidate(modest("c", [1]), 0.0)

        assert choose_victim([first, second, other], first.sequence) is second.sequence
        assert choose_victim([first, other], first.sequence) is first.sequence


class TestCost:
    def kept(
        self, *, num_computed: int, num_cached: int = 0, num_wanted: int = 0, is_published: bool = True
    ) -> PreemptedKv:
        sequence = modest("a", [1], num_computed=num_computed, num_cached_tokens=num_cached)
        sequence.block_table = list(range(num_computed // BLOCK_SIZE + 1))
        return PreemptedKv.of(sequence, BLOCK_SIZE, num_wanted, is_published=is_published)

    def test_counts_only_tokens_that_are_not_still_cached(self) -> None:
        assert self.kept(num_computed=14).num_lost_tokens == 2
        assert self.kept(num_computed=14, is_published=False).num_lost_tokens == 14
        assert self.kept(num_computed=14, num_cached=8, is_published=False).num_lost_tokens == 6

    def test_counts_published_blocks_that_are_wanted_at_once_as_lost_but_not_shared_ones(self) -> None:
        # Of four blocks one is partial, two are its own and published, one was found in the cache.
        assert self.kept(num_computed=14, num_cached=4, num_wanted=2).num_lost_tokens == 6
        assert self.kept(num_computed=14, num_cached=4, num_wanted=9).num_lost_tokens == 10

    def test_of_a_swap_is_out_and_in_and_needs_host_blocks(self) -> None:
        kept, cost = self.kept(num_computed=14, is_published=False), PreemptionCost(swap_token=0.1)

        assert swap_cost(kept, BLOCK_SIZE, cost) == pytest.approx(2 * 16 * 0.1)
        assert recompute_cost(kept, cost) == 14
        assert is_swap_cheaper(kept, BLOCK_SIZE, cost, num_host_blocks=4)
        assert not is_swap_cheaper(kept, BLOCK_SIZE, cost, num_host_blocks=3)
        assert not is_swap_cheaper(kept, BLOCK_SIZE, PreemptionCost(swap_token=1.0), num_host_blocks=4)


def paused_in_flight() -> tuple[Scheduler, Sequence, list[StepPlan]]:
    """A victim that the step in flight still has a row of, and the plans in flight."""
    scheduler, _, _ = crowded()
    plans = [scheduler.schedule()]
    while not scheduler._queues.pausing:
        plans.append(scheduler.schedule())
        if not scheduler._queues.pausing:
            retire(scheduler, plans.pop(0))
    (pausing,) = scheduler._queues.pausing
    return scheduler, pausing, [plan for plan in plans if plan.rows]


class TestPreempted:
    def test_one_gives_up_its_blocks_when_the_next_ones_are_missing(self) -> None:
        scheduler, first, second = crowded()

        assert run_until_preempted(scheduler) == [second]
        assert (scheduler.num_preempted, scheduler.num_preemptions, second.block_table) == (1, 1, [])
        assert first in scheduler.held()
        assert second in scheduler.held()
        scheduler.check()

    def test_goes_on_exactly_where_it_was_and_its_output_stays_output(self) -> None:
        scheduler, _, second = crowded()
        run_until_preempted(scheduler)
        output = second.token_ids[2:]
        assert output

        while second.seat is None:
            plan = scheduler.schedule()
            retire(scheduler, plan, 7)
        assert [(row.start, row.num_tokens) for row in plan.rows if row.sequence is second] == [(0, 2 + len(output))]
        assert second.num_prompt_tokens == 2
        assert second.token_ids[2:] == [*output, 7]
        assert scheduler.num_recomputed_tokens == 2 + len(output) - 1

    def test_comes_back_beside_others_only_with_a_block_to_spare_for_each_of_them_and_itself(self) -> None:
        # Given three that fill twelve blocks, of which "b" gives way, and then "c" ends
        scheduler = make_scheduler(TIGHT, num_blocks=12)
        away = modest("b", [2] * 4, max_tokens=40, priority=-1)
        for sequence in (modest("a", [1] * 4, max_tokens=40), away, modest("c", [3] * 4, max_tokens=20)):
            assert scheduler.offer(sequence) is None
        assert run_until_preempted(scheduler) == [away]
        while not step(scheduler).finished:
            pass

        # When six blocks are free, of which it needs five
        assert scheduler.pool.num_available == 6
        plan = scheduler.schedule()

        # Then it waits on: beside "a" it would have to give way again before a block is full.
        assert [sequence.request_id for sequence in plan.sequences] == ["a"]
        retire(scheduler, plan)
        while not step(scheduler).finished:
            assert away.seat is None
        assert scheduler.schedule().boarded == (away,)

    def test_shrinks_the_budget_to_what_is_promised_until_it_is_back(self) -> None:
        scheduler, _, _ = crowded()
        assert scheduler.budget_blocks == 6
        run_until_preempted(scheduler)

        assert scheduler.budget_blocks <= 2
        while not scheduler.is_idle:
            step(scheduler)
        assert scheduler.budget_blocks == 6

    def test_in_flight_keeps_its_blocks_until_its_last_step_has_retired(self) -> None:
        scheduler, pausing, plans = paused_in_flight()
        assert pausing.block_table
        assert len(plans) == 1, "the other needs a block as well, so there was no sequence to plan for"

        retire(scheduler, plans[0])
        assert scheduler.schedule().preempted == (pausing,)
        assert pausing.block_table == []

    def test_goes_on_without_ado_when_its_blocks_are_not_needed_after_all(self) -> None:
        scheduler, pausing, plans = paused_in_flight()
        other = next(sequence for sequence in scheduler.held() if sequence is not pausing)
        scheduler.cancel(other.request_id, 1, FinishReason.CANCELLED)
        for plan in plans:
            retire(scheduler, plan)

        plan = scheduler.schedule()
        assert (plan.sequences, plan.preempted, scheduler.num_preemptions) == ([pausing], (), 0)

    def test_is_handed_back_with_all_its_output_when_it_has_waited_too_long(self) -> None:
        scheduler, _, second = crowded(overcommit=Overcommit(watermark=0.0, max_steps_away=2))
        run_until_preempted(scheduler)
        output = second.token_ids[2:]

        ends = [end for _ in range(4) for end in step(scheduler).finished]

        assert [(end.sequence, end.reason) for end in ends] == [(second, FinishReason.PREEMPTED)]
        assert second.token_ids[2:] == output
        assert second not in scheduler.held()

    def test_may_be_cancelled_or_stopped_while_it_is_away(self) -> None:
        scheduler, _, second = crowded(num_host_blocks=8, overcommit=Overcommit(cost=PreemptionCost(swap_token=0.01)))
        run_until_preempted(scheduler)
        assert scheduler.num_used_host_blocks > 0

        event = scheduler.cancel("b", 1, FinishReason.DEADLINE)

        assert event is not None
        assert (event.sequence, event.reason) == (second, FinishReason.DEADLINE)
        assert scheduler.num_used_host_blocks == 0
        scheduler.check()


class TestHostTier:
    cheap = Overcommit(watermark=0.0, cost=PreemptionCost(swap_token=0.01))

    def test_keeps_the_kv_and_brings_it_back_before_the_step_that_reads_it(self) -> None:
        scheduler, _, second = crowded(num_host_blocks=8, overcommit=self.cheap)
        while not second.num_preemptions:
            table = list(second.block_table)
            plan = scheduler.schedule()
            retire(scheduler, plan)
        assert [block for block, _ in plan.swaps_out] == table
        assert plan.swapped == (second,)
        computed = len(second.token_ids) - 1

        while second.seat is None:
            again = scheduler.schedule()
            retire(scheduler, again)

        assert [host for host, _ in again.swaps_in] == [host for _, host in plan.swaps_out]
        assert [block for _, block in again.swaps_in] == second.block_table[: len(table)]
        assert [(row.start, row.num_tokens) for row in again.rows if row.sequence is second] == [(computed, 1)]
        assert (scheduler.num_recomputed_tokens, scheduler.num_used_host_blocks) == (0, 0)

    def test_without_room_tokens_are_computed_again(self) -> None:
        scheduler, _, second = crowded(num_host_blocks=1, overcommit=self.cheap)
        run_until_preempted(scheduler)

        assert second.host_copy is None
        while not scheduler.is_idle:
            step(scheduler)
        assert scheduler.num_recomputed_tokens > 0

    def away_and_back(self) -> tuple[Scheduler, Sequence, StepPlan]:
        """A sequence whose prefix was published and evicted, and the plan in which it comes back."""
        scheduler = make_scheduler(replace(TIGHT, num_host_blocks=8, overcommit=self.cheap), num_blocks=6)
        first, second = modest("a", [1, 2], max_tokens=20), modest("b", [3, 4], max_tokens=20)
        first.cache_salt = second.cache_salt = b""
        assert scheduler.offer(first) is None
        assert scheduler.offer(second) is None
        assert run_until_preempted(scheduler) == [second]
        while not (plan := scheduler.schedule()).swaps_in:
            retire(scheduler, plan)
        return scheduler, second, plan

    def test_publishes_full_blocks_again_with_the_step_that_brings_them_back(self) -> None:
        scheduler, second, plan = self.away_and_back()
        (restored,) = plan.restored
        num_found = restored.start // BLOCK_SIZE
        hashes = second.block_hashes[num_found : restored.end // BLOCK_SIZE]
        assert hashes
        assert not any(scheduler.pool.is_findable(block_hash) for block_hash in hashes)

        retire(scheduler, plan)

        assert all(scheduler.pool.is_findable(block_hash) for block_hash in hashes)
        scheduler.check()

    def test_blocks_that_a_failed_step_brings_back_are_not_published(self) -> None:
        scheduler, second, plan = self.away_and_back()

        (restored,) = plan.restored
        hashes = second.block_hashes[restored.start // BLOCK_SIZE : restored.end // BLOCK_SIZE]

        scheduler.fail(plan, "lost")

        assert not any(scheduler.pool.is_findable(block_hash) for block_hash in hashes)
        scheduler.check()

    def test_blocks_are_handed_out_once(self) -> None:
        blocks = HostBlocks(3)
        first = blocks.allocate(2)

        assert first is not None
        assert blocks.allocate(2) is None
        blocks.check([first])
        blocks.release(first)
        assert blocks.num_available == 1, "the newest plan may still read what was given back"
        blocks.begin_plan()
        assert (blocks.num_available, blocks.num_in_copies) == (3, 0)


class TestGate:
    def test_takes_a_reservation_for_what_is_known_and_the_next_token(self) -> None:
        scheduler = make_scheduler(TIGHT)
        short = modest("a", [1] * 4)
        short.num_reserved_blocks = 1

        assert scheduler.offer(short) is Refusal.INVALID
        assert scheduler.offer(modest("b", [1] * 4)) is None

    def test_refuses_who_would_not_fit_even_alone(self) -> None:
        assert make_scheduler(TIGHT, 3).offer(modest("a", [1], max_tokens=12)) is Refusal.NO_CAPACITY

    def test_counts_what_is_used_beyond_reservations(self) -> None:
        scheduler = make_scheduler(TIGHT, 4)
        scheduler.offer(modest("a", [1], max_tokens=12))
        for _ in range(9):
            step(scheduler)

        # It holds three blocks, and one was reserved.
        late = modest("b", [1] * 4, max_tokens=4)
        assert scheduler.budget_blocks == 4 - 2
        assert scheduler.offer(late) is Refusal.NO_CAPACITY

    def test_static_batch_is_guaranteed_whatever_the_policy(self) -> None:
        scheduler = make_scheduler(replace(TIGHT, batching=Batching.STATIC))

        assert scheduler.offer(modest("a", [1], max_tokens=12)) is None
        assert scheduler.reserve_quantile == 1.0
        # It ends with its reservation instead of taking what others have reserved.
        assert [(end.reason, len(end.sequence.token_ids)) for end in run_until_idle(scheduler)] == [
            (FinishReason.PREEMPTED, 4)
        ]


def test_stop_token_of_a_pausing_sequence_ends_it() -> None:
    scheduler, pausing, plans = paused_in_flight()

    assert (pausing.request_id, FinishReason.STOP_TOKEN) in ends_of(retire(scheduler, plans[0], STOP_ID))
    scheduler.check()


def test_sequence_in_flight_keeps_its_blocks_and_ends_instead_of_giving_them_up() -> None:
    scheduler, first, plans = paused_in_flight()
    table = list(first.block_table)
    assert first.num_in_flight > 0
    builder = StepBuilder(TIGHT, scheduler.pool, None)
    room = scheduler._kv_policy
    assert isinstance(room, MaxUtilization)
    room._preempt(first, 1, builder)

    assert list(builder.broken) == [first]
    assert (first.block_table, builder.preempted, first.num_preemptions) == (table, [], 0)
    for plan in plans:
        retire(scheduler, plan)
