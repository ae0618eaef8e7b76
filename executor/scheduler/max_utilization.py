"""max_utilization: more is promised than there is, so now and then somebody gives up its blocks and comes back later.

Who boards gets the blocks of all its known tokens and of the next one at once; from then on only decodes grow, a block
at a time. When the next ones are not there, victims are chosen until they are. A victim that no step in flight has a
row of gives its blocks up for the step that is being planned, its KV swapped out ahead of it where that is cheaper than
computing it again. Any other pauses: it is in no further step, and gives them up once its last step has retired,
unless they are not needed any more. Who would need a block in between skips that step.

Ping-pong is impossible, because nobody comes back without a block of room for everyone who runs: then at least a whole
block of tokens is generated between one comeback and the next preemption. Nobody new boards before the preempted are
back and a margin is free.

The executor also reports a quantile (`ReserveController`): routers reserve so much output that a sequence stays within
it with that likelihood. Too low, and sequences are preempted and computed again; too high, and blocks stand empty. So
the quantile follows the share of tokens that are computed more than once. Where that hurts, it is 1 for a while (as
under guaranteed_no_evict), twice as long every time that it happens again soon after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

from executor.scheduler.blocks import BlockPool, HostBlocks
from executor.scheduler.limits import SchedulerLimits
from executor.scheduler.plan_builder import StepDraft
from executor.scheduler.preemption import (
    Candidate,
    PreemptedKv,
    choose_victim,
    is_swap_cheaper,
    recompute_cost,
    swap_cost,
)
from executor.scheduler.prefix_cache import PrefixCache
from executor.scheduler.queues import SequenceQueues
from executor.scheduler.sequence import HostCopy, Restored, Sequence

LEAST_QUANTILE = 0.5


@dataclass(frozen=True, slots=True)
class ReserveRules:
    """Shares are of the tokens computed; the shares are taken over `window_tokens`, more than the longest sequence that
    is usually lost at once. `target` is what overcommitting may cost; below half of it the quantile sinks by `sink`,
    above it half of what is missing to 1 is added. Above `unbearable` there is a fallback for `hold_tokens`."""

    first: float = 0.9
    target: float = 0.02
    unbearable: float = 0.10
    sink: float = 0.01
    window_tokens: int = 16_384
    hold_tokens: int = 65_536
    most_hold_tokens: int = 4_194_304


class ReserveController:
    """Takes in what is computed, as totals since the start: the sums of the windows that it judges."""

    def __init__(self, rules: ReserveRules | None = None) -> None:
        self._rules = rules or ReserveRules()
        self._bearable = self._rules.first
        self._num_computed = 0
        self._num_recomputed = 0
        self._num_held_tokens = 0
        self._hold_tokens = self._rules.hold_tokens

    @property
    def is_holding(self) -> bool:
        """Whether it has fallen back."""
        return self._num_held_tokens > 0

    @property
    def quantile(self) -> float:
        """How likely output should be to stay within what is reserved for it."""
        return 1.0 if self.is_holding else self._bearable

    def observe(self, num_computed: int, num_recomputed: int) -> None:
        """So many tokens were computed since the start, so many of them once more."""
        num_tokens = num_computed - self._num_computed
        if num_tokens >= self._rules.window_tokens:
            self._judge((num_recomputed - self._num_recomputed) / num_tokens, num_tokens)
            self._num_computed, self._num_recomputed = num_computed, num_recomputed

    def _judge(self, share: float, num_tokens: int) -> None:
        rules = self._rules
        if self.is_holding:
            # Those who board now are promised all that they need; what is still lost was promised before.
            self._num_held_tokens = max(0, self._num_held_tokens - num_tokens)
        elif share > rules.unbearable:
            self._bearable += (1 - self._bearable) / 2
            self._num_held_tokens = self._hold_tokens
            self._hold_tokens = min(2 * self._hold_tokens, rules.most_hold_tokens)
        elif share > rules.target:
            self._bearable += (1 - self._bearable) / 2
        elif share < rules.target / 2:
            self._bearable = max(LEAST_QUANTILE, self._bearable - rules.sink)
            # A window well below the target makes the next fallback shorter again, slowly.
            self._hold_tokens = max(rules.hold_tokens, self._hold_tokens - num_tokens)


class MaxUtilization:
    """See `KvPolicy`."""

    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, prefix_cache: PrefixCache, queues: SequenceQueues
    ) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._queues = queues
        self._host = HostBlocks(limits.num_host_blocks)
        self._cost = limits.overcommit.cost
        self._max_steps_away = limits.overcommit.max_steps_away
        self._num_watermark_blocks = math.ceil(limits.overcommit.watermark * pool.num_blocks)
        self._num_margin_blocks = math.ceil(limits.overcommit.margin * pool.num_blocks)
        self._last_victim: Sequence | None = None
        # Whether nobody new may board, because somebody was preempted.
        self._holds_line = False
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    # Who goes on.

    def decodes(self, draft: StepDraft) -> Iterable[Sequence]:
        """Everyone who has its block or gets it. Usually that is clear without looking at anybody."""
        queues, pool = self._queues, self._pool
        if not queues.pausing and pool.num_available >= len(queues.decodes):
            return queues.decodes
        block_size = pool.block_size
        growing = {s: None for s in queues.decodes if s.num_computed >= len(s.block_table) * block_size}
        self._settle_pausing(growing, draft)
        num_missing = len(growing) - pool.num_available - self._num_coming_blocks()
        while num_missing > 0 and (victim := self._choose_victim(num_missing)) is not None:
            num_missing -= self._preempt_one(victim, growing, num_missing, draft)
        if len(growing) <= pool.num_available:
            return queues.decodes
        skipping = set(islice(growing, pool.num_available, None))
        return [sequence for sequence in queues.decodes if sequence not in skipping]

    def _settle_pausing(self, growing: dict[Sequence, None], draft: StepDraft) -> None:
        """Who was to give up its seat does so once no step in flight has a row of it, or goes on after all."""
        block_size = self._pool.block_size
        for sequence in [s for s in self._queues.pausing if s.num_in_flight == 0]:
            grows = sequence.num_computed >= len(sequence.block_table) * block_size
            num_coming_blocks = self._num_coming_blocks() - self._num_own_blocks(sequence)
            if len(growing) + grows <= self._pool.num_available + num_coming_blocks:
                self._queues.resume(sequence)
                if grows:
                    growing[sequence] = None
            else:
                self._preempt(sequence, len(growing), draft)

    def _num_coming_blocks(self) -> int:
        """Blocks that the steps in flight give back when they retire."""
        giving = chain(self._queues.pausing, self._queues.ending, self._queues.leaving)
        return sum(self._num_own_blocks(sequence) for sequence in giving)

    def _num_own_blocks(self, sequence: Sequence) -> int:
        """At least the last block of a table is its own."""
        num_shared = min(sequence.num_cached_tokens // self._pool.block_size, len(sequence.block_table) - 1)
        return max(0, len(sequence.block_table) - num_shared)

    def _preempt_one(self, victim: Sequence, growing: dict[Sequence, None], num_missing: int, draft: StepDraft) -> int:
        """Returns how many fewer blocks are missing, now or once the victim's last step has retired."""
        num_fewer = int(victim in growing)
        growing.pop(victim, None)
        self._last_victim = victim
        self._holds_line = True
        self._queues.pause(victim)
        if victim.num_in_flight > 0:
            return num_fewer + self._num_own_blocks(victim)
        num_available = self._pool.num_available
        self._preempt(victim, num_missing, draft)
        return num_fewer + self._pool.num_available - num_available

    def _choose_victim(self, num_missing: int) -> Sequence | None:
        """None where no sequence is on a seat. Alone each fits to its end, the gate made sure; and who is left grows by
        what the others give up."""
        candidates = [
            Candidate(sequence, self._cost_of(sequence, num_missing))
            for sequence in chain(self._queues.decodes, self._queues.prefills)
        ]
        return choose_victim(candidates, self._last_victim)

    def _kept(self, sequence: Sequence, num_missing: int) -> PreemptedKv:
        is_published = self._prefix_cache.is_open_to(sequence)
        num_wanted = num_missing + self._num_headroom_blocks()
        return PreemptedKv.of(sequence, self._pool.block_size, num_wanted, is_published=is_published)

    def _cost_of(self, sequence: Sequence, num_missing: int) -> float:
        kept, block_size = self._kept(sequence, num_missing), self._pool.block_size
        if is_swap_cheaper(kept, block_size, self._cost, self._host.num_free):
            return swap_cost(kept, block_size, self._cost)
        return recompute_cost(kept, self._cost)

    # Away and back.

    def _preempt(self, sequence: Sequence, num_missing: int, draft: StepDraft) -> None:
        """Takes seat and blocks from who is pausing."""
        if sequence.num_in_flight > 0:
            draft.broken[sequence] = "it was to give up blocks that a step in flight writes to"
            return
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.num_steps_away = 0
        sequence.num_lost_tokens = sequence.num_computed
        kept = self._kept(sequence, num_missing)
        if is_swap_cheaper(kept, self._pool.block_size, self._cost, self._host.num_free):
            self._swap_out(sequence, draft)
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        self._queues.preempt(sequence)
        draft.preempted.append(sequence)

    def _swap_out(self, sequence: Sequence, draft: StepDraft) -> None:
        """All blocks that nobody else refers to, up to the newest position; not if there is no room for that after
        all."""
        table = sequence.block_table[: -(-sequence.num_computed // self._pool.block_size)]
        first = next((i for i, block in enumerate(table) if self._pool.num_references(block) == 1), len(table))
        host_blocks = self._host.allocate(len(table) - first)
        if not host_blocks:
            return
        sequence.host_copy = HostCopy(first, host_blocks, sequence.num_computed)
        draft.swaps_out += zip(table[first:], host_blocks, strict=True)
        draft.swapped.append(sequence)

    def take(self, sequence: Sequence, draft: StepDraft) -> bool:
        """See `KvPolicy`. Beside others a sequence boards only if room is left over."""
        is_back = sequence in self._queues.preempted
        is_alone = not self._queues.num_boarded
        if not is_back and not self._may_board_anew(sequence, is_alone):
            return False
        # Who was preempted needs room for everyone to go on; who is new must leave the watermark.
        num_to_spare = 0 if is_alone else self._num_headroom_blocks() if is_back else self._num_watermark_blocks
        if self._pool.num_available <= num_to_spare:
            return False
        self._prefix_cache.attach(sequence)
        num_missing = self._num_blocks_for(sequence) - len(sequence.block_table)
        if num_missing + num_to_spare > self._pool.num_available:
            self.release_blocks(sequence)
            return False
        blocks = self._pool.allocate(num_missing)
        if blocks is None:
            self.release_blocks(sequence)
            return False
        num_found = len(sequence.block_table)
        sequence.block_table.extend(blocks)
        if is_back:
            self._come_back(sequence, num_found, draft)
        return True

    def _come_back(self, sequence: Sequence, num_found: int, draft: StepDraft) -> None:
        """Fills in what the prefix cache did not have from host memory, if that closes the gap."""
        copy = sequence.host_copy
        if copy is not None:
            if copy.first_index <= num_found and copy.num_computed > sequence.num_computed:
                host_blocks = copy.host_blocks[num_found - copy.first_index :]
                draft.swaps_in += zip(host_blocks, sequence.block_table[num_found:], strict=False)
                draft.swapped.append(sequence)
                start, blocks = num_found * self._pool.block_size, sequence.block_table[num_found:]
                draft.restored.append(Restored(sequence, start, copy.num_computed, tuple(blocks[: len(host_blocks)])))
                sequence.num_computed = copy.num_computed
            self._drop_copy(sequence)
        self.num_recomputed_tokens += max(0, sequence.num_lost_tokens - sequence.num_computed)

    def _num_blocks_for(self, sequence: Sequence) -> int:
        """Its known tokens and the next."""
        return sequence.num_tokens // self._pool.block_size + 1

    def _num_headroom_blocks(self) -> int:
        """A block for everyone, with who comes back."""
        return max(self._num_watermark_blocks, self._queues.num_seated + 1)

    def _may_board_anew(self, sequence: Sequence, is_alone: bool) -> bool:
        """Whether neither a preempted sequence nor what was promised to those on their seats stands against it."""
        if self._queues.preempted or self._queues.pausing:
            return False
        if is_alone:
            self._holds_line = False
            return True
        if self._holds_line:
            if self._pool.num_available < self._num_watermark_blocks + self._num_margin_blocks:
                return False
            self._holds_line = False
        num_promised = sum(max(s.num_reserved_blocks, len(s.block_table)) for s in self._queues.boarded())
        num_free = self._pool.num_blocks - self._num_watermark_blocks - num_promised
        return sequence.num_reserved_blocks <= num_free

    def overdue(self) -> list[Sequence]:
        """See `KvPolicy`."""
        away = self._queues.preempted
        for sequence in away:
            sequence.num_steps_away += 1
        return [sequence for sequence in away if sequence.num_steps_away > self._max_steps_away]

    # Giving back.

    def release(self, sequence: Sequence) -> None:
        """See `KvPolicy`."""
        self.release_blocks(sequence)
        self._drop_copy(sequence)
        if sequence is self._last_victim:
            self._last_victim = None

    def release_blocks(self, sequence: Sequence) -> None:
        """On the device, that is."""
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0

    def _drop_copy(self, sequence: Sequence) -> None:
        """Of two copies in one step the one out comes first; so what is read here can be overwritten by the next."""
        if sequence.host_copy is not None:
            self._host.release(sequence.host_copy.host_blocks)
            sequence.host_copy = None

    # How it stands.

    @property
    def num_overrun_blocks(self) -> int:
        """See `KvPolicy`."""
        queues = self._queues
        num_used = sum(max(0, len(s.block_table) - s.num_reserved_blocks) for s in queues.boarded())
        return num_used + sum(max(0, self._num_blocks_for(s) - s.num_reserved_blocks) for s in queues.preempted)

    def budget_blocks(self, num_reserved_blocks: int) -> int:
        """Less the watermark while anybody is here, and while the line is held no more than what is promised."""
        if not num_reserved_blocks:
            return self._pool.num_blocks
        num_blocks = max(0, self._pool.num_blocks - self._num_watermark_blocks - self.num_overrun_blocks)
        return min(num_blocks, num_reserved_blocks) if self._holds_line else num_blocks

    @property
    def num_used_host_blocks(self) -> int:
        """See `KvPolicy`."""
        return self._host.num_used

    def check(self) -> None:
        """Asserts that each host block is free or in one copy, and that only the preempted have any."""
        copies = [s.host_copy.host_blocks for s in self._queues.preempted if s.host_copy is not None]
        self._host.check(copies)
