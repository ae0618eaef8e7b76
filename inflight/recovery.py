"""Recovery of a stream whose connection breaks: the next call, the wait before it, and when to give up.

Pure: events and times are inputs, and decisions are results. The module sends nothing and reads no clock. Both clients
use it.

    failure                                  next
    nothing received yet                     the same Generate
    a resume token is known                  Resume after the received output
    Resume says that the output is lost      the same Generate with the received output as `prior_output`; with several
                                             choices without it, and output that was already received is cut off
    Generate says that the output is lost    the same Generate under a new key, with the seed of the first
    taken over soon after a call began       Resume or the same Generate, once: the other reader may be an earlier call
                                             of this client
    refused, or taken over                   the error

A repeated Generate has the same idempotency key, so it is the same request. It attaches to the first one if that still
exists, and otherwise has the same seed. Without a key, a request whose output is lost is sent again with the seed with
which the first one was accepted. Only one router is called at a time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import grpc

from inflight.common.errors import Reason
from inflight.common.rpc.options import CHANNEL_KEEPALIVE_TIMEOUT_MS, KEEPALIVE_TIME_MS
from inflight.errors import InflightError, names_no_host
from inflight.events import Choice, Delta, Event, Resumed, Transcript, decode_event, decode_parts, decode_positions
from inflight.v1 import inference_pb2, types_pb2


class Received:
    """The received output of one choice. `text_bytes` is None if the amount of text before the start of this stream is
    unknown."""

    def __init__(
        self, token_ids: tuple[int, ...] = (), *, offset: int | None = None, text_bytes: int | None = 0
    ) -> None:
        self.token_ids = list(token_ids)
        self.num_tokens = len(self.token_ids) if offset is None else offset
        self.text_bytes = text_bytes
        self.has_finished = False
        # Bytes of text that are received again before any new text.
        self._num_repeated_bytes = 0

    def expect_all_again(self) -> None:
        """Prepares for output from the beginning."""
        self._num_repeated_bytes = self.text_bytes or 0

    @property
    def has_all_ids(self) -> bool:
        """Whether the id of each token is known. Without all ids the stream cannot continue if the server has lost the
        output."""
        return len(self.token_ids) == self.num_tokens

    def take(self, wire: inference_pb2.Delta, *, shows_token_ids: bool = True) -> Delta | None:
        """Adds the output of an event. Returns the part that was not received before; None if nothing is new.

        Raises:
            InflightError: tokens before it are missing, or repeated tokens differ.
        """
        token_ids, num_tokens, text = list(wire.token_ids), wire.num_tokens, wire.text
        logprobs: Sequence[types_pb2.PositionLogprobs] = wire.logprobs
        if wire.offset != self.num_tokens and (num_repeated := self._num_repeated(wire)):
            num_tokens -= num_repeated
            del token_ids[:num_repeated]
            logprobs = logprobs[num_repeated:]
        if self._num_repeated_bytes:
            encoded = text.encode()
            text = encoded[self._num_repeated_bytes :].decode(errors="ignore")
            self._num_repeated_bytes = max(0, self._num_repeated_bytes - len(encoded))
        if not (num_tokens or text):
            return None
        # Only text may be left: text can arrive after its tokens.
        offset = self.num_tokens
        self.token_ids += token_ids
        self.num_tokens += num_tokens
        if self.text_bytes is not None:
            self.text_bytes += len(text.encode())
        shown_ids = tuple(token_ids) if shows_token_ids else ()
        parts = decode_parts(wire.parts)
        return Delta(text, shown_ids, offset, num_tokens, wire.choice, decode_positions(logprobs), parts)

    def _num_repeated(self, wire: inference_pb2.Delta) -> int:
        """Returns how many tokens of an event were received before."""
        if wire.offset > self.num_tokens:
            missing = f"[{self.num_tokens}, {wire.offset})"
            raise InflightError(grpc.StatusCode.INTERNAL, f"tokens {missing} of choice {wire.choice} never came")
        num_repeated = min(self.num_tokens - wire.offset, wire.num_tokens)
        repeated = wire.token_ids[:num_repeated]
        known = self.token_ids[wire.offset : wire.offset + len(repeated)]
        if self.has_all_ids and list(repeated) != known:
            text = f"the output of choice {wire.choice} is another one from token {wire.offset} on"
            raise InflightError(grpc.StatusCode.INTERNAL, text)
        return num_repeated


FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0

# How long a request without any response is repeated. Its address may be wrong, and a person may wait for that error.
SUBMIT_TIMEOUT_S = 10.0
# A call that stayed open for longer had reached a router: otherwise keepalive would have ended it.
ANSWERED_S = (KEEPALIVE_TIME_MS + CHANNEL_KEEPALIVE_TIMEOUT_MS) / 1000
# A router cancels a request whose client disappears. A call that resumes or repeats the request receives that end
# within this time after its first event. A later cancel is deliberate.
VANISHED_S = 5.0
# How long after a call another reader may be an earlier try of the same call. gRPC itself repeats a call on another
# router, while the first router may still wait for its ledger.
LATE_TRY_S = 10.0
# A call that is answered sooner was not repeated by gRPC, because a first try fails only after a router's timeout.
UNREPEATED_S = 0.5

_OUTPUT_LOST = frozenset({grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNIMPLEMENTED})
# Without a `Reason` these codes come from gRPC itself or a proxy, for a reset stream or connection.
_BROKEN_UNLESS_OURS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED})


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """The recovery that a client does without its caller.

    `resume`: continue a stream whose connection breaks. `repeats_submit`: also repeat a call that received nothing.
    `resume_timeout_s`: how long to try without progress.
    """

    resume: bool = True
    repeats_submit: bool = True
    resume_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Call:
    """A call to make now. `timeout_s` None: no deadline."""

    method: Literal["Generate", "Resume"]
    request: inference_pb2.GenerateRequest | inference_pb2.ResumeRequest
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Again:
    """A decision to make another call after a wait."""

    delay_s: float


def new_idempotency_key() -> str:
    """Returns a random key."""
    return secrets.token_urlsafe(16)


class Recovery:
    """One stream, from its first call to its end. Times are seconds of a monotonic clock."""

    def __init__(self, policy: RecoveryPolicy, timeout_s: float | None, now_s: float, random: Random) -> None:
        self.transcript = Transcript()
        self.num_resumes = 0
        self._policy = policy
        self._random = random
        self._deadline_s = None if timeout_s is None else now_s + timeout_s
        self._began_s = self._call_began_s = now_s
        self._request: inference_pb2.GenerateRequest | None = None
        self._shows_token_ids = True
        self._new_key: Callable[[], str] | None = None
        self._token: tuple[str, str] | None = None
        self._seed: int | None = None
        self._received: list[Received] = [Received()]
        self._has_choices = False
        self._method: Literal["Generate", "Resume"] = "Generate"
        self._has_asked = False
        # Whether an earlier call may have started the request of the current call.
        self._is_repeat = False
        # The time of the current call's first event.
        self._answered_s: float | None = None
        self._has_begun = False
        self._has_ended = False
        self._is_lost = False
        self._is_continuing = False
        self._has_retaken = False
        # Since the last progress: the time of the first break, the number of breaks, and the first error.
        self._broke_s: float | None = None
        self._num_breaks = 0
        self._first_error: InflightError | None = None

    @classmethod
    def of_request(
        cls,
        request: inference_pb2.GenerateRequest,
        policy: RecoveryPolicy,
        *,
        timeout_s: float | None,
        now_s: float,
        random: Random,
        new_key: Callable[[], str],
    ) -> Recovery:
        """Returns the recovery of a stream for a new request."""
        recovery = cls(policy, timeout_s, now_s, random)
        recovery._request = sent = inference_pb2.GenerateRequest()
        sent.CopyFrom(request)
        recovery._shows_token_ids = request.output.token_ids
        if policy.resume:
            sent.output.token_ids = True
            if not (request.request_id or request.idempotency_key):
                sent.idempotency_key = new_key()
                recovery._new_key = new_key
        prior = request.prior_output
        text_bytes = prior.text_bytes if prior.HasField("text_bytes") or not prior.output_ids else None
        recovery._received = [Received(tuple(prior.output_ids), text_bytes=text_bytes)]
        recovery._received += [Received() for _ in range(1, request.n)]
        recovery._has_choices = max(request.n, request.best_of) > 1
        recovery.transcript.choices = [Choice() for _ in recovery._received]
        return recovery

    @classmethod
    def of_running(
        cls,
        request: inference_pb2.ResumeRequest,
        policy: RecoveryPolicy,
        *,
        timeout_s: float | None,
        now_s: float,
        random: Random,
    ) -> Recovery:
        """Returns the recovery of a stream for a request that is running or ended recently. The caller already has the
        output before the offsets of `request`."""
        recovery = cls(policy, timeout_s, now_s, random)
        recovery._token = (request.request_id, request.resume_token)
        offsets, text_bytes = list(request.offsets) or [0], list(request.text_bytes)
        recovery._received = [
            Received(
                offset=offset, text_bytes=text_bytes[choice] if choice < len(text_bytes) else None if offset else 0
            )
            for choice, offset in enumerate(offsets)
        ]
        recovery.transcript.choices = [Choice() for _ in offsets]
        recovery.transcript.request_id, recovery.transcript.resume_token = recovery._token
        return recovery

    def call(self, now_s: float) -> Call:
        """Returns the call to make now."""
        self._call_began_s, self._answered_s = now_s, None
        timeout_s = None if self._deadline_s is None else max(0.0, self._deadline_s - now_s)
        self._is_repeat = self._has_asked or self._token is not None
        if self._token is not None:
            self._method = "Resume"
            return Call("Resume", self._resume_request(), timeout_s)
        assert self._request is not None
        self._method = "Generate"
        request = self._generate_request(now_s)
        if self._has_choices:
            for received in self._received:
                received.expect_all_again()
        self._has_asked = True
        return Call("Generate", request, timeout_s)

    def take(self, wire: inference_pb2.StreamEvent, now_s: float) -> list[Event]:
        """Returns the events for the user that a message adds to those before it.

        Raises:
            InflightError: output is missing, or does not continue the received output.
        """
        events: list[Event] = []
        self._answered_s = now_s if self._answered_s is None else self._answered_s
        new = self._new_delta(wire.delta) if wire.HasField("delta") else self._new_of(wire, now_s)
        if self._is_continuing and not self._is_lost:
            self._is_continuing = False
            self.num_resumes += 1
            events.append(Resumed(self.num_resumes, "" if self._first_error is None else str(self._first_error)))
        self._has_begun = True
        if new is not None:
            self.transcript.take(new)
            self._note_progress()
            events.append(new)
        return events

    def broken(self, error: InflightError | None, now_s: float) -> Again | None:
        """Decides what to do after a call has ended, with or without an error. Returns None if the stream has ended.

        Raises:
            InflightError: the stream cannot be continued.
        """
        if self._has_ended or (error is None and not self._policy.resume):
            return None
        error = error or InflightError(grpc.StatusCode.INTERNAL, "the stream ended before its last event")
        if self._new_key is not None and _refuses_key(error):
            self._drop_key()
            return Again(0.0)
        if not self._is_recoverable(error, now_s):
            raise self._told(error)
        if self._says_lost(error):
            self._submit_again()
        if now_s - self._call_began_s > ANSWERED_S:
            self._has_begun = True
            self._note_progress()
        self._is_continuing = self._has_begun
        self._broke_s = now_s if self._broke_s is None else self._broke_s
        self._first_error = self._first_error or error
        return self._after_wait(error, now_s)

    def _after_wait(self, error: InflightError, now_s: float) -> Again:
        assert self._broke_s is not None
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self._num_breaks)
        delay_s = self._random.uniform(0.0, backoff_s)
        if self._num_breaks or error.reason != Reason.DRAINING.value:
            # The retry time of a draining router does not apply to other routers.
            delay_s = max(delay_s, error.retry_after_s or 0.0)
        self._num_breaks += 1
        patience_s = self._policy.resume_timeout_s
        if not self._has_begun:
            patience_s = min(patience_s, SUBMIT_TIMEOUT_S)
        deadline_s = self._total_deadline_s()
        if deadline_s is not None and now_s + delay_s >= deadline_s:
            text = f"the deadline passes before the request can go on: {error}"
            raise InflightError(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        if now_s + delay_s > self._broke_s + patience_s:
            raise self._told(error)
        return Again(delay_s)

    def _is_recoverable(self, error: InflightError, now_s: float) -> bool:
        if not self._policy.resume or not (self._has_begun or self._policy.repeats_submit):
            return False
        if self._says_lost(error):
            return self._can_submit_again()
        match error.code:
            case grpc.StatusCode.UNAVAILABLE:
                return self._has_begun or not names_no_host(error)
            case grpc.StatusCode.ABORTED:
                return error.reason != Reason.TAKEN_OVER.value or self._may_retake(now_s)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return self._has_begun and error.retry_after_s is not None
            case code:
                return code in _BROKEN_UNLESS_OURS and not error.reason

    def _may_retake(self, now_s: float) -> bool:
        """Returns whether the reader that took the stream over may be an earlier call of this client.

        True at most once, because two clients of a request must not take it from each other forever.
        """
        is_soon = now_s - self._call_began_s < LATE_TRY_S
        answered_s = now_s if self._answered_s is None else self._answered_s
        has_tried_before = self._num_breaks > 0 or answered_s - self._call_began_s > UNREPEATED_S
        may = is_soon and has_tried_before and not self._has_retaken
        self._has_retaken = True
        return may

    def _says_lost(self, error: InflightError) -> bool:
        """Returns whether the server has lost the output."""
        if self._is_lost:
            return True
        if self._method == "Generate":
            return error.code is grpc.StatusCode.DATA_LOSS and self._new_key is not None
        # An invalid offset: the server has less output than was received.
        is_behind = any(field.field.startswith("offsets") for field in error.fields)
        return error.code in _OUTPUT_LOST or is_behind

    def _told(self, error: InflightError) -> InflightError:
        """Returns the error for the user. If a router does not implement `Resume`, this is the error that broke the
        stream, which is more useful."""
        if error.code is grpc.StatusCode.UNIMPLEMENTED and self._first_error is not None:
            return self._first_error
        return error

    def _can_submit_again(self) -> bool:
        """Returns whether a new Generate can continue the stream.

        A request with one choice continues after the received output. A request with several choices starts from the
        beginning, because `prior_output` has no choices. Received output is then cut off, which is not possible for
        parts.
        """
        if self._has_choices and self.transcript.has_parts and any(one.num_tokens for one in self._received):
            return False
        return self._request is not None and all(received.has_all_ids for received in self._received)

    def _submit_again(self) -> None:
        assert self._request is not None
        self._token = None
        is_key_spent = self._method == "Generate" and self._new_key is not None
        if is_key_spent:
            assert self._new_key is not None
            self._request.idempotency_key = self._new_key()
        elif not self._request.idempotency_key and self._has_begun:
            # The server may still know the id, but no longer has the output.
            self._request.request_id = ""
        if self._seed is not None and (is_key_spent or not self._request.idempotency_key):
            self._request.sampling.seed = self._seed
        self._is_lost = False

    def _drop_key(self) -> None:
        """Removes the idempotency key, for a router of an earlier version that does not support it."""
        assert self._request is not None
        self._request.idempotency_key = ""
        self._new_key = None

    def _resume_request(self) -> inference_pb2.ResumeRequest:
        assert self._token is not None
        request = inference_pb2.ResumeRequest(request_id=self._token[0], resume_token=self._token[1])
        request.offsets.extend(received.num_tokens for received in self._received)
        text_bytes = [received.text_bytes for received in self._received]
        request.text_bytes.extend(count for count in text_bytes if count is not None and None not in text_bytes)
        return request

    def _generate_request(self, now_s: float) -> inference_pb2.GenerateRequest:
        assert self._request is not None
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        received = self._received[0]
        if received.num_tokens and received.has_all_ids and not self._has_choices:
            request.prior_output.Clear()
            request.prior_output.output_ids.extend(received.token_ids)
            if received.text_bytes is not None:
                request.prior_output.text_bytes = received.text_bytes
        if self._has_asked and not request.idempotency_key and request.deadlines.HasField("total"):
            # Routers do not know when the request began, so the remaining time is sent. With a key, the deadline must
            # stay the same, because routers compare it.
            left_s = request.deadlines.total.ToNanoseconds() / 1e9 - (now_s - self._began_s)
            request.deadlines.total.FromNanoseconds(max(1, round(left_s * 1e9)))
        return request

    def _new_of(self, wire: inference_pb2.StreamEvent, now_s: float) -> Event | None:
        """Returns the part of an event that was not received before. None if nothing is new, or if this version does
        not know the kind of event."""
        new = self._cut(wire, now_s)
        return None if new is None else decode_event(new)

    def _cut(self, wire: inference_pb2.StreamEvent, now_s: float) -> inference_pb2.StreamEvent | None:
        match wire.WhichOneof("event"):
            case "accepted":
                return self._new_accepted(wire)
            case "queued" if wire.queued.resume_token:
                self._token = (wire.queued.request_id, wire.queued.resume_token)
            case "started" if self.transcript.executor_id is not None:
                self.transcript.add(wire)
                return None
            case "prompt":
                return self._new_prompt(wire)
            case "finished":
                return self._new_finished(wire, now_s)
            case "done":
                self._has_ended = not self._is_lost
                return wire if self._has_ended else None
        return wire

    def _new_accepted(self, wire: inference_pb2.StreamEvent) -> inference_pb2.StreamEvent | None:
        accepted = wire.accepted
        self._token = (accepted.request_id, accepted.resume_token)
        if accepted.sampling.HasField("seed"):
            self._seed = accepted.sampling.seed
        if self.transcript.prompt_tokens is None:
            return wire
        self.transcript.add(wire)
        return None

    def _new_prompt(self, wire: inference_pb2.StreamEvent) -> inference_pb2.StreamEvent | None:
        """Cuts off the tokens of the prompt that were received before. A stream that continues before the output sends
        them again."""
        prompt, num_known = wire.prompt, len(self.transcript.prompt_token_ids)
        if prompt.offset > num_known:
            text = f"tokens [{num_known}, {prompt.offset}) of the prompt never came"
            raise InflightError(grpc.StatusCode.INTERNAL, text)
        num_repeated = num_known - prompt.offset
        del prompt.token_ids[:num_repeated], prompt.logprobs[:num_repeated]
        prompt.offset = num_known
        return wire if prompt.token_ids else None

    def _new_delta(self, wire: inference_pb2.Delta) -> Delta | None:
        while len(self._received) <= wire.choice:
            self._received.append(Received())
        return self._received[wire.choice].take(wire, shows_token_ids=self._shows_token_ids)

    def _new_finished(self, wire: inference_pb2.StreamEvent, now_s: float) -> inference_pb2.StreamEvent | None:
        while len(self._received) <= wire.finished.choice:
            self._received.append(Received())
        received = self._received[wire.finished.choice]
        if received.has_finished:
            return None
        if wire.finished.reason == types_pb2.FINISH_REASON_CANCELLED and self._was_cancelled_for_us(now_s):
            self._is_lost = True
            return None
        received.has_finished = True
        return wire

    def _was_cancelled_for_us(self, now_s: float) -> bool:
        """Returns whether the request was cancelled because the earlier connection broke."""
        assert self._answered_s is not None
        return self._is_repeat and now_s - self._answered_s < VANISHED_S and self._can_submit_again()

    def _note_progress(self) -> None:
        self._broke_s, self._num_breaks, self._first_error = None, 0, None

    def _total_deadline_s(self) -> float | None:
        deadlines = [] if self._deadline_s is None else [self._deadline_s]
        if self._request is not None and self._request.deadlines.HasField("total"):
            deadlines.append(self._began_s + self._request.deadlines.total.ToNanoseconds() / 1e9)
        return min(deadlines, default=None)


def _refuses_key(error: InflightError) -> bool:
    fields = {field.field for field in error.fields}
    return error.code is grpc.StatusCode.UNIMPLEMENTED and "idempotency_key" in fields
