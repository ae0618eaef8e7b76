"""The executor's admission gate. A sequence that passes it can use all of its reservation once it has a seat, whatever
the routers' ledger says.

The gate owns the set of accepted sequences, the blocks reserved for them, and the newest attempt seen of each request.
An attempt counts as seen even when it is refused: by the time a repeated submit of it could arrive, its router has
placed the request again.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from inflight.executor.scheduler.sequence import Sequence

# Attempts are remembered after their end so that a late duplicate is refused. A duplicate comes within seconds; at a
# hundred requests per second this many last ten minutes, in about 10 MB.
MAX_REMEMBERED_ATTEMPTS = 65_536
# Steps in which the saved blocks that were offered fall to 37 %. That takes some seconds, longer than a report takes to
# the ledger.
OFFER_STEPS = 128


class Refusal(Enum):
    """Why a sequence is not accepted."""

    NO_CAPACITY = "no_capacity"
    STALE_ATTEMPT = "stale_attempt"
    DRAINING = "draining"
    INVALID = "invalid"


class AttemptLog:
    """The newest attempt seen of each request. Beyond `max_requests` the least recently seen request is dropped."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._newest: OrderedDict[str, int] = OrderedDict()

    def is_stale(self, request_id: str, attempt: int) -> bool:
        """Returns whether this attempt or a newer one was seen."""
        newest = self._newest.get(request_id)
        return newest is not None and attempt <= newest

    def see(self, request_id: str, attempt: int) -> None:
        """Records an attempt that is not stale."""
        self._newest[request_id] = attempt
        self._newest.move_to_end(request_id)
        if len(self._newest) > self._max_requests:
            self._newest.popitem(last=False)


class Gate:
    """Accepts sequences whose blocks and batch slot can be guaranteed.

    Blocks that boarded sequences share are in several reservations. The blocks that this saves are offered to routers
    beside the pool. They place sequences by what they were told, so the gate goes on accepting that for a while after
    fewer blocks are saved. Such a sequence waits until its blocks are there: see `GuaranteedNoEvict`.
    """

    def __init__(self, *, num_blocks: int, block_size: int, max_accepted: int, context_length: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_accepted = max_accepted
        self._context_length = context_length
        self._accepted: dict[str, Sequence] = {}
        self.num_reserved_blocks = 0
        self._num_offered_blocks = 0
        self._attempts = AttemptLog(MAX_REMEMBERED_ATTEMPTS)
        self.is_closed = False

    def close(self) -> None:
        """Refuses every further sequence."""
        self.is_closed = True

    def observe_saved(self, num_saved_blocks: int) -> None:
        """Takes the blocks that sharing saves after a step. Must be called once per step."""
        decayed = self._num_offered_blocks - -(-self._num_offered_blocks // OFFER_STEPS)
        self._num_offered_blocks = max(num_saved_blocks, decayed)

    def find(self, request_id: str) -> Sequence | None:
        """Returns the accepted sequence of this request."""
        return self._accepted.get(request_id)

    def is_stale(self, sequence: Sequence) -> bool:
        """Returns whether the attempt has ended, is running or is superseded. Accepted sequences are checked first,
        because the log may have dropped them."""
        accepted = self.find(sequence.request_id)
        if accepted is not None and sequence.attempt <= accepted.attempt:
            return True
        return self._attempts.is_stale(sequence.request_id, sequence.attempt)

    def enter(self, sequence: Sequence, num_overrun_blocks: int = 0, num_saved_blocks: int = 0) -> Refusal | None:
        """Reserves the sequence's blocks and batch slot, or returns the reason of the refusal. No older attempt may be
        accepted still.

        `num_overrun_blocks` are the blocks that accepted sequences use beyond their reservations, `num_saved_blocks`
        those that sharing saves now.
        """
        assert self.find(sequence.request_id) is None, f"{sequence.request_id} is accepted already"
        self._attempts.see(sequence.request_id, sequence.attempt)
        if self.is_closed:
            return Refusal.DRAINING
        if not self._is_valid(sequence):
            return Refusal.INVALID
        num_reserved_blocks = self.num_reserved_blocks + sequence.num_reserved_blocks
        num_blocks = self._num_blocks + max(self._num_offered_blocks, num_saved_blocks)
        if num_reserved_blocks + num_overrun_blocks > num_blocks or len(self._accepted) == self._max_accepted:
            return Refusal.NO_CAPACITY
        most_blocks = max(-(-self.max_total_tokens(sequence) // self._block_size), sequence.num_reserved_blocks)
        if most_blocks > self._num_blocks:
            return Refusal.NO_CAPACITY
        self._accepted[sequence.request_id] = sequence
        self.num_reserved_blocks = num_reserved_blocks
        return None

    def max_total_tokens(self, sequence: Sequence) -> int:
        """Returns the tokens at which the request ends at the latest, prompt and output."""
        return min(sequence.num_prompt_tokens + sequence.stopping.max_tokens, self._context_length)

    def leave(self, sequence: Sequence) -> None:
        """Cancels the reservation. Does nothing when the sequence has left already."""
        if self._accepted.get(sequence.request_id) is sequence:
            del self._accepted[sequence.request_id]
            self.num_reserved_blocks -= sequence.num_reserved_blocks

    def _is_valid(self, sequence: Sequence) -> bool:
        """Returns whether there are tokens to compute and the reservation holds the known tokens and the next one, if
        there is one."""
        num_needed = sequence.num_tokens + (sequence.pooled is None)
        if not 1 <= sequence.num_prompt_tokens <= sequence.num_tokens:
            return False
        if num_needed > self.max_total_tokens(sequence):
            return False
        return sequence.num_reserved_blocks >= -(-num_needed // self._block_size)
