"""Conservation of what sequences are charged for, whatever the scheduler does: preemption, drafts, failed steps, ends
in flight, output that was begun elsewhere."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import settings

from inflight.executor.engine.accounting import Account, Accounting, AccountTotal
from inflight.executor.scheduler.sequence import NewTokens, Resources, Sequence, StepOutcome, StepPlan, StepResult
from tests.property.scheduler_machine import SchedulerMachine
from tests.support.examples import examples

STEP_NS = 997
NAMES = tuple(one.name for one in fields(Resources))


class Oracle:
    """Counts position by position."""

    def __init__(self) -> None:
        # Positions that need not be paid for: computed or found, here or elsewhere.
        self.known: dict[Sequence, set[int]] = {}
        self.ended: set[Sequence] = set()
        self.totals = dict.fromkeys(("busy_ns", "system_ns", "again", "prompt", "cached", "output", "wasted"), 0)

    def board(self, sequence: Sequence) -> None:
        """Takes note of what a sequence finds when it boards for the first time."""
        if sequence in self.known:
            return
        prior = sequence.num_output_tokens
        self.known[sequence] = set(range(sequence.num_prompt_tokens + prior - 1)) if prior else set()
        found = set(range(sequence.num_cached_tokens)) - self.known[sequence]
        self.totals["cached"] += sum(position < sequence.num_prompt_tokens for position in found)
        self.known[sequence] |= found

    def charge(self, plan: StepPlan, tokens: NewTokens, busy_ns: int) -> None:
        """Divides a step."""
        totals = self.totals
        totals["busy_ns"] += busy_ns
        totals["output"] += len(tokens)
        part_ns, rest_ns = divmod(busy_ns, plan.num_tokens)
        totals["system_ns"] += rest_ns
        for row in plan.rows:
            if row.sequence in self.ended:
                totals["system_ns"] += part_ns * row.num_tokens
                continue
            num_accepted = max(0, tokens.sequences.count(row.sequence) - 1) if row.drafts else 0
            known = self.known[row.sequence]
            computed = set(range(row.start, row.start + row.num_tokens - len(row.drafts)))
            totals["again"] += len(computed & known)
            totals["system_ns"] += part_ns * len(computed & known)
            totals["prompt"] += sum(position < row.sequence.num_prompt_tokens for position in computed - known)
            totals["wasted"] += len(row.drafts) - num_accepted
            end = row.start + row.num_tokens - len(row.drafts) + num_accepted
            known |= set(range(row.start, end))


class AccountingMachine(SchedulerMachine):
    """The scheduler's machine, with accounts. Time passes with each step, which is busy all the time."""

    def _accounts(self) -> tuple[Accounting, Oracle]:
        if not hasattr(self, "accounting"):
            self.accounting, self.oracle = Accounting(), Oracle()
            self.now_ns, self.num_taken = 0, 0
            self.totals: dict[Account, Resources] = {}
            schedule, update, fail = self.scheduler.schedule, self.scheduler.update, self.scheduler.fail

            def planned(*args: object) -> StepPlan:
                plan = schedule(*args)  # type: ignore[arg-type]
                self.accounting.plan(plan, self.now_ns)
                for sequence in plan.boarded:
                    self.oracle.board(sequence)
                return plan

            def updated(result: StepResult) -> StepOutcome:
                outcome = update(result)
                self._charge(result.plan, outcome.tokens, STEP_NS)
                return outcome

            def failed(plan: StepPlan, error: str) -> StepOutcome:
                outcome = fail(plan, error)
                self._charge(plan, outcome.tokens, 0)
                return outcome

            for name, wrapped in (("schedule", planned), ("update", updated), ("fail", failed)):
                setattr(self.scheduler, name, wrapped)
        return self.accounting, self.oracle

    def _charge(self, plan: StepPlan, tokens: NewTokens, busy_ns: int) -> None:
        self.now_ns += STEP_NS
        self.accounting.charge(plan, tokens, busy_ns)
        self.oracle.charge(plan, tokens, busy_ns)

    def _schedule(self) -> None:
        self._accounts()
        super()._schedule()

    def _receive(self, outcome: StepOutcome) -> None:
        super()._receive(outcome)
        accounting, oracle = self._accounts()
        for event in outcome.finished:
            accounting.end(event.sequence, self.now_ns)
            oracle.ended.add(event.sequence)
        self._take(accounting.take(self.now_ns, day=1 + self.num_taken // 50))

    def _take(self, taken: tuple[AccountTotal, ...]) -> None:
        self.num_taken += 1
        for account, used in taken:
            before = self.totals.get(account, Resources())
            assert all(getattr(used, name) >= getattr(before, name) for name in NAMES), "a total has shrunk"
            self.totals[account] = used

    def teardown(self) -> None:
        """Compares with the oracle at the end."""
        super().teardown()
        if not hasattr(self, "accounting"):
            return
        self._take(self.accounting.take(self.now_ns, day=1 + self.num_taken // 50))
        tenants, system = Resources(), Resources()
        for account, used in self.totals.items():
            (system if account.is_system else tenants).add(used)
        expected = self.oracle.totals
        assert tenants.busy_ns + system.busy_ns == expected["busy_ns"] == self.accounting.busy_ns
        assert system == Resources(busy_ns=expected["system_ns"])
        assert tenants.recomputed_tokens == expected["again"]
        assert tenants.computed_prompt_tokens == expected["prompt"]
        assert tenants.cached_prompt_tokens == expected["cached"]
        assert tenants.output_tokens == expected["output"]
        assert tenants.wasted_draft_tokens == expected["wasted"]
        assert tenants.seat_ns <= self.now_ns * self.limits.max_num_sequences * 2
        ends = [sequence.used for sequence in self.expectations if sequence.used is not None]
        of_sequences = Resources()
        for used in ends:
            of_sequences.add(used)
        assert len(ends) == len(self.expectations)
        assert of_sequences == tenants


TestAccountingMachine = AccountingMachine.TestCase
TestAccountingMachine.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
