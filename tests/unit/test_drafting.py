"""Drafts in the scheduler's plans: who waits for a step, what drafts may take, and what becomes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.limits import SchedulerPolicy
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import BATCH_PRIORITY, FinishReason, StepPlan, StepResult
from inflight.executor.scheduler.sequence import Sequence as Request
from inflight.executor.scheduler.step_constraint import DraftTerms, PrefillAllowance, PrefillCost, StepCost
from inflight.executor.speculation.budget import DraftBudget
from inflight.executor.speculation.proposer import NO_DRAFT, Draft
from tests.support.scheduler.drafting import CHEAP, EagerBudget
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, STOP_ID, make_scheduler, make_sequence

WIDE = replace(LIMITS, max_num_sequences=4, max_num_tokens=32)


class FixedProposer:
    """Drafts the same ids for a sequence whose prompt begins with 7, and nothing for others."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def extend(self, ids: Sequence[int]) -> None:
        self._ids += ids

    def propose(self, limit: int) -> Draft:
        return Draft((1, 1, 1, 1, 1, 1, 1)[:limit], 5) if self._ids[0] == 7 else NO_DRAFT


def drafting_scheduler(num_ahead: int = 0, budget: DraftBudget | None = None, **limits: object) -> Scheduler:
    scheduler = make_scheduler(replace(WIDE, **limits))  # type: ignore[arg-type]
    drafting = Drafting(FixedProposer, budget or EagerBudget(), num_ahead)
    return Scheduler(scheduler.limits, scheduler.pool, drafting)


def offer(scheduler: Scheduler, name: str, prompt: Sequence[int], max_tokens: int = 20, max_drafts: int = 7) -> Request:
    sequence = make_sequence(name, prompt, max_tokens=max_tokens)
    sequence.max_drafts = max_drafts
    assert scheduler.offer(sequence) is None
    return sequence


def drafts_of(plan: StepPlan) -> dict[str, int]:
    """The number of drafts of each row."""
    return {row.sequence.request_id: len(row.drafts) for row in plan.rows}


def retire(scheduler: Scheduler, plan: StepPlan, *sampled_ids: int) -> list[tuple[int, int]]:
    """Retires a plan and returns offsets and ids of its tokens."""
    tokens = scheduler.update(StepResult(plan, sampled_ids)).tokens
    scheduler.check()
    return list(zip(tokens.offsets, tokens.token_ids, strict=True))


def test_row_yields_the_drafts_that_are_right_and_one_token_more() -> None:
    scheduler = drafting_scheduler()
    sequence = offer(scheduler, "a", [7, 0])
    assert retire(scheduler, scheduler.schedule(terms=CHEAP), 3) == [(0, 3)]

    plan = scheduler.schedule(terms=CHEAP)

    assert (drafts_of(plan), plan.num_decodes, plan.num_tokens, plan.num_sampled) == ({"a": 7}, 0, 8, 8)
    assert retire(scheduler, plan, 1, 1, 5, 1, 1, 1, 1, 1) == [(1, 1), (2, 1), (3, 5)]
    assert sequence.token_ids == [7, 0, 3, 1, 1, 5]
    assert sequence.num_computed == 5
    assert scheduler.draft_counts.verified == (1,) * 7
    assert scheduler.draft_counts.accepted == (1, 1, 0, 0, 0, 0, 0)


def test_stop_token_ends_the_sequence_within_its_drafts() -> None:
    scheduler = drafting_scheduler()
    sequence = offer(scheduler, "a", [7, 0])
    retire(scheduler, scheduler.schedule(terms=CHEAP), STOP_ID - 1)
    plan = scheduler.schedule(terms=CHEAP)

    outcome = scheduler.update(StepResult(plan, (1, STOP_ID, *([1] * 6))))

    assert outcome.tokens.token_ids == [1, STOP_ID]
    assert [(event.reason, event.stop_token_id) for event in outcome.finished] == [(FinishReason.STOP_TOKEN, STOP_ID)]
    assert sequence.block_table == []
    scheduler.check_when_idle()


