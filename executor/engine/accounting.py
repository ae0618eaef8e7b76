"""Accounts of what sequences use: shares of steps, time with a seat and with KV blocks, tokens. Pure; times are
arguments, integers in nanoseconds.

How a step is shared. The busy time of a step is divided by the tokens that it computes, drafts included, into equal
integer parts, and each row gets the part of each of its tokens. Three things are charged to the *system*, not to a
tenant: tokens that a sequence computes again (after a preemption, or because its output was begun elsewhere), rows of
a sequence that has ended before the step that was already in flight, and the remainder of the division, which is less
than a nanosecond per token. A step that failed has no busy time. So the shares of all sequences and of the system sum
to the busy time of all steps exactly.

Time with a seat and with blocks counts from boarding to the end or the preemption, whatever the sequence computes
meanwhile. Each sequence is charged for the blocks of its own table; a shared block counts for all that use it.

A sequence's figures go to its account (day, tenant, class, adapter name) when it ends and whenever totals are taken. An
account only grows, so that a total says more than all before it, whatever was lost in between.

The cost: one look-up per row of a step, and a pass over the sequences on seats each time totals are taken. Blocks and
seats are touched only when they change. Nothing depends on the length of a context.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from inflight.executor.scheduler.sequence import NewTokens, Resources, Sequence, StepPlan

INTERVAL_NS = 1_000_000_000
# Days of which the totals are kept and sent again: today and yesterday.
NUM_DAYS = 2
# Accounts of a day. Tenants beyond them share one account per class.
MAX_ACCOUNTS = 4096
OTHER_TENANTS = "(others)"


class Account(NamedTuple):
    """What is charged. `day` is in days since 1970-01-01, `priority` that of the sequence."""

    day: int
    tenant: str = ""
    priority: int = 0
    adapter_name: str = ""
    is_system: bool = False


class AccountTotal(NamedTuple):
    """What an account has used on its day since the start of the executor."""

    account: Account
    used: Resources


@dataclass(slots=True)
class _Charged:
    """A sequence that has boarded and not ended. `used` is not in its account yet, `before` is. Since `since_ns` it
    has had `num_blocks` blocks. Its first `num_paid` tokens have been computed or found, here or elsewhere. Of its
    output, `num_output` tokens are counted."""

    sequence: Sequence
    account: Account
    num_paid: int
    num_output: int
    since_ns: int
    has_seat: bool = False
    num_blocks: int = 0
    used: Resources = field(default_factory=Resources)
    before: Resources = field(default_factory=Resources)

    def accrue(self, now_ns: int) -> None:
        """Counts the time since the last call, and the output."""
        elapsed_ns = max(0, now_ns - self.since_ns)
        self.since_ns = now_ns
        if self.has_seat:
            self.used.seat_ns += elapsed_ns
        self.used.block_ns += elapsed_ns * self.num_blocks
        num_output = self.sequence.num_output_tokens
        self.used.output_tokens += num_output - self.num_output
        self.num_output = num_output


class Accounting:
    """The accounts of one executor. All calls come from the engine's thread."""

    def __init__(self, max_accounts: int = MAX_ACCOUNTS) -> None:
        self._max_accounts = max_accounts
        self._charged: dict[Sequence, _Charged] = {}
        # What has ended since the totals were last taken, and the system's part, by account without its day.
        self._ended: dict[Account, Resources] = {}
        self._system = Resources()
        self._totals: dict[Account, Resources] = {}
        self._day = 0
        self._taken_ns: int | None = None
        # Busy time of all steps.
        self.busy_ns = 0

    # Steps.

    def plan(self, plan: StepPlan, now_ns: int) -> None:
        """Follows the seats and blocks that a plan changes, at the time when it is made."""
        for sequence in plan.preempted:
            self.preempt(sequence, now_ns)
        for sequence in plan.boarded:
            self.board(sequence, now_ns)
        for sequence in plan.grown:
            self._grow(sequence, now_ns)

    def board(self, sequence: Sequence, now_ns: int) -> None:
        """Begins to count the time with a seat and blocks; what is found in the prefix cache counts the first time."""
        charged = self._charged.get(sequence) or self._begin(sequence, now_ns)
        charged.accrue(now_ns)
        charged.has_seat, charged.num_blocks = True, len(sequence.block_table)

    def count_prompt(self, sequence: Sequence) -> None:
        """Counts what is not cached of a prompt as computed, for an engine that does not tell its steps. Once, after
        `board`."""
        charged = self._charged[sequence]
        charged.used.computed_prompt_tokens += max(0, sequence.num_prompt_tokens - charged.num_paid)
        charged.num_paid = max(charged.num_paid, sequence.num_prompt_tokens)

    def charge(self, plan: StepPlan, tokens: NewTokens, busy_ns: int) -> None:
        """Shares the busy time of a step that has retired, and counts the tokens that it computed."""
        self.busy_ns += busy_ns
        num_decodes = plan.num_decodes
        part_ns, system_ns = divmod(busy_ns, max(1, plan.num_tokens))
        charged = self._charged
        for sequence in islice(plan.sequences, num_decodes):
            row = charged.get(sequence)
            if row is None:
                system_ns += part_ns
            else:
                row.used.busy_ns += part_ns
        if plan.num_rows > num_decodes:
            system_ns += self._charge_prompts(plan, tokens, part_ns)
        self._system.busy_ns += system_ns

    def end(self, sequence: Sequence, now_ns: int) -> None:
        """Closes a sequence that ends and sets its `used`."""
        charged = self._charged.pop(sequence, None)
        if charged is None:
            sequence.used = sequence.used or Resources()
            return
        charged.accrue(now_ns)
        self._ended.setdefault(charged.account, Resources()).add(charged.used)
        charged.before.add(charged.used)
        sequence.used = charged.before

    def _charge_prompts(self, plan: StepPlan, tokens: NewTokens, part_ns: int) -> int:
        """Charges the rows that verify drafts or compute prompts. Returns the system's part."""
        system_ns = 0
        num_new = Counter(tokens.sequences) if plan.drafts else Counter[Sequence]()
        for row in range(plan.num_decodes, plan.num_rows):
            sequence, start, length = plan.sequences[row], plan.starts[row], plan.lengths[row]
            charged = self._charged.get(sequence)
            if charged is None:
                system_ns += part_ns * length
                continue
            num_drafts = len(plan.drafts.get(row, ()))
            end, num_paid = start + length - num_drafts, charged.num_paid
            num_again = max(0, min(end, num_paid) - start)
            used = charged.used
            used.busy_ns += part_ns * (length - num_again)
            system_ns += part_ns * num_again
            used.recomputed_tokens += num_again
            used.computed_prompt_tokens += max(0, min(end, sequence.num_prompt_tokens) - max(start, num_paid))
            if num_drafts:
                used.wasted_draft_tokens += num_drafts - max(0, num_new[sequence] - 1)
            charged.num_paid = max(num_paid, end)
        return system_ns

    def _begin(self, sequence: Sequence, now_ns: int) -> _Charged:
        num_output, num_prompt = sequence.num_output_tokens, sequence.num_prompt_tokens
        # Output of earlier placements: all but its last token had KV there.
        num_paid = num_prompt + num_output - 1 if num_output else 0
        charged = self._charged[sequence] = _Charged(sequence, _account_of(sequence), num_paid, num_output, now_ns)
        num_found = sequence.num_cached_tokens
        charged.used.cached_prompt_tokens = max(0, min(num_found, num_prompt) - num_paid)
        charged.num_paid = max(num_paid, num_found)
        return charged

    def _grow(self, sequence: Sequence, now_ns: int) -> None:
        charged = self._charged.get(sequence)
        if charged is not None:
            charged.accrue(now_ns)
            charged.num_blocks = len(sequence.block_table)

    def preempt(self, sequence: Sequence, now_ns: int) -> None:
        """Ends the time with a seat and blocks, until the sequence boards again."""
        charged = self._charged.get(sequence)
        if charged is not None:
            charged.accrue(now_ns)
            charged.has_seat, charged.num_blocks = False, 0
            charged.num_paid = max(charged.num_paid, sequence.num_lost_tokens)

    # Totals.

    def is_due(self, now_ns: int) -> bool:
        """Whether totals have not been taken for `INTERVAL_NS`."""
        return self._taken_ns is None or now_ns - self._taken_ns >= INTERVAL_NS

    def take(self, now_ns: int, day: int) -> tuple[AccountTotal, ...]:
        """Books everything up to now on the day, and returns the totals of the accounts that have grown. A day before
        that of the last call counts as that one."""
        self._taken_ns = now_ns
        if day > self._day:
            self._day = day
            self._totals = {one: used for one, used in self._totals.items() if one.day > day - NUM_DAYS}
        grown, self._ended = self._ended, {}
        for charged in self._charged.values():
            charged.accrue(now_ns)
            used, charged.used = charged.used, Resources()
            charged.before.add(used)
            if (total := grown.get(charged.account)) is None:
                grown[charged.account] = used
            else:
                total.add(used)
        system, self._system = self._system, Resources()
        grown[_SYSTEM] = system
        return tuple(self._book(account, used) for account, used in grown.items() if used != _NOTHING)

    def _book(self, account: Account, used: Resources) -> AccountTotal:
        account = account._replace(day=self._day)
        if account not in self._totals and len(self._totals) >= self._max_accounts and not account.is_system:
            account = account._replace(tenant=OTHER_TENANTS, adapter_name="")
        total = self._totals.setdefault(account, Resources())
        total.add(used)
        return AccountTotal(account, replace(total))


_NOTHING = Resources()
_SYSTEM = Account(0, is_system=True)


def _account_of(sequence: Sequence) -> Account:
    """Returns the account of a sequence, without its day."""
    return Account(0, sequence.tenant, sequence.priority, sequence.adapter_name)
