"""What sequences are charged for: shares of steps, seats, blocks and tokens."""

from __future__ import annotations

from dataclasses import astuple, replace

from inflight.executor.engine.accounting import OTHER_TENANTS, Account, Accounting, AccountTotal
from inflight.executor.scheduler.limits import Overcommit
from inflight.executor.scheduler.scheduler import Scheduler, SchedulerPolicy
from inflight.executor.scheduler.sequence import FinishReason, NewTokens, Resources, Sequence, StepOutcome, StepPlan
from tests.support.scheduler.scheduling import LIMITS, STOP_ID, make_scheduler, make_sequence, retire

STEP_NS = 1_000_000
BUSY_NS = 100


class Executor:
    """A scheduler with accounts, on which every step takes a millisecond, a ten-thousandth of it busy."""

    def __init__(self, scheduler: Scheduler | None = None, max_accounts: int = 100) -> None:
        self.scheduler = scheduler or make_scheduler()
        self.accounting = Accounting(max_accounts)
        self.now_ns = 0
        self.totals: dict[Account, Resources] = {}

    def offer(self, *sequences: Sequence) -> None:
        """Accepts them."""
        for sequence in sequences:
            assert self.scheduler.offer(sequence) is None

    def plan(self) -> StepPlan:
        """Plans a step."""
        plan = self.scheduler.schedule()
        self.accounting.plan(plan, self.now_ns)
        self._end(StepOutcome(NewTokens(), self.scheduler.take_finished()))
        return plan

    def retire(self, plan: StepPlan, token_id: int = 1, busy_ns: int = BUSY_NS) -> None:
        """Retires a step, of which each row that samples yields the token."""
        self.now_ns += STEP_NS
        outcome = retire(self.scheduler, plan, token_id)
        self.accounting.charge(plan, outcome.tokens, busy_ns)
        self._end(outcome)

    def step(self, token_id: int = 1, busy_ns: int = BUSY_NS) -> None:
        """Plans a step and retires it, if it has rows."""
        plan = self.plan()
        if plan.sequences:
            self.retire(plan, token_id, busy_ns)

    def take(self, day: int = 7) -> tuple[AccountTotal, ...]:
        """Takes the totals that have grown."""
        taken = self.accounting.take(self.now_ns, day)
        self.totals.update(taken)
        return taken

    def used(self, tenant: str, day: int = 7) -> Resources:
        """What a tenant has used on a day."""
        mine = [
            used for one, used in self.totals.items() if (one.tenant, one.day) == (tenant, day) and not one.is_system
        ]
        total = Resources()
        for used in mine:
            total.add(used)
        return total

    def system(self, day: int = 7) -> Resources:
        """What no tenant is charged for."""
        return self.totals.get(Account(day, is_system=True), Resources())

    def _end(self, outcome: StepOutcome) -> None:
        for event in outcome.finished:
            self.accounting.end(event.sequence, self.now_ns)


def sequence_of(tenant: str, num_prompt_tokens: int = 2, max_tokens: int = 4) -> Sequence:
    sequence = make_sequence(tenant, range(num_prompt_tokens), salt=None, max_tokens=max_tokens)
    sequence.tenant = tenant
    return sequence


def test_step_is_shared_by_the_tokens_of_its_rows_and_the_rest_is_the_systems() -> None:
    executor = Executor()
    executor.offer(sequence_of("a", 5), sequence_of("b", 2))

    executor.step(busy_ns=703)
    executor.take()

    assert (executor.used("a").busy_ns, executor.used("b").busy_ns, executor.system().busy_ns) == (500, 200, 3)
    assert executor.used("a").computed_prompt_tokens == 5
    assert (executor.used("a").output_tokens, executor.used("b").output_tokens) == (1, 1)


def test_seat_and_blocks_count_from_boarding_to_the_end() -> None:
    executor = Executor()
    executor.offer(sequence := sequence_of("a", 6, max_tokens=3))

    for _ in range(3):
        executor.step()
    executor.take()

    # Two blocks of four tokens for the first two steps, a third one for the last.
    used = executor.used("a")
    assert used.seat_ns == 3 * STEP_NS
    assert used.block_ns == sum(blocks * STEP_NS for blocks in (2, 2, 2))
    assert sequence.used == used


