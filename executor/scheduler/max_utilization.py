"""The max_utilization policy: sequences may need more blocks than exist, and some are preempted when blocks run out.

A sequence that boards gets the blocks of all its known tokens and of the next one at once. From then on only decodes
grow, a block at a time. When blocks are missing, victims are chosen until there are enough. A victim without a row in
flight gives its blocks up for the step that is being planned. Its KV is swapped out before that step where that is
cheaper than computing it again. Any other victim pauses: it is in no further step and gives its blocks up once its last
step has retired, unless they are not needed any more. A sequence that needs a block in the meantime skips the step.

Thrashing is impossible, because a preempted sequence boards again only if every running sequence could get one more
block. So at least a whole block of tokens is generated between that boarding and the next preemption. No new sequence
boards before the preempted ones are back and a margin is free.

The executor also reports a quantile (`ReserveController`): routers reserve so much output that a sequence stays within
it with that likelihood. If it is too low, sequences are preempted and computed again; if it is too high, blocks stay
unused. So the quantile follows the share of tokens that are computed more than once. If that share is too high, the
quantile is 1 for a while (as under guaranteed_no_evict), twice as long each time that it soon happens again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

from inflight.executor.scheduler.blocks import BlockPool, HostBlocks
from inflight.executor.scheduler.limits import PreemptionCost, SchedulerLimits
from inflight.executor.scheduler.plan_builder import StepBuilder
from inflight.executor.scheduler.prefix_cache import PrefixCache
from inflight.executor.scheduler.queues import SequenceQueues
from inflight.executor.scheduler.sequence import HostCopy, Restored, Sequence

MIN_QUANTILE = 0.5


@dataclass(frozen=True, slots=True)
class ReserveRules:
    """Parameters of `ReserveController`.

    Shares are of the tokens computed, over windows of `window_tokens`, which is more than the longest sequence that is
    usually lost at once. `target` is the share that overcommitting may cost. Below half of it the quantile falls by
    `sink`; above it the quantile rises half of the way to 1. Above `fallback_above` the quantile is 1 for
    `hold_tokens`.
    """

    first: float = 0.9
    target: float = 0.02
    fallback_above: float = 0.10
    sink: float = 0.01
    window_tokens: int = 16_384
    hold_tokens: int = 65_536
    max_hold_tokens: int = 4_194_304


class ReserveController:
    """Adapts the reserve quantile to the share of recomputed tokens. Takes totals since the start and judges them by
    window."""

    def __init__(self, rules: ReserveRules | None = None) -> None:
        self._rules = rules or ReserveRules()
        self._adapted = self._rules.first
        self._num_computed = 0
        self._num_recomputed = 0
        self._num_held_tokens = 0
        self._hold_tokens = self._rules.hold_tokens

    @property
    def is_holding(self) -> bool:
        """Whether the quantile is held at 1."""
        return self._num_held_tokens > 0

    @property
    def quantile(self) -> float:
        """Likelihood with which output should stay within its reservation."""
        return 1.0 if self.is_holding else self._adapted

    def observe(self, num_computed: int, num_recomputed: int) -> None:
        """Takes the totals of computed and recomputed tokens since the start."""
        num_tokens = num_computed - self._num_computed
        if num_tokens >= self._rules.window_tokens:
            self._judge((num_recomputed - self._num_recomputed) / num_tokens, num_tokens)
            self._num_computed, self._num_recomputed = num_computed, num_recomputed

    def _judge(self, share: float, num_tokens: int) -> None:
        rules = self._rules
        if self.is_holding:
            # Sequences that board now have reserved all that they need. What is still lost was promised before.
            self._num_held_tokens = max(0, self._num_held_tokens - num_tokens)
        elif share > rules.fallback_above:
            self._adapted += (1 - self._adapted) / 2
            self._num_held_tokens = self._hold_tokens
            self._hold_tokens = min(2 * self._hold_tokens, rules.max_hold_tokens)
        elif share > rules.target:
            self._adapted += (1 - self._adapted) / 2
        elif share < rules.target / 2:
            self._adapted = max(MIN_QUANTILE, self._adapted - rules.sink)
            # A window well below the target slowly shortens the next fallback.
            self._hold_tokens = max(rules.hold_tokens, self._hold_tokens - num_tokens)


class MaxUtilization:
    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        host: HostBlocks,
        prefix_cache: PrefixCache,
        queues: SequenceQueues,
    ) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._queues = queues
        self._host = host
        self._cost = limits.overcommit.cost
        self._max_steps_away = limits.overcommit.max_steps_away
        self._num_watermark_blocks = math.ceil(limits.overcommit.watermark * pool.num_blocks)
        self._num_margin_blocks = math.ceil(limits.overcommit.margin * pool.num_blocks)
        self._last_victim: Sequence | None = None
        # Whether no new sequence may board, because one was preempted.
        self._is_boarding_held = False
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    # Decoding.

    def decodes(self, builder: StepBuilder) -> Iterable[Sequence]:
        """Returns the decodes that have, or get, their block. Preempts others if blocks are missing; usually none are,
        and no sequence is looked at."""
        queues, pool = self._queues, self._pool
        if not self.is_scarce:
            return queues.decodes
        block_size = pool.block_size
        growing = {s: None for s in queues.decodes if s.num_computed >= len(s.block_table) * block_size}
        self._settle_pausing(growing, builder)
        num_missing = len(growing) - pool.num_available - self._num_coming_blocks()
        while num_missing > 0 and (victim := self._choose_victim(num_missing)) is not None:
            num_missing -= self._preempt_one(victim, growing, num_missing, builder)
        if len(growing) <= pool.num_available:
            return queues.decodes
        skipping = set(islice(growing, pool.num_available, None))
        return [sequence for sequence in queues.decodes if sequence not in skipping]

    def _settle_pausing(self, growing: dict[Sequence, None], builder: StepBuilder) -> None:
        """Preempts the pausing sequences without a row in flight, or resumes those whose blocks are not needed any
        more."""
        block_size = self._pool.block_size
        for sequence in [s for s in self._queues.pausing if s.num_in_flight == 0]:
            grows = sequence.num_computed >= len(sequence.block_table) * block_size
            num_coming_blocks = self._num_coming_blocks() - self._num_own_blocks(sequence)
            if len(growing) + grows <= self._pool.num_available + num_coming_blocks:
                self._queues.resume(sequence)
                if grows:
                    growing[sequence] = None
            else:
                self._preempt(sequence, len(growing), builder)

    def _num_coming_blocks(self) -> int:
        """Returns the blocks that the steps in flight free when they retire."""
        giving = chain(self._queues.pausing, self._queues.ending, self._queues.leaving)
        return sum(self._num_own_blocks(sequence) for sequence in giving)

    def _num_own_blocks(self, sequence: Sequence) -> int:
        """Returns a lower bound of the blocks that only this sequence holds: at least the last block of its table is
        its own."""
        num_shared = min(sequence.num_shared_tokens // self._pool.block_size, len(sequence.block_table) - 1)
        return max(0, len(sequence.block_table) - num_shared)

    def _preempt_one(
        self, victim: Sequence, growing: dict[Sequence, None], num_missing: int, builder: StepBuilder
    ) -> int:
        """Returns how many fewer blocks are missing, now or once the victim's last step has retired."""
        num_fewer = int(victim in growing)
        growing.pop(victim, None)
        self._last_victim = victim
        self._is_boarding_held = True
        self._queues.pause(victim)
        if victim.num_in_flight > 0:
            return num_fewer + self._num_own_blocks(victim)
        num_available = self._pool.num_available
        self._preempt(victim, num_missing, builder)
        return num_fewer + self._pool.num_available - num_available

    def _choose_victim(self, num_missing: int) -> Sequence | None:
        """Returns None where no sequence is on a seat. The gate has checked that each sequence fits alone, and the
        remaining ones grow into the blocks of the preempted."""
        candidates = [
            Candidate(sequence, self._cost_of(sequence, num_missing))
            for sequence in chain(self._queues.decodes, self._queues.prefills)
        ]
        return choose_victim(candidates, self._last_victim)

    def _kept(self, sequence: Sequence, num_missing: int) -> PreemptedKv:
        is_published = self._prefix_cache.is_open_to(sequence)
        num_wanted, block_size = num_missing + self._num_headroom_blocks(), self._pool.block_size
        kept = PreemptedKv.of(sequence, block_size, num_wanted, is_published=is_published)
        states = self._prefix_cache.states
        if states is None:
            return kept
        hashes = sequence.block_hashes[: sequence.num_computed // block_size] if is_published else ()
        num_lost = sequence.num_computed - states.num_usable(hashes) * block_size
        return PreemptedKv(kept.num_own_blocks, max(kept.num_lost_tokens, num_lost), states.slot_tokens)

    def _cost_of(self, sequence: Sequence, num_missing: int) -> float:
        kept, block_size = self._kept(sequence, num_missing), self._pool.block_size
        if is_swap_cheaper(kept, block_size, self._cost, self._num_host_blocks):
            return swap_cost(kept, block_size, self._cost)
        return recompute_cost(kept, self._cost)

    @property
    def _num_host_blocks(self) -> int:
        """Blocks that host memory has room for; none without room for the recurrent state."""
        states = self._prefix_cache.states
        return self._host.num_available if states is None or states.num_free_host_slots else 0

    # Preempting and boarding again.

    def _preempt(self, sequence: Sequence, num_missing: int, builder: StepBuilder) -> None:
        """Takes seat and blocks from a pausing sequence."""
        if sequence.num_in_flight > 0:
            builder.broken[sequence] = "it was to give up blocks that a step in flight writes to"
            return
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.num_steps_away = 0
        sequence.num_lost_tokens = sequence.num_computed
        kept = self._kept(sequence, num_missing)
        if is_swap_cheaper(kept, self._pool.block_size, self._cost, self._num_host_blocks):
            self._swap_out(sequence, builder)
        self._queues.preempt(sequence)
        self.release_blocks(sequence)
        builder.preempted.append(sequence)

    def _swap_out(self, sequence: Sequence, builder: StepBuilder) -> None:
        """Copies the blocks that only this sequence refers to, up to its newest position, unless host memory lacks the
        blocks."""
        table = sequence.block_table[: -(-sequence.num_computed // self._pool.block_size)]
        first = next((i for i, block in enumerate(table) if self._pool.num_references(block) == 1), len(table))
        host_blocks = self._host.allocate(len(table) - first)
        if not host_blocks:
            return
        states = self._prefix_cache.states
        host_slot = None if states is None else states.swap_out(sequence, builder)
        sequence.host_copy = HostCopy(first, host_blocks, sequence.num_computed, host_slot)
        builder.swaps_out += zip(table[first:], host_blocks, strict=True)
        builder.swapped.append(sequence)

    def take(self, sequence: Sequence, builder: StepBuilder) -> bool:
        """Starts the block table as `KvPolicy.take` does. Beside other sequences a part of the pool must stay free."""
        if not self._prefix_cache.can_attach():
            return False
        is_back = sequence in self._queues.preempted
        is_alone = not self._queues.num_boarded
        if not is_back and not self._may_board_new(sequence, is_alone, builder):
            return False
        # A preempted sequence needs a spare block for each running one. A new one must leave the watermark free.
        num_to_spare = 0 if is_alone else self._num_headroom_blocks() if is_back else self._num_watermark_blocks
        if self._pool.num_available <= num_to_spare:
            return False
        self._prefix_cache.attach(sequence, builder)
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
            self._restore(sequence, num_found, builder)
        return True

    def _restore(self, sequence: Sequence, num_found: int, builder: StepBuilder) -> None:
        """Restores from its copy in host memory what the prefix cache lacks, if the copy covers all of it, and counts
        recomputed tokens. Recurrent state is restored unless a checkpoint is loaded."""
        copy, states = sequence.host_copy, self._prefix_cache.states
        if copy is not None:
            num_known = sequence.num_tokens - sequence.num_uncomputed
            has_more = copy.num_computed > num_known if states is None else sequence.state_load is None
            if copy.first_index <= num_found and has_more:
                if states is not None and copy.host_slot is not None:
                    states.swap_in(sequence, copy.host_slot, builder)
                host_blocks = copy.host_blocks[num_found - copy.first_index :]
                builder.swaps_in += zip(host_blocks, sequence.block_table[num_found:], strict=False)
                builder.swapped.append(sequence)
                start, blocks = num_found * self._pool.block_size, sequence.block_table[num_found:]
                builder.restored.append(Restored(sequence, start, copy.num_computed, tuple(blocks[: len(host_blocks)])))
                self._prefix_cache.detach(sequence)
                sequence.num_computed = copy.num_computed
            self._drop_copy(sequence)
        num_known = sequence.num_tokens - sequence.num_uncomputed
        self.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_known)

    def _num_blocks_for(self, sequence: Sequence) -> int:
        """Returns the blocks of the known tokens and the next one."""
        return sequence.num_tokens // self._pool.block_size + 1

    def _num_headroom_blocks(self) -> int:
        """Returns one block for each seated sequence and the one that boards, at least the watermark."""
        return max(self._num_watermark_blocks, self._queues.num_seated + 1)

    def _may_board_new(self, sequence: Sequence, is_alone: bool, builder: StepBuilder) -> bool:
        """Returns whether a new sequence may board beside the preempted ones and the reservations of those on seats."""
        if self._queues.preempted or self._queues.pausing:
            return False
        if is_alone:
            self._is_boarding_held = False
            return True
        if self._is_boarding_held:
            if self._pool.num_available < self._num_watermark_blocks + self._num_margin_blocks:
                return False
            self._is_boarding_held = False
        queues = self._queues
        num_committed = queues.num_reserved_blocks + queues.num_overrun_blocks + builder.num_overrun_blocks
        num_free = self._pool.num_blocks + self._pool.num_saved - self._num_watermark_blocks - num_committed
        num_missing = sequence.num_reserved_blocks - num_free
        return self._prefix_cache.would_share(sequence, num_missing)

    def overdue(self) -> list[Sequence]:
        away = self._queues.preempted
        for sequence in away:
            sequence.num_steps_away += 1
        return [sequence for sequence in away if sequence.num_steps_away > self._max_steps_away]

    # Releasing.

    def release(self, sequence: Sequence) -> None:
        self.release_blocks(sequence)
        self._drop_copy(sequence)
        if sequence is self._last_victim:
            self._last_victim = None

    def release_blocks(self, sequence: Sequence) -> None:
        """Releases the blocks on the device, and those of its prefix that have not come back from host memory."""
        self._prefix_cache.release(sequence)

    def _drop_copy(self, sequence: Sequence) -> None:
        """Gives back the host blocks."""
        if sequence.host_copy is not None:
            self._host.release(sequence.host_copy.host_blocks)
            if self._prefix_cache.states is not None and sequence.host_copy.host_slot is not None:
                self._prefix_cache.states.release_host_slot(sequence.host_copy.host_slot)
            sequence.host_copy = None

    # State.

    @property
    def is_scarce(self) -> bool:
        return bool(self._queues.pausing) or self._pool.num_available < len(self._queues.decodes)

    @property
    def num_draft_blocks(self) -> int:
        """What is available beyond a block for each seated sequence, none while sequences wait to board again."""
        if self._queues.preempted or self._queues.pausing:
            return 0
        return max(0, self._pool.num_available - self._num_headroom_blocks())

    @property
    def num_overrun_blocks(self) -> int:
        num_away = sum(max(0, self._num_blocks_for(s) - s.num_reserved_blocks) for s in self._queues.preempted)
        return self._queues.num_overrun_blocks + num_away

    def budget_blocks(self, num_reserved_blocks: int) -> int:
        """Returns the pool less the watermark and the overrun. While boarding is held, returns at most what is
        reserved."""
        if not num_reserved_blocks:
            return self._pool.num_blocks
        num_blocks = max(0, self._pool.num_blocks - self._num_watermark_blocks - self.num_overrun_blocks)
        return min(num_blocks, num_reserved_blocks) if self._is_boarding_held else num_blocks

    @property
    def num_saved_blocks(self) -> int:
        """What sharing saves; none while boarding is held."""
        return 0 if self._is_boarding_held else self._pool.num_saved


@dataclass(frozen=True, slots=True)
class PreemptedKv:
    """How much of a sequence's KV is in blocks of its own, and how much of that preemption would lose.

    Blocks found in the prefix cache may be held by others as well. Published blocks of its own stay in the cache, but
    the cache is empty when a sequence is preempted: as many as are needed now are evicted from them, last block first.
    Recurrent state, which takes as much memory as the KV of `num_state_tokens` tokens, is lost up to a checkpoint.
    """

    num_own_blocks: int
    num_lost_tokens: int
    num_state_tokens: int = 0

    @classmethod
    def of(cls, sequence: Sequence, block_size: int, num_wanted_blocks: int, *, is_published: bool) -> PreemptedKv:
        """`is_published` says whether the full blocks that the sequence has computed are in the prefix cache."""
        num_computed = sequence.num_computed
        num_shared = min(sequence.num_shared_tokens, num_computed) // block_size
        num_findable = max(num_shared, num_computed // block_size) if is_published else num_shared
        num_partial = len(sequence.block_table) - num_findable
        num_evicted = min(max(0, num_wanted_blocks - num_partial), num_findable - num_shared)
        num_lost_tokens = num_computed - (num_findable - num_evicted) * block_size
        return cls(len(sequence.block_table) - num_shared, max(0, num_lost_tokens))


def swap_cost(kept: PreemptedKv, block_size: int, cost: PreemptionCost) -> float:
    """Returns the cost of copying out and in again."""
    return 2 * (kept.num_own_blocks * block_size + kept.num_state_tokens) * cost.swap_token


def recompute_cost(kept: PreemptedKv, cost: PreemptionCost) -> float:
    """Returns the cost of computing the lost tokens again."""
    return kept.num_lost_tokens * cost.recompute_token


def is_swap_cheaper(kept: PreemptedKv, block_size: int, cost: PreemptionCost, num_host_blocks: int) -> bool:
    """Returns whether the KV should go to host memory, where so many blocks are available, rather than be computed
    again."""
    if kept.num_own_blocks > num_host_blocks:
        return False
    return swap_cost(kept, block_size, cost) < recompute_cost(kept, cost)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could be preempted, and the cost of restoring its KV."""

    sequence: Sequence
    cost: float


def choose_victim(candidates: Iterable[Candidate], last_victim: Sequence | None) -> Sequence | None:
    """Returns the sequence to preempt: the lowest priority first, then no deadline, then the latest deadline, then the
    lowest cost, then the latest arrival. The last victim is chosen again only if it is alone, or alone of class batch,
    which gives way to all others."""
    candidates = list(candidates)
    candidates = [candidate for candidate in candidates if candidate.sequence.is_batch] or candidates
    others = [candidate for candidate in candidates if candidate.sequence is not last_victim]
    victim = min(others or candidates, key=_order, default=None)
    return None if victim is None else victim.sequence


def _order(candidate: Candidate) -> tuple[int, float, float, int]:
    sequence = candidate.sequence
    latest = math.inf if sequence.deadline_ms is None else sequence.deadline_ms
    return sequence.priority, -latest, candidate.cost, -sequence.arrival