def test_drafts_end_one_token_before_the_sequence() -> None:
    scheduler = drafting_scheduler()
    offer(scheduler, "a", [7, 0], max_tokens=5)
    retire(scheduler, scheduler.schedule(terms=CHEAP), 3)
    plan = scheduler.schedule(terms=CHEAP)
    assert drafts_of(plan) == {"a": 3}

    outcome = scheduler.update(StepResult(plan, (1, 1, 1, 1)))

    assert outcome.tokens.offsets == [1, 2, 3, 4]
    assert [event.reason for event in outcome.finished] == [FinishReason.LENGTH]


def test_only_blocks_that_are_full_of_output_are_published() -> None:
    scheduler = drafting_scheduler()
    sequence = offer(scheduler, "a", [7, 0])
    retire(scheduler, scheduler.schedule(terms=CHEAP), 3)
    # Given a row over positions 2 to 9, of which 2 and 3 hold output
    plan = scheduler.schedule(terms=CHEAP)
    retire(scheduler, plan, 1, 0, 1, 1, 1, 1, 1, 1)

    table = sequence.block_table
    assert len(table) == 3
    assert [scheduler.pool.is_published(block) for block in table] == [True, False, False]
    assert sequence.num_computed == BLOCK_SIZE


def test_sequences_without_a_match_stay_one_step_ahead() -> None:
    scheduler = drafting_scheduler(budget=DraftBudget())
    for name in ("a", "b"):
        offer(scheduler, name, [0, 5])
    plans = [scheduler.schedule(terms=CHEAP), scheduler.schedule(terms=CHEAP)]
    for _ in range(5):
        assert retire(scheduler, plans.pop(0), 1, 1)
        plans.append(scheduler.schedule(terms=CHEAP))
        assert plans[-1].num_decodes == 2
        assert all(plans[-1].carries)


def test_sequence_with_a_draft_waits_for_its_step_and_the_others_go_ahead() -> None:
    scheduler = drafting_scheduler(num_ahead=0)
    offer(scheduler, "a", [7, 0])
    offer(scheduler, "b", [0, 5])
    first = scheduler.schedule(terms=CHEAP)
    second = scheduler.schedule(terms=CHEAP)
    assert drafts_of(second) == {"b": 0}
    retire(scheduler, first, 3, 3)
    third = scheduler.schedule(terms=CHEAP)
    # Behind the decodes, whatever the order of boarding.
    assert drafts_of(third) == {"b": 0, "a": 7}
    assert (third.carries, third.num_decodes) == ([True, False], 1)
    retire(scheduler, second, 4)
    fourth = scheduler.schedule(terms=CHEAP)
    assert drafts_of(fourth) == {"b": 0}


def test_no_decode_is_left_out_twice_in_a_row_by_a_wait_and_by_a_long_prompt() -> None:
    scheduler = drafting_scheduler(enable_chunked_context=False, max_num_tokens=8)
    offer(scheduler, "a", [7, 0])
    retire(scheduler, scheduler.schedule(terms=CHEAP), 3)
    offer(scheduler, "b", [0] * 5)
    plans = [scheduler.schedule(terms=CHEAP)]
    assert drafts_of(plans[0]) == {"a": 2, "b": 0}
    # Given a step without a, which waits for its drafts, and a prompt that fits beside no decode
    offer(scheduler, "c", [7, 0])
    offer(scheduler, "d", [0] * 20)
    plans.append(scheduler.schedule(terms=CHEAP))
    assert drafts_of(plans[1]) == {"b": 0, "c": 0}

    # When c would have to wait for the step in flight, and a would not
    retire(scheduler, plans[0], 5, 1, 1, 1)
    assert drafts_of(scheduler.schedule(terms=CHEAP)) == {}

    # Then the next step waits for both, and is the last before the prompt.
    retire(scheduler, plans[1], 1, 3)
    plan = scheduler.schedule(terms=CHEAP)
    assert drafts_of(plan) == {"a": 0, "b": 0, "c": 0}
    retire(scheduler, plan, 1, 1, 1)
    assert drafts_of(scheduler.schedule(terms=CHEAP)) == {"d": 0}