def test_row_of_a_sequence_that_has_ended_is_the_systems() -> None:
    executor = Executor()
    executor.offer(sequence := sequence_of("a"))
    executor.step()

    first, second = executor.plan(), executor.plan()
    executor.retire(first, STOP_ID)
    used = sequence.used
    executor.retire(second)
    executor.take()

    assert used == executor.used("a")
    assert used is not None
    assert used.busy_ns == 2 * BUSY_NS
    assert executor.system().busy_ns == BUSY_NS


def test_tokens_that_are_computed_again_after_a_failure_are_the_systems() -> None:
    executor = Executor()
    continued = make_sequence("a", range(4), prior_output=[1, 1, 1], max_tokens=5, salt=None)
    executor.offer(continued)

    executor.step(busy_ns=700)
    executor.take()

    used = executor.used("")
    # The last token of the output had no KV on the executor before.
    assert (used.busy_ns, executor.system().busy_ns) == (100, 600)
    assert (used.recomputed_tokens, used.computed_prompt_tokens, used.output_tokens) == (6, 0, 1)


def test_cached_prompt_tokens_are_counted_and_not_computed() -> None:
    executor = Executor()
    for name in ("a", "b"):
        executor.offer(make_sequence(name, range(9), max_tokens=1))
        for _ in range(2):
            executor.step()
    executor.take()

    used = executor.used("")
    assert used.cached_prompt_tokens == 8
    assert used.computed_prompt_tokens == 9 + 1


def test_preempted_sequence_has_no_seat_and_is_not_charged_for_what_is_computed_again() -> None:
    limits = replace(LIMITS, policy=SchedulerPolicy.MAX_UTILIZATION, overcommit=Overcommit(watermark=0.0, margin=0.0))
    executor = Executor(make_scheduler(limits, num_blocks=5))
    sequences = [sequence_of(name, 4, max_tokens=12) for name in ("a", "b")]
    for sequence in sequences:
        sequence.num_reserved_blocks = 2
    executor.offer(*sequences)

    num_steps = 0
    while not executor.scheduler.is_idle:
        executor.step()
        num_steps += 1
    executor.take()

    used = [executor.used(name) for name in ("a", "b")]
    assert executor.scheduler.num_preemptions > 0
    assert sum(one.recomputed_tokens for one in used) == executor.scheduler.num_recomputed_tokens > 0
    assert [one.computed_prompt_tokens for one in used] == [4, 4]
    assert [one.output_tokens for one in used] == [12, 12]
    assert sum(one.seat_ns for one in used) < 2 * num_steps * STEP_NS
    assert sum(one.busy_ns for one in used) + executor.system().busy_ns == num_steps * BUSY_NS


def test_sequence_that_never_boarded_has_used_nothing() -> None:
    executor = Executor()
    executor.offer(sequence := sequence_of("a"))

    event = executor.scheduler.cancel("a", 1, FinishReason.CANCELLED)
    assert event is not None
    executor.accounting.end(sequence, executor.now_ns)

    assert sequence.used == Resources()
    assert executor.take() == ()


def test_totals_grow_and_only_those_that_changed_are_taken() -> None:
    executor = Executor()
    executor.offer(sequence_of("a", max_tokens=8), sequence_of("b", max_tokens=1))
    executor.step()
    assert {one.account.tenant for one in executor.take()} == {"a", "b"}

    before = executor.used("a")
    executor.step()
    taken = executor.take()

    assert [one.account.tenant for one in taken] == ["a"]
    assert all(new >= old for new, old in zip(astuple(executor.used("a")), astuple(before), strict=True))
    assert executor.take() == ()


def test_usage_is_booked_on_the_day_on_which_it_is_taken_and_days_never_go_back() -> None:
    executor = Executor()
    executor.offer(sequence_of("a", max_tokens=8))
    executor.step()
    executor.take(day=7)
    executor.step()
    executor.take(day=8)
    executor.step()
    executor.take(day=7)

    assert executor.used("a", 7).output_tokens == 1
    assert executor.used("a", 8).output_tokens == 2


def test_tenants_beyond_the_limit_share_an_account() -> None:
    executor = Executor(max_accounts=1)
    executor.offer(sequence_of("a", max_tokens=1), sequence_of("b", max_tokens=1))
    executor.step()
    executor.step()
    executor.take()

    assert executor.used("a").output_tokens + executor.used(OTHER_TENANTS).output_tokens == 2
    assert executor.used("b") == Resources()
