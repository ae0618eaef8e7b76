"""The relay of a request with several choices. It merges their streams into one sequence of events.

Each choice is a separate request in the ledger and on executors, and has its own `Relay`. The first Accepted and the
first Started of any choice are sent, and the queue events of choice 0. One Done ends the sequence after every choice
has finished. A choice that fails ends the request with its error.

Log probabilities of the prompt are sent from choice 0. The output of the other choices waits until they are sent.

If the client gets only the best choices, no output is sent before all choices have finished. The best choices are then
read again from the beginning, and numbered by rank.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from inflight.common.errors import FieldViolation, invalid
from inflight.router.ledger.types import Queued
from inflight.router.request.delivery import BEGINNING, ReadPosition
from inflight.router.request.errors import output_lost
from inflight.router.stream.relay import Relay, Write
from inflight.router.stream.request_stream import Reader, RequestStream, sum_of_used
from inflight.v1 import inference_pb2, types_pb2

Result = TypeVar("Result")

OUTPUT = frozenset({"delta", "finished"})


async def run_all(work: Iterable[Awaitable[Result]]) -> list[Result]:
    """Runs calls concurrently and returns their results, in order. If one fails, cancels the others and raises the
    first error."""

    async def run(one: Awaitable[Result]) -> Result:
        return await one

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(one)) for one in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class ChoicesRelay:
    """Writes the events of all choices for a reader that attends them. From `positions` on the client reads the choices
    that it gets."""

    def __init__(
        self, streams: Sequence[RequestStream], write: Write, positions: Sequence[ReadPosition], reader: Reader
    ) -> None:
        delivery = streams[0].delivery
        assert delivery is not None
        self.streams = tuple(streams)
        self._reader = reader
        self._accepted = delivery.accepted
        self._num_sent_choices = delivery.num_sent_choices
        num_left = delivery.num_sent_choices - len(positions)
        if num_left < 0:
            text = f"has {len(positions)} values; the client gets {delivery.num_sent_choices} choices of this request"
            raise invalid(FieldViolation("offsets", text))
        self._positions = (*positions, *(BEGINNING,) * num_left)
        self._write = write
        self._writing = asyncio.Lock()
        self._seq = 0
        self._has_sent_accepted = False
        self._has_sent_started = any(position.is_started for position in self._positions)
        self._holds_output = delivery.picks_best
        # Set when the log probabilities of the prompt have been sent.
        self._prompt_told = asyncio.Event()
        if not delivery.wants_prompt_logprobs:
            self._prompt_told.set()
        self._done: dict[int, inference_pb2.Done] = {}
        self._reasons: Counter[str] = Counter()
        positions = (BEGINNING,) * len(self.streams) if self._holds_output else self._positions
        self._relays = self._relays_of(self.streams, positions)

    def _relays_of(self, streams: Sequence[RequestStream], positions: Sequence[ReadPosition]) -> list[Relay]:
        return [
            Relay(stream, functools.partial(self._take, choice), position, self._reader)
            for choice, (stream, position) in enumerate(zip(streams, positions, strict=True))
        ]

    @property
    def summary(self) -> str:
        """The number of choices and their finish reasons, for the log. Contains no output."""
        ends = ", ".join(f"{count} {name}" for name, count in sorted(self._reasons.items()))
        return f"with {len(self.streams)} choices ended: {ends or 'without an end'}"

    async def queued(self, queued: Queued) -> None:
        """Sends the position of the first choice in the queue to the client."""
        await self._relays[0].queued(queued)

    async def run(self) -> None:
        """Writes until the end of the request. Raises the `RequestError` of a choice that failed, or TAKEN_OVER if
        another reader replaced this one."""
        await run_all([relay.run() for relay in self._relays])
        if self._holds_output:
            self._holds_output = False
            self._prompt_told.set()
            best = self._best()
            for stream in best:
                stream.attend(self._reader)
            self._relays[: len(best)] = self._relays_of(best, self._positions)
            await run_all([relay.run() for relay in self._relays[: len(best)]])
        await self._send(inference_pb2.StreamEvent(done=self._merged_done()))

    def _best(self) -> list[RequestStream]:
        """Returns the choices with the highest mean log probability, the best first. Raises `RequestError` if log
        probabilities are no longer known."""
        scores: list[float] = []
        for relay in self._relays:
            score = relay.mean_logprob
            if score is None:
                raise output_lost("log probabilities that the best choices are found by are not known any more")
            scores.append(score)
        ranks = sorted(range(len(scores)), key=lambda choice: -scores[choice])
        return [self.streams[choice] for choice in ranks[: self._num_sent_choices]]

    async def _take(self, choice: int, event: inference_pb2.StreamEvent) -> None:
        """Sends the event of a choice. Drops an event that the request has only once and that was already sent."""
        kind = event.WhichOneof("event")
        if kind == "done":
            self._done.setdefault(choice, event.done)
            return
        if kind in OUTPUT:
            if choice == 0:
                self._prompt_told.set()
            if self._holds_output:
                return
            await self._prompt_told.wait()
        match kind:
            case "prompt" if self._prompt_told.is_set():
                return
            case "queued" if choice:
                return
            case "queued" if self._has_sent_accepted:
                return
            case "accepted":
                if self._has_sent_accepted:
                    return
                self._has_sent_accepted = True
                event.accepted.CopyFrom(self._accepted)
            case "started":
                if self._has_sent_started:
                    return
                self._has_sent_started = True
            case "notice":
                event.notice.text = f"choice {choice} {event.notice.text}"
            case "delta":
                event.delta.choice = choice
            case "finished":
                event.finished.choice = choice
                self._reasons[types_pb2.FinishReason.Name(event.finished.reason)] += 1
        await self._send(event)

    async def _send(self, event: inference_pb2.StreamEvent) -> None:
        """Writes an event. Finishes a write that has started even if another choice has failed: gRPC does not deliver
        the status of a call whose first write was cancelled, so the client would wait until its deadline."""
        async with self._writing:
            event.seq = self._seq
            self._seq += 1
            writing = asyncio.ensure_future(self._write(event))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.gather(writing, return_exceptions=True)
                raise

    def _merged_done(self) -> inference_pb2.Done:
        """Returns the Done of the request. The prompt counts once; its cached tokens are the fewest of any choice.
        Times are those of the choice with the earliest first token, and the decode time is the longest of all."""
        dones = [self._done[choice] for choice in sorted(self._done)]
        usages = [done.usage for done in dones]
        timings = [done.timing for done in dones]
        first = min(timings, key=_first_token_ns)
        timing = types_pb2.Timing(migrations=sum(one.migrations for one in timings))
        for name in ("queue", "prefill", "time_to_first_token"):
            if first.HasField(name):
                getattr(timing, name).CopyFrom(getattr(first, name))
        decodes = [one.decode for one in timings if one.HasField("decode")]
        if decodes:
            timing.decode.CopyFrom(max(decodes, key=lambda decode: decode.ToNanoseconds()))
        usage = types_pb2.Usage(
            prompt_tokens=usages[0].prompt_tokens,
            cached_tokens=min(one.cached_tokens for one in usages),
            output_tokens=sum(one.output_tokens for one in usages),
            reasoning_tokens=sum(one.reasoning_tokens for one in usages),
        )
        if all(one.HasField("resources") for one in usages):
            usage.resources.CopyFrom(sum_of_used(one.resources for one in usages))
        return inference_pb2.Done(usage=usage, timing=timing)


def _first_token_ns(timing: types_pb2.Timing) -> float:
    if not timing.HasField("time_to_first_token"):
        return float("inf")
    return timing.time_to_first_token.ToNanoseconds()


AnyRelay = Relay | ChoicesRelay


def relay_of(
    streams: Sequence[RequestStream], write: Write, positions: Sequence[ReadPosition], reader: Reader
) -> AnyRelay:
    """Returns the relay of a request with these choices, for a reader that attends them. Raises `RequestError` if there
    are more `positions` than choices that the client gets."""
    if len(streams) > 1:
        return ChoicesRelay(streams, write, positions, reader)
    return Relay(streams[0], write, positions[0] if positions else BEGINNING, reader)