def test_step_waits_where_few_would_go_ahead() -> None:
    scheduler = drafting_scheduler(num_ahead=1)
    offer(scheduler, "a", [7, 0])
    offer(scheduler, "b", [0, 5])
    first = scheduler.schedule(terms=CHEAP)
    assert not scheduler.schedule(terms=CHEAP).rows
    retire(scheduler, first, 3, 3)
    assert drafts_of(scheduler.schedule(terms=CHEAP)) == {"b": 0, "a": 7}


def test_drafts_get_what_prompts_leave() -> None:
    scheduler = drafting_scheduler(max_num_tokens=8)
    offer(scheduler, "a", [7, 0])
    retire(scheduler, scheduler.schedule(terms=CHEAP), 3)
    offer(scheduler, "b", [0, 1, 2, 3])
    plan = scheduler.schedule(terms=CHEAP)
    assert drafts_of(plan) == {"a": 3, "b": 0}
    retire(scheduler, plan, 0, 1, 1, 1, 3)
    # A prompt that is cut leaves nothing, whatever cut it.
    offer(scheduler, "c", [0] * 20)
    plan = scheduler.schedule(PrefillAllowance(2), CHEAP)
    assert drafts_of(plan) == {"a": 0, "b": 0, "c": 0}


def test_step_with_drafts_keeps_to_the_longest_time() -> None:
    scheduler = drafting_scheduler()
    offer(scheduler, "a", [7, 0])
    retire(scheduler, scheduler.schedule(terms=CHEAP), 3)
    plan = scheduler.schedule(terms=DraftTerms(float, longest_s=4.0))
    assert drafts_of(plan) == {"a": 3}


@pytest.mark.parametrize(("wait_s", "waits", "num_drafts"), [(0.0, True, 7), (1.5, False, 7), (6.0, False, 0)])
def test_drafts_have_to_pay_for_the_waits_of_the_device(wait_s: float, waits: bool, num_drafts: int) -> None:
    scheduler = drafting_scheduler(budget=DraftBudget())
    offer(scheduler, "a", [7, 0])
    terms = replace(CHEAP, wait_s=wait_s)
    # All of the draft is expected to yield 2.1 tokens more.
    first = scheduler.schedule(terms=terms)
    second = scheduler.schedule(terms=terms)
    assert (not second.rows) is waits
    if second.rows:
        retire(scheduler, first, 3)
        retire(scheduler, second, 3)
    else:
        retire(scheduler, first, 3)
    assert drafts_of(scheduler.schedule(terms=terms)) == {"a": num_drafts}


def test_request_has_its_own_limit() -> None:
    scheduler = drafting_scheduler()
    offer(scheduler, "a", [7, 0], max_drafts=2)
    offer(scheduler, "b", [7, 0], max_drafts=0)
    retire(scheduler, scheduler.schedule(terms=CHEAP), 3, 3)
    assert drafts_of(scheduler.schedule(terms=CHEAP)) == {"b": 0, "a": 2}


def test_overcommitted_drafts_take_only_blocks_that_are_spare() -> None:
    scheduler = drafting_scheduler(policy=SchedulerPolicy.MAX_UTILIZATION)
    sequence = offer(scheduler, "a", [7, 0])
    retire(scheduler, scheduler.schedule(terms=CHEAP), 3)
    held = scheduler.pool.allocate(scheduler.pool.num_available - 2)
    assert held is not None
    # One block for each sequence on a seat and one more are not spare.
    assert drafts_of(scheduler.schedule(terms=CHEAP)) == {"a": 1}
    assert len(sequence.block_table) == 1


