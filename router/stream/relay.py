"""The relay of one request. It turns the output that executors send into the events that the client reads.

It detokenizes, matches stop strings and writes events. While a write is in progress, tokens collect and are sent
together in the next event. A slow client therefore gets fewer, larger events and delays no other request. Nothing is
written before an executor has accepted the request, except queue events if the client asks for them. A client that
already has part of the output gets only the rest. The whole output is detokenized again for that, so the text is the
same as if it had been read without interruption.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from google.protobuf import duration_pb2

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.types import Queued
from inflight.router.lifecycle.events import DEADLINE_END, End
from inflight.router.request.delivery import BEGINNING, Delivery, ReadPosition
from inflight.router.request.errors import beyond_output, output_lost
from inflight.router.request.ids import choice_of
from inflight.router.stream.parts import ReasoningCount, wire_parts
from inflight.router.stream.request_stream import UNKNOWN_LOGPROBS, News, Reader, RequestStream
from inflight.router.tools.parser import Part
from inflight.v1 import inference_pb2, types_pb2

log = logging.getLogger(__name__)

Event = TypeVar("Event")
OnWritten = Callable[[BaseException | None], None]

# Long enough for a stalled client that reads again to see the error of its call, and to resume.
STALLED_GRACE_S = 10.0


@runtime_checkable
class EventWriter(Protocol):
    """A writer of events.

    A task writes with `await writer(event)`. A callback writes with `begin`, which must not be used if `needs_task`.
    `on_end` is called once, with the error of the write or None. There is one write at a time.
    """

    needs_task: bool

    async def __call__(self, event: inference_pb2.StreamEvent, /) -> None: ...

    def begin(self, event: inference_pb2.StreamEvent, on_end: OnWritten) -> None: ...

    def close(self) -> None:
        """Drops the callback of the write in progress, if any."""
        ...


class TimedWriter(Generic[Event]):
    """The writer of one call. A write that takes longer than `timeout_s` fails with `RequestError` STALLED. During a
    write, gRPC holds one event and the router holds the ids of later tokens. Only the client's own call waits.

    A task writes with `await writer(event)`. A callback starts a write with `begin`, which must not be used if
    `needs_task`. `begin` runs `write` without a task, so `write` may only await futures of the event loop, as gRPC's
    does. There is one write at a time.
    """

    def __init__(
        self, write: Callable[[Event], Coroutine[Any, Any, None]], timeout_s: float, *, needs_task: bool = False
    ) -> None:
        self._write = write
        self.needs_task = needs_task
        self._timeout_s = timeout_s
        self._on_end: OnWritten | None = None
        # One timer for all writes that `begin` starts. It is scheduled again only when it fires.
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    async def __call__(self, event: Event) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._write(event)
        except TimeoutError as error:
            raise stalled(self._timeout_s) from error

    def begin(self, event: Event, on_end: OnWritten) -> None:
        """Starts a write. `on_end` is called once, with its error or None, possibly before this method returns."""
        assert self._on_end is None, "one write at a time"
        self._on_end = on_end
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(self._due_s, self._look)
        self._advance(self._write(event))

    def close(self) -> None:
        """Drops the callback of the write in progress, if any, and its timer."""
        self._on_end = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _advance(self, writing: Coroutine[Any, Any, None]) -> None:
        """Runs a write until it awaits a future or ends, as a task would."""
        try:
            future = writing.send(None)
        except StopIteration:
            self._end(None)
        except (Exception, asyncio.CancelledError) as error:  # gRPC raises CancelledError if the call has ended
            self._end(error)
        else:
            future._asyncio_future_blocking = False  # as a task does with a future that its coroutine awaits
            future.add_done_callback(lambda _: self._advance(writing))

    def _end(self, error: BaseException | None) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(error)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if self._on_end is None:
            return
        if loop.time() < self._due_s:
            self._timer = loop.call_at(self._due_s, self._look)
        else:
            self._end(stalled(self._timeout_s))


def stalled(timeout_s: float) -> RequestError:
    """Returns the error for a stream that its client has not read for `timeout_s` seconds."""
    text = f"the stream was not read for {timeout_s:g} s; resume it from the next offset"
    return RequestError(Reason.STALLED, text)


def grace_after(error: RequestError) -> float:
    """Returns the seconds for which a request continues after its call ended with this error, even if its client has
    not requested that."""
    return STALLED_GRACE_S if error.reason is Reason.STALLED else 0.0


def unattended_s(delivery: Delivery | None, grace_s: float, most_s: float) -> float | None:
    """Returns for how many seconds a request continues without a reader; None: to its end.

    A finite time is at least `grace_s` and at most `most_s`, unless the client set `resume_ttl` to 0.
    """
    if delivery is None:
        return 0.0
    if delivery.unattended_s is None or delivery.kept_s == 0:
        return delivery.unattended_s
    return min(max(delivery.unattended_s, grace_s), most_s)


# How long a client waits for what its request has used, after its end.
RESOURCES_TIMEOUT_S = 2.0
# Most prompt tokens in one event with log probabilities, which may have 20 top tokens each.
SCORES_PER_EVENT = 256
# Most prompt tokens in one event with their text.
ECHO_TOKENS = 1024

Write = Callable[[inference_pb2.StreamEvent], Coroutine[Any, Any, None]]


class Relay:
    """Writes the events of one request for a reader that attends its stream, from `position` on. Without `write`, it
    drains the stream and writes nothing."""

    def __init__(
        self,
        stream: RequestStream,
        write: Write | None,
        position: ReadPosition = BEGINNING,
        reader: Reader | None = None,
    ) -> None:
        assert stream.delivery is not None
        self._stream = stream
        self._delivery = stream.delivery
        self._text = self._delivery.new_text()
        self._parser = None if self._delivery.new_parser is None else self._delivery.new_parser()
        self._unsent_parts: list[Part] = []
        self._reasoning = None if self._parser is None else ReasoningCount(self._parser)
        self._write = write
        self._writer = write if isinstance(write, EventWriter) else None
        self._position = position
        # Bytes of text that the client has. None: unknown until the tokens that it has are detokenized again.
        self._num_bytes_known = position.text_bytes if position.offset else position.text_bytes or 0
        self._num_text_bytes = 0
        self._reader = reader
        self._seq = 0
        # The offset of the first token that has not been sent, and the text that has not been sent. All tokens before
        # `_num_sent` were written, which the end of the request checks.
        self._next_offset = self._num_sent = position.offset
        self._unsent_text = ""
        # State of writes that a callback starts for new tokens, without waking this relay's task: whether a write may
        # start now, whether none is in progress, the offset and number of its tokens, and the error of a failed write.
        self._may_begin = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._being_sent = (0, 0)
        self._failure: BaseException | None = None
        self._has_sent_queued = False
        self._has_sent_accepted = False
        self._has_sent_started = position.is_started
        self._num_prompt_sent = 0
        self._has_echoed = False
        self._has_sent_tokens = False
        self._num_migrations_told = stream.num_migrations
        self._end_name = "without an end"

    @property
    def streams(self) -> tuple[RequestStream, ...]:
        """The stream."""
        return (self._stream,)

    @property
    def mean_logprob(self) -> float | None:
        """The mean log probability of the relayed tokens; None if the log probability of a token is not known."""
        return self._stream.mean_logprob(self._text.num_tokens)

    @property
    def summary(self) -> str:
        """Token counts, times and the end of the request, for the log. Contains no output."""
        clock = self._stream.clock
        first_token_ms = "-" if clock.first_token is None else f"{(clock.first_token - clock.arrived) * 1000:.0f} ms"
        return (
            f"ended {self._end_name}: {self._delivery.accepted.prompt_tokens} prompt tokens, {self._text.num_tokens} "
            f"output tokens, first token after {first_token_ms}"
        )

    async def queued(self, queued: Queued) -> None:
        """Sends the request's position in the queue to the client."""
        event = inference_pb2.Queued(position=queued.position)
        if not self._has_sent_queued:
            self._has_sent_queued = True
            event.request_id = self._delivery.accepted.request_id
            event.resume_token = self._delivery.accepted.resume_token
        if queued.estimated_wait_ms is not None:
            event.estimated_wait.FromMilliseconds(queued.estimated_wait_ms)
        await self._send(inference_pb2.StreamEvent(queued=event))

    async def run(self) -> None:
        """Writes until the end of the request. Raises the `RequestError` that the request failed with, or TAKEN_OVER if
        another reader replaced this one."""
        try:
            await self._run()
        finally:
            self._stop_listening()
            if self._writer is not None:
                self._writer.close()

    async def _run(self) -> None:
        while True:
            if not await self._wait():
                # A reader that was replaced must not end the request.
                self._stream.check_reader(self._reader)
                self._stream.finish(DEADLINE_END)
                await self._send_tokens(self._stream.take(self._reader))
                await self._finish(inference_pb2.Finished(reason=types_pb2.FINISH_REASON_DEADLINE))
                return
            news = self._stream.take(self._reader)
            await self._send_progress(news)
            await self._send_prompt(news)
            await self._send_tokens(news)
            if self._text.matched is not None:
                self._stream.stop()
                is_unfinished = None if self._parser is None else self._parser.is_unfinished
                await self._finish(_stopped_by(self._text.matched), is_unfinished)
                return
            if news.error is not None:
                raise news.error
            if news.end is not None:
                await self._send_end(news.end)
                return

    async def _wait(self) -> bool:
        """Waits for news that this task must handle. Returns False if a deadline passes first. Meanwhile, if only
        tokens are new, `_on_output` writes them without waking this task."""
        stream = self._stream
        # Not before the first token, because this task checks its deadline.
        is_reading_on = self._has_sent_tokens
        stream.listen(self._reader, self._on_output if is_reading_on else None)
        self._may_begin = is_reading_on and self._writer is not None and not self._writer.needs_task
        try:
            is_in_time = await self._wait_until_deadline()
        finally:
            self._stop_listening()
        await self._is_idle.wait()
        if self._failure is not None:
            raise self._failure
        return is_in_time

    def _stop_listening(self) -> None:
        self._may_begin = False
        self._stream.listen(self._reader, None)

    async def _wait_until_deadline(self) -> bool:
        stream = self._stream
        has_first_token = stream.clock.first_token is not None or stream.was_adopted
        deadline = None if stream.has_ended else self._delivery.next_deadline(has_first_token)
        if deadline is None:
            await stream.changed(self._reader)
            return True
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        try:
            # Not `asyncio.wait_for`: in Python 3.11 it can drop a cancel that arrives together with the news.
            async with asyncio.timeout(remaining_s):
                await stream.changed(self._reader)
        except TimeoutError:
            return False
        return True

    def _on_output(self) -> None:
        """Writes the new tokens if they are enough for an event. While a write is in progress, they wait for the
        next. Fewer are read only if they may contain a stop."""
        num_unsent = len(self._stream.output_ids) - self._next_offset
        if num_unsent < self._delivery.stream_interval and not self._text.has_stops:
            return
        if not self._may_begin:
            self._stream.wake()
        elif self._is_idle.is_set():
            self._begin_output()

    def _begin_output(self) -> None:
        try:
            offset, token_ids = self._stream.take_output(self._reader)
            self._feed(offset, token_ids, is_stop_token=False)
            if self._text.matched is not None:
                self._stream.wake()  # the task sends the rest and ends the request
                return
            if self._text.num_tokens - self._next_offset < self._delivery.stream_interval:
                return
            event = self._stamped(self._unsent())
        except Exception as error:
            self._end_output(error)
            return
        self._is_idle.clear()
        self._being_sent = (event.delta.offset, event.delta.num_tokens)
        assert self._writer is not None
        self._writer.begin(event, self._end_output)

    def _end_output(self, error: BaseException | None) -> None:
        self._is_idle.set()
        if error is not None:
            self._failure = error
            self._stream.wake()
            return
        self._record_sent(*self._being_sent)
        if self._may_begin:
            self._stream.publish_output()

    async def _send_progress(self, news: News) -> None:
        if news.queued is not None and not (self._has_sent_accepted or news.accepted):
            await self.queued(news.queued)
        if news.accepted and not self._has_sent_accepted:
            self._has_sent_accepted = True
            await self._send(inference_pb2.StreamEvent(accepted=self._delivery.accepted))
        if news.boarded and not self._has_sent_started:
            self._has_sent_started = True
            stream = self._stream
            started = inference_pb2.Started(executor_id=stream.life.executor_id, cached_tokens=stream.num_cached_tokens)
            if stream.clock.boarded is not None:
                started.queue.CopyFrom(_duration(stream.clock.boarded - stream.clock.arrived))
            await self._send(inference_pb2.StreamEvent(started=started))
        if news.preempted:
            await self._notice(inference_pb2.Notice.KIND_PAUSED, "gave up its seat and waits for another")
        if news.accepted and self._stream.num_migrations > self._num_migrations_told:
            self._num_migrations_told = self._stream.num_migrations
            await self._notice(inference_pb2.Notice.KIND_MIGRATED, "continues on another executor")

    async def _notice(self, kind: inference_pb2.Notice.Kind, text: str) -> None:
        notice = inference_pb2.Notice(kind=inference_pb2.Notice.Kind.Name(kind), text=text)
        await self._send(inference_pb2.StreamEvent(notice=notice))

    async def _send_prompt(self, news: News) -> None:
        """Sends the known log probabilities of the prompt and, before the output, the text of the prompt. A client that
        already has output has received the log probabilities."""
        delivery, begins_output = self._delivery, bool(news.token_ids) and not self._position.offset
        if delivery.wants_prompt_logprobs and (news.prompt_logprobs or begins_output) and not self._position.offset:
            num_known = len(news.prompt_logprobs) + 1
            if begins_output and num_known < len(delivery.prompt_ids):
                raise RequestError(Reason.INTERNAL, "the executor did not report the log probabilities of the prompt")
            while self._num_prompt_sent < num_known:
                await self._send_prompt_logprobs(news.prompt_logprobs[: num_known - 1])
        if delivery.echoes and not self._has_echoed and (news.token_ids or news.end is not None):
            self._has_echoed = True
            for first in range(0, len(delivery.prompt_ids), ECHO_TOKENS):
                text = self._unread(self._text.echo(delivery.prompt_ids[first : first + ECHO_TOKENS]))
                if text:
                    delta = inference_pb2.Delta(offset=self._position.offset, text=text)
                    await self._send(inference_pb2.StreamEvent(delta=delta))

    async def _send_prompt_logprobs(self, known: Sequence[types_pb2.PositionLogprobs]) -> None:
        """Sends the next tokens of the prompt. `known` are the log probabilities of the tokens after the first one of
        the prompt, which has none."""
        first, prompt_ids = self._num_prompt_sent, self._delivery.prompt_ids
        last = min(first + SCORES_PER_EVENT, len(known) + 1)
        event = inference_pb2.Prompt(offset=first, token_ids=prompt_ids[first:last])
        event.logprobs.extend([*([UNKNOWN_LOGPROBS] if first == 0 else ()), *known[max(0, first - 1) : last - 1]])
        self._name_tokens(event.logprobs)
        if first == 0:
            token = types_pb2.TokenLogprob(token_id=prompt_ids[0])
            self._delivery.name_token(token)
            event.first_text_bytes, event.first_is_special = token.text_bytes, token.is_special
        self._num_prompt_sent = last
        await self._send(inference_pb2.StreamEvent(prompt=event))

    async def _send_tokens(self, news: News) -> None:
        is_stop_token = news.end is not None and news.end.reason == types_pb2.FINISH_REASON_STOP_TOKEN
        num_known = min(max(0, self._position.offset - news.offset), len(news.token_ids))
        self._feed(news.offset, news.token_ids[:num_known], is_stop_token and num_known == len(news.token_ids))
        if self._num_bytes_known is None and self._text.num_tokens >= self._position.offset:
            self._num_bytes_known = self._num_text_bytes
        new_ids = news.token_ids[num_known:]
        self._feed(news.offset + num_known, new_ids, is_stop_token)
        if news.end is not None:
            self._unsent_text += self._unread(self._text.finish().text)
        await self._send_output(news.end is not None or news.error is not None or self._text.matched is not None)

    async def _send_output(self, is_last: bool) -> None:
        """Sends the unsent tokens and text if they are enough for an event or if `is_last`."""
        offset, num_tokens = self._next_offset, max(0, self._text.num_tokens - self._next_offset)
        if not (num_tokens or self._unsent_text):
            return
        if self._has_sent_tokens and not is_last and 0 < num_tokens < self._delivery.stream_interval:
            return
        await self._send(self._unsent())
        if num_tokens:
            self._has_sent_tokens = True
            self._record_sent(offset, num_tokens)

    def _unsent(self) -> inference_pb2.StreamEvent:
        """Returns an event with all unsent tokens and text, which then count as sent."""
        event = inference_pb2.StreamEvent()
        delta, delivery, first = event.delta, self._delivery, self._next_offset
        last = max(first, self._text.num_tokens)
        delta.offset, delta.num_tokens = first, last - first
        if delivery.wants_text:
            delta.text = self._unsent_text
        if self._unsent_parts:
            delta.parts.extend(wire_parts(self._unsent_parts, self._delivery.call_id))
            self._unsent_parts = []
        if delivery.wants_token_ids:
            delta.token_ids.extend(self._stream.output_ids[first:last])
        if delivery.wants_logprobs:
            delta.logprobs.extend(self._stream.logprobs_of(first, last))
            self._name_tokens(delta.logprobs)
        self._next_offset, self._unsent_text = last, ""
        return event

    def _record_sent(self, offset: int, num_tokens: int) -> None:
        if offset == self._num_sent:
            self._num_sent += num_tokens
        if self._write is not None:
            self._stream.record.sent(self._reader, offset, num_tokens, is_first_known=not self._stream.was_adopted)

    def _name_tokens(self, logprobs: Iterable[types_pb2.PositionLogprobs]) -> None:
        for values in logprobs:
            if values.HasField("chosen"):
                for token in (values.chosen, *values.top):
                    self._delivery.name_token(token)

    def _feed(self, offset: int, token_ids: list[int], is_stop_token: bool) -> None:
        """Detokenizes tokens, the first of which is at `offset`. While tokens may be reasoning, they are taken one at a
        time to count them."""
        if offset > self._text.num_tokens and token_ids and self._text.matched is None:
            raise self._incomplete()
        num_taken, counts = 0, True
        while counts and num_taken < len(token_ids) and self._text.matched is None:
            counts = self._reasoning is not None and not self._reasoning.is_over
            last = num_taken + 1 if counts else len(token_ids)
            ends = is_stop_token and last == len(token_ids)
            step = self._text.feed(offset + num_taken, token_ids[num_taken:last], last_is_stop_token=ends)
            self._unsent_text += self._unread(step.text)
            num_taken = last
            if self._reasoning is not None and counts:
                self._reasoning.take(step.num_tokens)

    def _unread(self, text: str) -> str:
        """Returns the part of the next text that the client does not have, and adds its parts to the unsent parts."""
        unread = self._cut_known(text)
        if self._parser is not None:
            self._parser.feed(text[: len(text) - len(unread)])
            self._unsent_parts += self._parser.feed(unread)
        return unread

    def _cut_known(self, text: str) -> str:
        if self._num_bytes_known == 0:
            return text
        encoded = text.encode()
        before, self._num_text_bytes = self._num_text_bytes, self._num_text_bytes + len(encoded)
        if self._num_bytes_known is None:
            return ""
        return encoded[max(0, self._num_bytes_known - before) :].decode(errors="ignore")

    async def _send_end(self, end: End) -> None:
        if self._position.offset > self._text.num_tokens:
            raise beyond_output(self._position.offset, self._text.num_tokens, choice_of(self._stream.request_id))
        if end.reason == types_pb2.FINISH_REASON_STOP_STRING:
            # Another router stopped the request there. The executor holds only a part of the output, so the text does
            # not reach the stop string here.
            raise output_lost("the output that is left of the request ends before its stop text")
        if self._text.num_tokens < len(self._stream.output_ids):
            raise self._incomplete()
        finished = inference_pb2.Finished(reason=types_pb2.FinishReason.Name(end.reason))
        if end.stop_token_id is not None:
            finished.stop_token_id = end.stop_token_id
        await self._finish(finished, end.constraint_unfinished)

    async def _finish(self, finished: inference_pb2.Finished, constraint_unfinished: bool | None = None) -> None:
        """Sends Finished and Done. Only the executor knows whether a constraint is satisfied, except that of calls;
        None: it has not reported it, so the constraint counts as unfinished. Raises `RequestError` unless every token
        before the end was sent."""
        if self._num_sent < self._text.num_tokens:
            raise self._incomplete()
        finished.constraint_unfinished = self._delivery.is_constrained and constraint_unfinished is not False
        self._end_name = types_pb2.FinishReason.Name(finished.reason)
        if self._parser is not None:
            finished.parts.extend(wire_parts(self._parser.finish(), self._delivery.call_id))
            finished.num_tool_calls = self._parser.num_calls
        await self._send(inference_pb2.StreamEvent(finished=finished))
        if self._delivery.wants_resources:
            await self._stream.end_on_executor(RESOURCES_TIMEOUT_S)
        usage = types_pb2.Usage(
            prompt_tokens=self._delivery.accepted.prompt_tokens,
            cached_tokens=self._stream.num_cached_tokens,
            output_tokens=self._text.num_tokens,
            reasoning_tokens=0 if self._reasoning is None else self._reasoning.num_tokens,
            resources=self._stream.used,
        )
        await self._send(inference_pb2.StreamEvent(done=inference_pb2.Done(usage=usage, timing=self._timing())))

    def _incomplete(self) -> RequestError:
        """Records a token that is missing, and returns the error that the client gets instead of an end."""
        num_known = len(self._stream.output_ids)
        log.error("%s: %d of %d tokens were sent before the end", self._stream.request_id, self._num_sent, num_known)
        self._stream.record.incomplete()
        return RequestError(Reason.INTERNAL, f"the output is incomplete after token {self._num_sent}; resume it there")

    def _timing(self) -> types_pb2.Timing:
        clock = self._stream.clock
        timing = types_pb2.Timing(migrations=self._stream.num_migrations)
        if clock.boarded is not None:
            timing.queue.CopyFrom(_duration(clock.boarded - clock.arrived))
            if clock.first_token is not None and clock.last_token is not None:
                timing.prefill.CopyFrom(_duration(clock.first_token - clock.boarded))
                timing.time_to_first_token.CopyFrom(_duration(clock.first_token - clock.arrived))
                timing.decode.CopyFrom(_duration(clock.last_token - clock.first_token))
        return timing

    async def _send(self, event: inference_pb2.StreamEvent) -> None:
        self._stamped(event)
        if self._write is not None:
            await self._write(event)

    def _stamped(self, event: inference_pb2.StreamEvent) -> inference_pb2.StreamEvent:
        event.seq = self._seq
        event.attempt = self._stream.life.attempt
        self._seq += 1
        return event


def _stopped_by(matched: str | int) -> inference_pb2.Finished:
    if isinstance(matched, int):
        return inference_pb2.Finished(reason=types_pb2.FINISH_REASON_STOP_TOKEN, stop_token_id=matched)
    return inference_pb2.Finished(reason=types_pb2.FINISH_REASON_STOP_STRING, stop=matched)


def _duration(seconds: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
