"""What is left of sequences that ended here, for routers that come for it later. Event loop's thread, no clock.

Owns copies: nothing of a sequence, its blocks or its seat is kept alive. One record for each request, of its newest
attempt; a newer attempt makes it void.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass, field

from executor.scheduler.sequence import FinishReason, TokenLogprobs
from inflight.v1 import executor_pb2

# A hundred ends per second for nearly three minutes. More come only of cancels that storm, and nobody comes back for
# those.
MAX_ENDED = 16_384
# 12,000 requests of 1,000 prompt and 300 output tokens: two minutes of a hundred ends per second, and small beside a
# model.
MAX_ENDED_BYTES = 128 << 20
# What a record takes in resident memory without its tokens, and for each token; measured over 10,000 records. A prompt
# is a repeated field of protobuf, which grows by doubling.
RECORD_BYTES = 1750
PROMPT_TOKEN_BYTES = 7
OUTPUT_TOKEN_BYTES = 4
# Of a token's log probabilities, and of each of the likeliest tokens in it: an id, a float, and their places in tuples.
LOGPROBS_BYTES = 250
TOP_LOGPROB_BYTES = 72


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement as it was asked for: `submit` without `prior_output_ids`, the deadline by the event loop's clock."""

    submit: executor_pb2.Submit
    deadline_s: float | None

    def attached(self, now_s: float, *, started: bool, cached_tokens: int) -> executor_pb2.SequenceAttached:
        """What a router is told that attaches, but for its slot; the deadline counts from now."""
        attached = executor_pb2.SequenceAttached(
            request_id=self.submit.request_id,
            attempt=self.submit.attempt,
            submit=self.submit,
            started=started,
            cached_tokens=cached_tokens,
        )
        if self.deadline_s is not None:
            left_ms = int((self.deadline_s - now_s) * 1000)
            attached.submit.deadline_ms = min(max(0, left_ms), self.submit.deadline_ms)
        return attached


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that has ended."""

    placed: Placed
    output_ids: array[int]
    started: bool
    cached_tokens: int
    reason: FinishReason
    stop_token_id: int | None
    error: str
    ended_s: float
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        submit = self.placed.submit
        token_bytes = PROMPT_TOKEN_BYTES * len(submit.prompt_ids) + OUTPUT_TOKEN_BYTES * len(self.output_ids)
        logprobs_bytes = len(self.logprobs) * (LOGPROBS_BYTES + TOP_LOGPROB_BYTES * submit.num_top_logprobs)
        return RECORD_BYTES + token_bytes + logprobs_bytes + len(submit.router_context)


class EndedSequences:
    """Keeps each for `retain_s` after its end; fewer seconds where there are too many, the oldest going first."""

    def __init__(self, retain_s: float, max_ended: int = MAX_ENDED, max_bytes: int = MAX_ENDED_BYTES) -> None:
        self._retain_s = retain_s
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    def keep(self, ended: Ended) -> None:
        """Remembers an end. They come in the order in which they happened."""
        if self._retain_s == 0:
            return
        request_id = ended.placed.submit.request_id
        self.forget(request_id)
        self._ended[request_id] = ended
        self.num_bytes += ended.num_bytes
        while len(self._ended) > self._max_ended or self.num_bytes > self._max_bytes:
            self.forget(next(iter(self._ended)))

    def find(self, request_id: str) -> Ended | None:
        """The newest attempt of this request that ended here."""
        return self._ended.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a request, if anything."""
        ended = self._ended.pop(request_id, None)
        if ended is not None:
            self.num_bytes -= ended.num_bytes

    def expire(self, now_s: float) -> None:
        """Drops whose time is over."""
        while (due_s := self.next_due_s()) is not None and due_s <= now_s:
            self.forget(next(iter(self._ended)))

    def next_due_s(self) -> float | None:
        """When the first is to be dropped."""
        oldest = next(iter(self._ended.values()), None)
        return None if oldest is None else oldest.ended_s + self._retain_s


def output_array(output_ids: ReadOnlyList[int]) -> array[int]:
    """Four bytes for each id."""
    return array("I", output_ids)
