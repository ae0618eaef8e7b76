"""The relay of one request: from what executors send to what the client reads.

Detokenizes, matches stop strings and writes events. While one write is under way, tokens collect and leave together in
the next event. A slow client therefore gets fewer, larger events and delays no other request. Nothing is written before
the request has a seat, unless queue events are asked for. A client that already has part of the output gets only the
rest. The whole output passes through the text again, so the text is the same as if it had been read at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from google.protobuf import duration_pb2

from common.errors import Reason, RequestError
from inflight.v1 import inference_pb2, types_pb2
from router.lifecycle.events import DEADLINE_END, End
from router.request.errors import beyond_output, output_lost
from router.request.spec import BEGINNING, Delivery, ReadPosition
from router.store.types import Queued
from router.stream.request_stream import News, RequestStream
from router.text.output import TextStep

Event = TypeVar("Event")

# Long enough for a client that reads again to see how its call ended, and to resume.
STALLED_GRACE_S = 10.0


def with_write_timeout(
    write: Callable[[Event], Awaitable[None]], timeout_s: float
) -> Callable[[Event], Awaitable[None]]:
    """Returns a writer that raises `RequestError` STALLED if a write takes longer than `timeout_s`. Meanwhile gRPC
    holds one event and the router the ids of the tokens since. Only the client's own call waits."""

    async def bounded(event: Event) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await write(event)
        except TimeoutError as error:
            text = f"the stream was not read for {timeout_s:g} s; resume it from the next offset"
            raise RequestError(Reason.STALLED, text) from error

    return bounded


def grace_after(error: RequestError) -> float:
    """Returns the seconds for which a request continues after its call ended with an error, without its client asking
    for it."""
    return STALLED_GRACE_S if error.reason is Reason.STALLED else 0.0


def unattended_s(reading: Delivery | None, grace_s: float, most_s: float) -> float | None:
    """Returns for how many seconds a request continues without a reader; None: to its end. A `resume_ttl` of 0 is
    respected."""
    if reading is None:
        return 0.0
    if reading.unattended_s is None or reading.kept_s == 0:
        return reading.unattended_s
    return min(max(reading.unattended_s, grace_s), most_s)


# Tokens of a prompt in one event: with 20 likeliest tokens each, or as text.
SCORES_PER_EVENT = 256
ECHO_TOKENS = 1024
UNKNOWN_LOGPROBS = types_pb2.PositionLogprobs()

Write = Callable[[inference_pb2.StreamEvent], Awaitable[None]]


