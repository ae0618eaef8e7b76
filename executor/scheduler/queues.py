"""Queues of the accepted sequences, the rows of the seats, and the share of class batch. See the table in
`inflight.executor.scheduler.scheduler`."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain

from inflight.executor.scheduler.plan_builder import StepBuilder
from inflight.executor.scheduler.sequence import FinishReason, Sequence
from inflight.executor.scheduler.step_constraint import DecodeLoad, PrefillAllowance, StepCost

# Few sequences wait here, since routers hold the rest, so the more important ones pass these. A larger number would let
# the others starve.
MAX_PASSED_BY = 32
# What class batch adds to a step that it shares with other classes, of the time of their decodes.
BATCH_SHARE = 0.05
# How long a step of class batch alone may take while others come, in steps of one row. Of the tokens that 64 rows yield
# in their time, this gives up about a fifth on a CPU.
LONGEST_ALONE = 3.0
# Predicted time of steps since the last sequence of another class left, after which no other is expected.
QUIET_S = 30.0


def turn(sequence: Sequence) -> int:
    """Returns the boarding key; the smallest boards first. Sequences board in order of arrival, but ahead of less
    important ones that arrived up to MAX_PASSED_BY arrivals earlier per step of priority between them."""
    return sequence.arrival - MAX_PASSED_BY * sequence.priority


class SequenceQueues:
    """One dictionary per state. Each keeps the order in which sequences entered the state.

    The sums are kept up at each change of state, so that reading them does not cost more with more sequences.
    """

    def __init__(self, num_seat_rows: int) -> None:
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        # Accepted sequences whose grammar is not compiled.
        self.preparing: dict[Sequence, None] = {}
        self.preempted: dict[Sequence, None] = {}
        self.prefills: dict[Sequence, None] = {}
        self.decodes: dict[Sequence, None] = {}
        self.ending: dict[Sequence, None] = {}
        # Sequences that are to give up their seat, with the queue that they would resume in.
        self.pausing: dict[Sequence, dict[Sequence, None]] = {}
        # The reason of an end that is still to be returned; None where it has been.
        self.leaving: dict[Sequence, FinishReason | None] = {}
        # Those of class batch that have boarded and not ended; the one that has had no row for longest is first.
        self.batch: OrderedDict[Sequence, None] = OrderedDict()
        # Whether a sequence of another class has begun to wait since the last plan.
        self.has_newcomer = False
        # Blocks that the boarded sequences have reserved, and blocks that they use beyond their reservations.
        self.num_reserved_blocks = 0
        self.num_overrun_blocks = 0
        # Computed tokens of the decodes, and the number of decodes by inter-token target.
        self.decode_context = 0
        self._num_decodes_by_target: Counter[float] = Counter()
        # Tokens of the sequences that wait for a seat, none of which are computed.
        self.num_unseated_tokens = 0
        self._num_seat_rows = num_seat_rows
        self._free_seats = list(range(num_seat_rows))[::-1]

    @property
    def num_seated(self) -> int:
        """Seats that are taken."""
        return len(self.decodes) + len(self.prefills)

    @property
    def smallest_target_ms(self) -> float | None:
        """The smallest inter-token target of the decodes; None: no sequence has one."""
        return min(self._num_decodes_by_target, default=None)

    @property
    def num_boarded(self) -> int:
        """Sequences that have boarded and not ended."""
        return self.num_seated + len(self.ending) + len(self.pausing)

    @property
    def has_others(self) -> bool:
        """Whether a sequence of another class than batch has boarded and not ended."""
        return len(self.batch) < self.num_boarded

    @property
    def has_batch(self) -> bool:
        """Whether a sequence of class batch has boarded and not ended, or may board."""
        return bool(self.batch) or any(one.is_batch for one in chain(self.waiting, self.preempted))

    @property
    def is_empty(self) -> bool:
        """Whether all queues are empty."""
        return not (self.preparing or self.can_run)

    @property
    def can_run(self) -> bool:
        """Whether any sequence is on a seat, may board or is leaving. One that is being prepared needs a command."""
        return bool(self.waiting or self.preempted or self.num_boarded or self.leaving)

    def boarded(self) -> Iterator[Sequence]:
        """Returns the sequences that have boarded and not ended."""
        return chain(self.decodes, self.prefills, self.ending, self.pausing)

    def boarding_order(self) -> list[Sequence]:
        """Returns the sequences that may board, in boarding order: the preempted ones by priority and arrival, then the
        others by `turn`."""
        new = sorted(self.waiting, key=turn)
        if not self.preempted:
            return new
        back = sorted(self.preempted, key=lambda sequence: (-sequence.priority, sequence.arrival))
        return [*back, *new]

    def accept(self, sequence: Sequence) -> None:
        """Adds a sequence that waits for a seat, or until it is ready."""
        queue = self.waiting if sequence.is_ready else self.preparing
        queue[sequence] = None
        self.has_newcomer |= sequence.is_ready and not sequence.is_batch
        self.num_unseated_tokens += sequence.num_tokens

    def mark_prepared(self, sequence: Sequence) -> None:
        """Lets a sequence that was being prepared wait for a seat."""
        del self.preparing[sequence]
        self.waiting[sequence] = None
        self.has_newcomer |= not sequence.is_batch

    def seat(self, sequence: Sequence) -> None:
        """Seats a sequence whose block table has been started."""
        self.waiting.pop(sequence, None)
        self.preempted.pop(sequence, None)
        self.prefills[sequence] = None
        self.num_unseated_tokens -= sequence.num_tokens
        self.num_reserved_blocks += sequence.num_reserved_blocks
        self.num_overrun_blocks += sequence.num_overrun_blocks
        sequence.seat = self._free_seats.pop()
        if sequence.is_batch:
            self.batch[sequence] = None

    def launch(self, builder: StepBuilder) -> None:
        """Moves the sequences whose prompt is computed with this step, and those whose last token it yields."""
        self.has_newcomer = False
        self.num_overrun_blocks += builder.num_overrun_blocks
        self.decode_context += builder.num_decodes
        for sequence in builder.prompts_done:
            del self.prefills[sequence]
            self.decodes[sequence] = None
            self._begin_decode(sequence)
        for sequence in builder.prompts_ended:
            del self.prefills[sequence]
            self.ending[sequence] = None
        for sequence in builder.ending:
            del self.decodes[sequence]
            self.ending[sequence] = None
            self._end_decode(sequence)

    def advance(self, sequence: Sequence) -> None:
        """Counts one more token as computed, whose draft was accepted."""
        sequence.num_computed += 1
        self.decode_context += sequence in self.decodes

    def pause(self, sequence: Sequence) -> None:
        """Excludes the sequence from further steps until `resume` or `preempt`."""
        place = self.decodes if sequence in self.decodes else self.prefills
        del place[sequence]
        self.pausing[sequence] = place
        if place is self.decodes:
            self._end_decode(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Puts a paused sequence back into the queue that it was in."""
        place = self.pausing.pop(sequence)
        place[sequence] = None
        if place is self.decodes:
            self._begin_decode(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes the seat of a paused sequence, which waits to board again. Its blocks must not be released yet."""
        del self.pausing[sequence]
        self._unseat(sequence)
        self.free_seat(sequence)
        self.preempted[sequence] = None
        self.num_unseated_tokens += sequence.num_tokens

    def leave(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Moves the sequence from its queue to `leaving`. Its blocks must not be released yet."""
        assert sequence not in self.leaving, f"{sequence.request_id} leaves twice"
        for unseated in (self.waiting, self.preparing, self.preempted):
            if sequence in unseated:
                del unseated[sequence]
                self.num_unseated_tokens -= sequence.num_tokens
        for boarded in (self.decodes, self.prefills, self.ending, self.pausing):
            if sequence in boarded:
                if boarded is self.decodes:
                    self._end_decode(sequence)
                del boarded[sequence]
                self._unseat(sequence)
        self.leaving[sequence] = reason

    def _begin_decode(self, sequence: Sequence) -> None:
        self.decode_context += sequence.num_computed
        if sequence.inter_token_target_ms is not None:
            self._num_decodes_by_target[sequence.inter_token_target_ms] += 1

    def _end_decode(self, sequence: Sequence) -> None:
        self.decode_context -= sequence.num_computed
        target_ms = sequence.inter_token_target_ms
        if target_ms is not None:
            self._num_decodes_by_target[target_ms] -= 1
            if not self._num_decodes_by_target[target_ms]:
                del self._num_decodes_by_target[target_ms]

    def _unseat(self, sequence: Sequence) -> None:
        self.batch.pop(sequence, None)
        self.num_reserved_blocks -= sequence.num_reserved_blocks
        self.num_overrun_blocks -= sequence.num_overrun_blocks

    def free_seat(self, sequence: Sequence) -> None:
        """Frees the sequence's seat row, if it has one."""
        if sequence.seat is not None:
            self._free_seats.append(sequence.seat)
            sequence.seat = None

    def check(self) -> None:
        """Asserts that each row is free or belongs to one sequence, and that the sums are right."""
        seats = [sequence.seat for sequence in chain(self.boarded(), self.leaving) if sequence.seat is not None]
        assert sorted([*seats, *self._free_seats]) == list(range(self._num_seat_rows)), f"seats: {seats}"
        unseated = [*self.waiting, *self.preparing, *self.preempted]
        assert self.num_unseated_tokens == sum(s.num_tokens - s.num_computed for s in unseated)
        assert set(self.batch) == {s for s in self.boarded() if s.is_batch}
        assert self.num_reserved_blocks == sum(s.num_reserved_blocks for s in self.boarded())
        assert self.num_overrun_blocks == sum(s.num_overrun_blocks for s in self.boarded())
        assert self.decode_context == sum(s.num_computed for s in self.decodes)
        targets_ms = (s.inter_token_target_ms for s in self.decodes)
        assert self._num_decodes_by_target == Counter(target_ms for target_ms in targets_ms if target_ms is not None)


class BatchShare:
    """What class batch gets of steps, by their predicted time.

    | sequences of other classes             | a step with class batch                                              |
    | -------------------------------------- | -------------------------------------------------------------------- |
    | on a seat, or come since the last step | takes BATCH_SHARE more than with the others' decodes alone           |
    | gone for less than QUIET_S             | takes at most LONGEST_ALONE times as long as with one row, because a |
    |                                        | sequence that comes waits for its end                                |
    | otherwise                              | has no bound                                                         |

    Where rows are nearly free, as decodes on a GPU, bounded steps hold all of them; else the decodes take turns. What
    a row or a chunk takes beyond the share is owed to the next steps, so the longest context gets its turn. A static
    batch (`is_static`) has no bound.
    """

    def __init__(self, queues: SequenceQueues, *, is_static: bool) -> None:
        self._queues = queues
        self._is_static = is_static
        self._owed_s = 0.0
        # Predicted time of steps of class batch alone since the last other sequence left, as far as it is followed.
        self._quiet_s = QUIET_S
        # The bound of the step that is planned, and what is left of it.
        self._longest_s = 0.0
        self._allowance: PrefillAllowance | None = None

    @property
    def is_shared(self) -> bool:
        """Whether class batch and another one are in the next step."""
        queues = self._queues
        return not self._is_static and (queues.has_others or queues.has_newcomer) and queues.has_batch

    @property
    def expects_others(self) -> bool:
        """Whether class batch is alone in the next step, and others came lately."""
        queues = self._queues
        is_lately = self._quiet_s < QUIET_S and not self._is_static
        return is_lately and not (queues.has_others or queues.has_newcomer) and queues.has_batch

    def others_load(self) -> DecodeLoad:
        """Returns the decodes of the other classes."""
        decodes = [one for one in self._queues.decodes if not one.is_batch]
        targets_ms = (one.inter_token_target_ms for one in decodes)
        context = sum(one.num_computed + 1 for one in decodes)
        return DecodeLoad(len(decodes), context, min((ms for ms in targets_ms if ms is not None), default=None))

    def begin(self, cost: StepCost, block_size: int) -> tuple[Collection[Sequence], PrefillAllowance]:
        """Begins a step in which class batch is bounded. Returns the decodes that are not in it, and what prompts of
        class batch may take: at least a block of tokens if decodes have left anything."""
        decodes = [one for one in self._queues.batch if one in self._queues.decodes]
        if self.is_shared:
            others = self.others_load()
            least_s = cost.fixed_s + cost.tokens.token_s * others.num_decodes + cost.tokens.context_s * others.context
            # One that has come may have to wait for blocks, and then class batch is what the step has.
            owed_s = self._owed_s if self._queues.has_others else 0.0
            left_s = BATCH_SHARE * least_s - owed_s
        else:
            least_s = cost.fixed_s
            row_s = cost.tokens.of(1, decodes[0].num_computed if decodes else 0)
            left_s = LONGEST_ALONE * (least_s + row_s) - least_s
            # Its decodes go on, so prompts need not be in each step.
            block_size = 0 if decodes else block_size
        self._longest_s = least_s + left_s
        left_out: set[Sequence] = set()
        for sequence in decodes:
            if left_s < 0:
                left_out.add(sequence)
                continue
            left_s -= cost.tokens.of(1, sequence.num_computed)
            self._queues.batch.move_to_end(sequence)
        self._allowance = PrefillAllowance(block_size if left_s >= 0 else 0, left_s, cost.tokens)
        return left_out, self._allowance

    def end(self) -> None:
        """Ends a step, bounded or not."""
        allowance, self._allowance = self._allowance, None
        self._owed_s = 0.0
        if self._queues.has_others:
            self._quiet_s = 0.0
            self._owed_s = max(0.0, -allowance.seconds) if allowance is not None else 0.0
        elif allowance is not None:
            self._quiet_s += self._longest_s - allowance.seconds
