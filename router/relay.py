"""From what executors send to what the client reads, for one request.

Detokenizes, matches stop strings and writes events. While one write is under way tokens collect and leave together in
the next event, so a slow client gets fewer, larger events and holds up nobody. Nothing is written before the request
has a seat, unless queue events are asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from google.protobuf import duration_pb2
from inflight.v1 import inference_pb2, types_pb2

from router.store.types import Queued
from router.streams import End, News, RequestStream
from router.text.output import OutputText, TextStep

Write = Callable[[inference_pb2.StreamEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """What the client wants to read. `accepted` is the event that begins the stream."""

    accepted: inference_pb2.Accepted
    wants_text: bool
    wants_token_ids: bool
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Absolute deadlines in seconds of `time.monotonic`; None: none."""

    first_token: float | None
    total: float | None

    def next(self, has_first_token: bool) -> float | None:
        """The one that holds now."""
        candidates = [d for d in (None if has_first_token else self.first_token, self.total) if d is not None]
        return min(candidates, default=None)


class Relay:
    """Writes the events of one request."""

    def __init__(
        self, stream: RequestStream, text: OutputText, options: RelayOptions, deadlines: Deadlines, write: Write
    ) -> None:
        self._stream = stream
        self._text = text
        self._options = options
        self._deadlines = deadlines
        self._write = write
        self._seq = 0
        self._has_told_accepted = False
        self._has_told_started = False
        self._num_migrations_told = 0
        self._end_name = "without an end"

    @property
    def summary(self) -> str:
        """How the request went, for the log: counts, times and the end; no text."""
        clock = self._stream.clock
        first_token_ms = "-" if clock.first_token is None else f"{(clock.first_token - clock.arrived) * 1000:.0f} ms"
        return (
            f"ended {self._end_name}: {self._options.num_prompt_tokens} prompt tokens, {self._text.num_tokens} output "
            f"tokens, first token after {first_token_ms}"
        )

    async def queued(self, queued: Queued) -> None:
        """Tells the client that it waits."""
        event = inference_pb2.Queued(position=queued.position)
        if queued.estimated_wait_ms is not None:
            event.estimated_wait.FromMilliseconds(queued.estimated_wait_ms)
        await self._send(inference_pb2.StreamEvent(queued=event))

    async def run(self) -> None:
        """Writes until the end of the request. Raises the `RequestError` that it failed with."""
        while True:
            news = await self._next_news()
            if news is None:
                await self._tell_held_text()
                await self._finish(inference_pb2.Finished(reason=types_pb2.FINISH_REASON_DEADLINE))
                return
            await self._tell_progress(news)
            step = await self._tell_tokens(news)
            if step.matched is not None:
                self._stream.has_matched_stop = True
                reason = types_pb2.FINISH_REASON_STOP_STRING
                await self._finish(inference_pb2.Finished(reason=reason, stop=step.matched))
                return
            if news.error is not None:
                raise news.error
            if news.end is not None:
                await self._tell_end(news.end)
                return

    async def _next_news(self) -> News | None:
        """What is new; None where a deadline passes first."""
        deadline = self._deadlines.next(self._stream.clock.first_token is not None)
        if deadline is None:
            return await self._stream.next()
        try:
            return await asyncio.wait_for(self._stream.next(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return None

    async def _tell_progress(self, news: News) -> None:
        if news.queued is not None and not (self._has_told_accepted or news.accepted):
            await self.queued(news.queued)
        if news.accepted and not self._has_told_accepted:
            self._has_told_accepted = True
            await self._send(inference_pb2.StreamEvent(accepted=self._options.accepted))
        if news.started and not self._has_told_started:
            self._has_told_started = True
            stream = self._stream
            assert stream.clock.boarded is not None
            started = inference_pb2.Started(
                executor_id=stream.executor_id,
                cached_tokens=stream.num_cached_tokens,
                queue=_duration(stream.clock.boarded - stream.clock.arrived),
            )
            await self._send(inference_pb2.StreamEvent(started=started))
        if news.paused:
            await self._notice(inference_pb2.Notice.KIND_PAUSED, "gave up its seat and waits for another")
        if news.accepted and self._stream.num_migrations > self._num_migrations_told:
            self._num_migrations_told = self._stream.num_migrations
            await self._notice(inference_pb2.Notice.KIND_MIGRATED, "continues on another executor")

    async def _notice(self, kind: inference_pb2.Notice.Kind, text: str) -> None:
        notice = inference_pb2.Notice(kind=inference_pb2.Notice.Kind.Name(kind), text=text)
        await self._send(inference_pb2.StreamEvent(notice=notice))

    async def _tell_tokens(self, news: News) -> TextStep:
        is_stop_token = news.end is not None and news.end.reason == types_pb2.FINISH_REASON_STOP_TOKEN
        step = self._text.feed(news.offset, news.token_ids, last_is_stop_token=is_stop_token)
        if news.end is not None and step.matched is None:
            rest = self._text.finish()
            step = TextStep(step.text + rest.text, step.num_tokens, rest.matched)
        if step.num_tokens or step.text:
            delta = inference_pb2.Delta(offset=news.offset, num_tokens=step.num_tokens)
            if self._options.wants_text:
                delta.text = step.text
            if self._options.wants_token_ids:
                delta.token_ids.extend(news.token_ids[: step.num_tokens])
            await self._send(inference_pb2.StreamEvent(delta=delta))
        return step

    async def _tell_held_text(self) -> None:
        """Sends what was held back as the possible beginning of a stop text; its tokens were told before."""
        text = self._text.finish().text
        if text and self._options.wants_text:
            delta = inference_pb2.Delta(offset=self._text.num_tokens, text=text)
            await self._send(inference_pb2.StreamEvent(delta=delta))

    async def _tell_end(self, end: End) -> None:
        finished = inference_pb2.Finished(reason=types_pb2.FinishReason.Name(end.reason))
        if end.stop_token_id is not None:
            finished.stop_token_id = end.stop_token_id
        await self._finish(finished)

    async def _finish(self, finished: inference_pb2.Finished) -> None:
        self._end_name = types_pb2.FinishReason.Name(finished.reason)
        await self._send(inference_pb2.StreamEvent(finished=finished))
        usage = types_pb2.Usage(
            prompt_tokens=self._options.num_prompt_tokens,
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
        event.attempt = self._stream.attempt
        self._seq += 1
        await self._write(event)


def _duration(seconds: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