class Relay:
    """Writes the events of one request to its newest reader. Without `write` it drains the stream without a reader."""

    def __init__(self, stream: RequestStream, write: Write | None, place: ReadPosition = BEGINNING) -> None:
        assert stream.reading is not None
        self._stream = stream
        self._reading = stream.reading
        self._text = self._reading.new_text()
        self._write = write
        self._place = place
        # Bytes of the text that the client has. None: unknown until all its tokens have passed through the text.
        self._num_bytes_known = place.text_bytes if place.offset else place.text_bytes or 0
        self._num_text_bytes = 0
        self.reader = stream.reader
        self._seq = 0
        self._has_told_queued = False
        self._has_told_accepted = False
        self._has_told_started = place.is_started
        self._num_prompt_told = 0
        self._has_echoed = False
        self._num_migrations_told = stream.num_migrations
        self._end_name = "without an end"

    @property
    def summary(self) -> str:
        """Counts, times and the end of the request for the log; no text."""
        clock = self._stream.clock
        first_token_ms = "-" if clock.first_token is None else f"{(clock.first_token - clock.arrived) * 1000:.0f} ms"
        return (
            f"ended {self._end_name}: {self._reading.accepted.prompt_tokens} prompt tokens, {self._text.num_tokens} "
            f"output tokens, first token after {first_token_ms}"
        )

    async def queued(self, queued: Queued) -> None:
        """Sends the client the request's place in the queue."""
        event = inference_pb2.Queued(position=queued.position)
        if not self._has_told_queued:
            self._has_told_queued = True
            event.request_id = self._reading.accepted.request_id
            event.resume_token = self._reading.accepted.resume_token
        if queued.estimated_wait_ms is not None:
            event.estimated_wait.FromMilliseconds(queued.estimated_wait_ms)
        await self._send(inference_pb2.StreamEvent(queued=event))

    async def run(self) -> None:
        """Writes until the end of the request. Raises the `RequestError` that it failed with, or TAKEN_OVER."""
        while True:
            news = await self._next_news()
            if news is None:
                self._stream.finish(DEADLINE_END)
                await self._tell_held_text()
                await self._finish(inference_pb2.Finished(reason=types_pb2.FINISH_REASON_DEADLINE))
                return
            await self._tell_progress(news)
            await self._tell_prompt(news)
            step = await self._tell_tokens(news)
            if step.matched is not None:
                self._stream.stop()
                reason = types_pb2.FINISH_REASON_STOP_STRING
                await self._finish(inference_pb2.Finished(reason=reason, stop=step.matched))
                return
            if news.error is not None:
                raise news.error
            if news.end is not None:
                await self._tell_end(news.end)
                return

    async def _next_news(self) -> News | None:
        """Returns what is new; None if a deadline passes first."""
        stream = self._stream
        has_first_token = stream.clock.first_token is not None or stream.was_adopted
        deadline = None if stream.has_ended else self._reading.deadlines.next(has_first_token)
        if deadline is None:
            return await stream.next(self.reader)
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return None
        try:
            # `asyncio.wait_for` of Python 3.11 can drop a cancel that comes together with the news.
            async with asyncio.timeout(remaining_s):
                return await stream.next(self.reader)
        except TimeoutError:
            return None

    async def _tell_progress(self, news: News) -> None:
        if news.queued is not None and not (self._has_told_accepted or news.accepted):
            await self.queued(news.queued)
        if news.accepted and not self._has_told_accepted:
            self._has_told_accepted = True
            await self._send(inference_pb2.StreamEvent(accepted=self._reading.accepted))
        if news.started and not self._has_told_started:
            self._has_told_started = True
            stream = self._stream
            started = inference_pb2.Started(executor_id=stream.life.executor_id, cached_tokens=stream.num_cached_tokens)
            if stream.clock.boarded is not None:
                started.queue.CopyFrom(_duration(stream.clock.boarded - stream.clock.arrived))
            await self._send(inference_pb2.StreamEvent(started=started))
        if news.paused:
            await self._notice(inference_pb2.Notice.KIND_PAUSED, "gave up its seat and waits for another")
        if news.accepted and self._stream.num_migrations > self._num_migrations_told:
            self._num_migrations_told = self._stream.num_migrations
            await self._notice(inference_pb2.Notice.KIND_MIGRATED, "continues on another executor")

    async def _notice(self, kind: inference_pb2.Notice.Kind, text: str) -> None:
        notice = inference_pb2.Notice(kind=inference_pb2.Notice.Kind.Name(kind), text=text)
        await self._send(inference_pb2.StreamEvent(notice=notice))

    async def _tell_prompt(self, news: News) -> None:
        """Sends what is known of the prompt's log probabilities, and before the output the text of the prompt. A client
        that has output has had both."""
        reading, begins_output = self._reading, bool(news.token_ids) and not self._place.offset
        if reading.wants_prompt_logprobs and (news.prompt_logprobs or begins_output) and not self._place.offset:
            num_known = len(news.prompt_logprobs) + 1
            if begins_output and num_known < len(reading.prompt_ids):
                raise RequestError(Reason.INTERNAL, "the executor did not report the log probabilities of the prompt")
            while self._num_prompt_told < num_known:
                await self._tell_scores(news.prompt_logprobs[: num_known - 1])
        if reading.echoes and not self._has_echoed and (news.token_ids or news.end is not None):
            self._has_echoed = True
            for first in range(0, len(reading.prompt_ids), ECHO_TOKENS):
                text = self._unread(self._text.echo(reading.prompt_ids[first : first + ECHO_TOKENS]))
                if text:
                    delta = inference_pb2.Delta(offset=self._place.offset, text=text)
                    await self._send(inference_pb2.StreamEvent(delta=delta))

    async def _tell_scores(self, known: Sequence[types_pb2.PositionLogprobs]) -> None:
        """Sends the next tokens of the prompt, of which those after the first have `known` log probabilities."""
        first, prompt_ids = self._num_prompt_told, self._reading.prompt_ids
        last = min(first + SCORES_PER_EVENT, len(known) + 1)
        event = inference_pb2.Prompt(offset=first, token_ids=prompt_ids[first:last])
        event.logprobs.extend([*([UNKNOWN_LOGPROBS] if first == 0 else ()), *known[max(0, first - 1) : last - 1]])
        self._name_tokens(event.logprobs)
        if first == 0:
            token = types_pb2.TokenLogprob(token_id=prompt_ids[0])
            self._reading.name_token(token)
            event.first_text_bytes, event.first_is_special = token.text_bytes, token.is_special
        self._num_prompt_told = last
        await self._send(inference_pb2.StreamEvent(prompt=event))

    async def _tell_tokens(self, news: News) -> TextStep:
        is_stop_token = news.end is not None and news.end.reason == types_pb2.FINISH_REASON_STOP_TOKEN
        num_known = min(max(0, self._place.offset - news.offset), len(news.token_ids))
        known = self._feed(news.offset, news.token_ids[:num_known], is_stop_token and num_known == len(news.token_ids))
        text = self._unread(known.text)
        if self._num_bytes_known is None and self._text.num_tokens >= self._place.offset:
            self._num_bytes_known = self._num_text_bytes
        new_ids = news.token_ids[num_known:]
        step = self._feed(news.offset + num_known, new_ids, is_stop_token)
        text += self._unread(step.text)
        if news.end is not None and step.matched is None:
            rest = self._text.finish()
            text += self._unread(rest.text)
            step = TextStep(step.text, step.num_tokens, rest.matched)
        if step.num_tokens or text:
            offset = max(news.offset + num_known, self._place.offset)
            delta = inference_pb2.Delta(offset=offset, num_tokens=step.num_tokens)
            if self._reading.wants_text:
                delta.text = text
            if self._reading.wants_token_ids:
                delta.token_ids.extend(new_ids[: step.num_tokens])
            if self._reading.wants_logprobs:
                known_logprobs = (news.logprobs.get(offset + i, UNKNOWN_LOGPROBS) for i in range(step.num_tokens))
                delta.logprobs.extend(known_logprobs)
                self._name_tokens(delta.logprobs)
            await self._send(inference_pb2.StreamEvent(delta=delta))
            if step.num_tokens and self._write is not None:
                self._stream.record.sent(
                    self.reader, offset, step.num_tokens, is_first_known=not self._stream.was_adopted
                )
        return step

    def _name_tokens(self, logprobs: Iterable[types_pb2.PositionLogprobs]) -> None:
        for values in logprobs:
            if values.HasField("chosen"):
                for token in (values.chosen, *values.top):
                    self._reading.name_token(token)

    def _feed(self, offset: int, token_ids: list[int], is_stop_token: bool) -> TextStep:
        return self._text.feed(offset, token_ids, last_is_stop_token=is_stop_token and bool(token_ids))

    def _unread(self, text: str) -> str:
        """Returns the part of the next piece of text that the client does not have."""
        encoded = text.encode()
        before, self._num_text_bytes = self._num_text_bytes, self._num_text_bytes + len(encoded)
        if self._num_bytes_known is None:
            return ""
        return encoded[max(0, self._num_bytes_known - before) :].decode(errors="ignore")

    async def _tell_held_text(self) -> None:
        """Sends the text that was held back as a possible beginning of a stop string. Its tokens were sent before."""
        text = self._unread(self._text.finish().text)
        if text and self._reading.wants_text:
            delta = inference_pb2.Delta(offset=self._text.num_tokens, text=text)
            await self._send(inference_pb2.StreamEvent(delta=delta))

    async def _tell_end(self, end: End) -> None:
        if self._place.offset > self._text.num_tokens:
            raise beyond_output(self._place.offset, self._text.num_tokens)
        if end.reason == types_pb2.FINISH_REASON_STOP_STRING:
            # Another router stopped it there. Its text does not reach the stop string here: the executor holds only a
            # part of it.
            raise output_lost("the output that is left of the request ends before its stop text")
        finished = inference_pb2.Finished(reason=types_pb2.FinishReason.Name(end.reason))
        if end.stop_token_id is not None:
            finished.stop_token_id = end.stop_token_id
        await self._finish(finished, end.constraint_unfinished)

    async def _finish(self, finished: inference_pb2.Finished, constraint_unfinished: bool | None = None) -> None:
        """Sends the end. Only the executor knows that a constraint is satisfied; None: it has not said so."""
        finished.constraint_unfinished = self._reading.is_constrained and constraint_unfinished is not False
        self._end_name = types_pb2.FinishReason.Name(finished.reason)
        await self._send(inference_pb2.StreamEvent(finished=finished))
        usage = types_pb2.Usage(
            prompt_tokens=self._reading.accepted.prompt_tokens,
            cached_tokens=self._stream.num_cached_tokens,
            output_tokens=self._text.num_tokens,
        )
        await self._send(inference_pb2.StreamEvent(done=inference_pb2.Done(usage=usage, timing=self._timing())))

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
        event.seq = self._seq
        event.attempt = self._stream.life.attempt
        self._seq += 1
        if self._write is not None:
            await self._write(event)


def _duration(seconds: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