def test_row_without_a_number_ends_its_sequence_after_the_tokens_before_it() -> None:
    scheduler = drafting_scheduler()
    offer(scheduler, "a", [7, 0])
    retire(scheduler, scheduler.schedule(terms=CHEAP), 3)
    plan = scheduler.schedule(terms=CHEAP)
    outcome = scheduler.update(StepResult(plan, (1, 1, None, *([1] * 5))))
    assert outcome.tokens.token_ids == [1, 1]
    assert [event.reason for event in outcome.finished] == [FinishReason.ERROR]
    scheduler.check_when_idle()


def test_cancelled_row_yields_nothing() -> None:
    scheduler = drafting_scheduler()
    offer(scheduler, "a", [7, 0])
    retire(scheduler, scheduler.schedule(terms=CHEAP), 3)
    plan = scheduler.schedule(terms=CHEAP)
    assert scheduler.cancel("a", 1, FinishReason.CANCELLED) is None
    outcome = scheduler.update(StepResult(plan, (1,) * 8))
    assert not outcome.tokens.token_ids
    assert [event.reason for event in outcome.finished] == [FinishReason.CANCELLED]
    scheduler.check_when_idle()


class CountingProposer(FixedProposer):
    """Keeps the tokens with which each lookup of a test began."""

    lookups: ClassVar[list[list[int]]] = []

    def propose(self, limit: int) -> Draft:
        self.lookups.append(list(self._ids))
        return super().propose(limit)


class SwitchedBudget(EagerBudget):
    """Takes every draft when it is on, and none otherwise."""

    is_on = False

    def choose(self, drafts: Sequence[Draft], *others: Any) -> list[int]:
        return super().choose(drafts, *others) if self.is_on else [0] * len(drafts)


@pytest.mark.parametrize("num_ahead", [0, 1], ids=["step by step", "one step ahead"])
def test_steps_rest_from_lookups_where_no_draft_pays(num_ahead: int) -> None:
    CountingProposer.lookups.clear()
    limits = replace(WIDE, max_num_sequences=12, max_num_tokens=128, context_length=256)
    budget = SwitchedBudget()
    scheduler = Scheduler(limits, BlockPool(1024, BLOCK_SIZE), Drafting(CountingProposer, budget))
    sequences = {number: offer(scheduler, f"r{number}", [7, number], max_tokens=200) for number in range(12)}
    launched: deque[StepPlan] = deque()

    def lookups_of_steps(number: int) -> float:
        """Retires steps and returns the lookups per sequence meanwhile."""
        before = len(CountingProposer.lookups)
        for _ in range(number):
            while len(launched) <= num_ahead and (plan := scheduler.schedule(terms=CHEAP)).rows:
                launched.append(plan)
            plan = launched.popleft()
            retire(scheduler, plan, *[1] * plan.num_sampled)
        return (len(CountingProposer.lookups) - before) / len(sequences)

    assert lookups_of_steps(4) == pytest.approx(4, abs=1)
    assert lookups_of_steps(80) < 40

    budget.is_on = True
    lookups_of_steps(5)
    assert scheduler.draft_counts.num_accepted > 0
    ids = CountingProposer.lookups[-1]
    assert ids == sequences[ids[1]].token_ids[: len(ids)], "what came during the rest is read later"
    assert lookups_of_steps(4) >= 4


def test_class_batch_drafts_nothing_where_it_is_bounded() -> None:
    scheduler = drafting_scheduler()
    offer(scheduler, "batch", [7, 0]).priority = BATCH_PRIORITY
    retire(scheduler, scheduler.schedule(terms=CHEAP), 3)
    offer(scheduler, "other", [7, 0, 0])
    cost = StepCost(10.0, PrefillCost(0.01))
    for expected in ({"batch": 0, "other": 0}, {"batch": 0, "other": 7}):
        plan = scheduler.schedule(terms=CHEAP, step_cost=cost)
        assert drafts_of(plan) == expected
        retire(scheduler, plan, *[3] * plan.num_sampled)
    assert drafts_of(scheduler.schedule(terms=CHEAP))["batch"] == 7
