"""Records of sequences that ended here, for routers that attach later. Event loop's thread, no clock.

A record is a copy: it keeps neither the sequence nor its blocks or seat alive. There is one record per request, for its
newest attempt. A newer attempt removes it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass, field

from inflight.executor.scheduler.sequence import FinishReason, Resources, TokenLogprobs
from inflight.v1 import executor_pb2

# A hundred ends per second for nearly three minutes. More occur only in a storm of cancels, to which no router
# attaches.
MAX_ENDED = 16_384
# 12,000 requests of 1,000 prompt and 300 output tokens: two minutes of a hundred ends per second, and small beside a
# model.
MAX_ENDED_BYTES = 128 << 20
# Resident memory of a record without its tokens, and per token; measured over 10,000 records. A prompt is a repeated
# field of protobuf, which grows by doubling.
RECORD_BYTES = 1750
PROMPT_TOKEN_BYTES = 7
OUTPUT_TOKEN_BYTES = 4
# Of a token's log probabilities, and of each of the likeliest tokens in it: an id, a float, and their tuple entries.
LOGPROBS_BYTES = 250
TOP_LOGPROB_BYTES = 72
# Of a number of an embedding.
POOLED_BYTES = 4


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement as submitted: `submit` without `prior_output_ids`, the deadline by the event loop's clock."""

    submit: executor_pb2.Submit
    deadline_s: float | None

    def attached(self, now_s: float, *, started: bool, cached_tokens: int) -> executor_pb2.SequenceAttached:
        """Returns the message for a router that attaches, without its slot. The deadline counts from now."""
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
    placed: Placed
    output_ids: array[int]
    started: bool
    cached_tokens: int
    reason: FinishReason
    stop_token_id: int | None
    error: str
    ended_s: float
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: ReadOnlyList[TokenLogprobs] = ()
    constraint_unfinished: bool = False
    pooled: array[float] = field(default_factory=lambda: array("f"))
    used: Resources | None = None

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the record."""
        submit = self.placed.submit
        token_bytes = PROMPT_TOKEN_BYTES * len(submit.prompt_ids) + OUTPUT_TOKEN_BYTES * len(self.output_ids)
        logprobs_bytes = len(self.logprobs) * (LOGPROBS_BYTES + TOP_LOGPROB_BYTES * submit.num_top_logprobs)
        scores_bytes = len(self.prompt_logprobs) * (LOGPROBS_BYTES + TOP_LOGPROB_BYTES * submit.num_prompt_logprobs)
        text_bytes = len(submit.router_context) + len(submit.constraint.grammar)
        pooled_bytes = POOLED_BYTES * len(self.pooled)
        return RECORD_BYTES + token_bytes + logprobs_bytes + scores_bytes + text_bytes + pooled_bytes


class EndedSequences:
    """Keeps each record for `retain_s` after the end. If there are too many, the oldest are dropped earlier."""

    def __init__(self, retain_s: float, max_ended: int = MAX_ENDED, max_bytes: int = MAX_ENDED_BYTES) -> None:
        self._retain_s = retain_s
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    def keep(self, ended: Ended) -> None:
        """Adds a record. Records must come in the order of the ends."""
        if self._retain_s == 0:
            return
        request_id = ended.placed.submit.request_id
        self.forget(request_id)
        self._ended[request_id] = ended
        self.num_bytes += ended.num_bytes
        while len(self._ended) > self._max_ended or self.num_bytes > self._max_bytes:
            self.forget(next(iter(self._ended)))

    def find(self, request_id: str) -> Ended | None:
        """Returns the record of the newest attempt of this request that ended here."""
        return self._ended.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drops the record of a request, if there is one."""
        ended = self._ended.pop(request_id, None)
        if ended is not None:
            self.num_bytes -= ended.num_bytes

    def expire(self, now_s: float) -> None:
        """Drops the records whose time is over."""
        while (due_s := self.next_due_s()) is not None and due_s <= now_s:
            self.forget(next(iter(self._ended)))

    def next_due_s(self) -> float | None:
        """Returns when the oldest record expires."""
        oldest = next(iter(self._ended.values()), None)
        return None if oldest is None else oldest.ended_s + self._retain_s


def output_array(output_ids: ReadOnlyList[int]) -> array[int]:
    """Returns the ids in four bytes each."""
    return array("I", output_ids)
