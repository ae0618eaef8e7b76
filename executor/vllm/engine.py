"""`VllmEngine`: takes the commands of the service as `Engine` does, and gives each sequence to vLLM as a request.

Admission stays with the ledger. The gate that guards our own engine guards vLLM too: it accepts at most the seats and
the standby, and no more blocks than vLLM has, so vLLM's own queue is never longer than the standby. Everything runs on
the event loop. vLLM reports each step (`StepStats`) after its tokens; what has come by then is published together, so
that routers get one frame per step.

vLLM does not say which of its requests run. A sequence counts as boarded from its first token on. If fewer requests run
than have boarded, vLLM has preempted the latest of them. Their blocks are then missing to others, so they count as
overrun until vLLM resumes them.

Usage has the tokens of each account and its time with seats. vLLM does not tell what a step computes, so busy time,
blocks, wasted drafts and recomputed tokens are not known and stay 0.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from inflight.common.time_of_day import unix_day
from inflight.executor.engine.accounting import Accounting
from inflight.executor.engine.deadlines import DeadlineHeap
from inflight.executor.engine.output import EngineOutput, ReportedSequence
from inflight.executor.engine.standby import StandbyDepth
from inflight.executor.scheduler.admission import Gate, Refusal
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.seat_view import SequencePhase, SequenceSnapshot
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, ScoredRows, Sequence
from inflight.executor.vllm.backend import Backend, BackendLostError, Produced, RefusedError, StepStats
from inflight.executor.vllm.parameters import cache_salt, replays, sampling_parameters
from inflight.executor.vllm.steps import Standing, StepCounts, Work

log = logging.getLogger(__name__)

# vLLM compiles some functions at their first use, while everything waits. On two busy cores that took 35 s.
FIRST_USE_S = 40.0
NO_STEP = StepStats(num_running=0, num_waiting=0, kv_usage=0.0)


@dataclass(slots=True, eq=False)
class Request:
    """A sequence that vLLM has. `seat` is its number for monitoring, None until its first token and while it is
    preempted. The last `num_replayed` of its tokens are still to be generated again."""

    sequence: Sequence
    num_replayed: int = 0
    reader: asyncio.Task[None] | None = None
    seat: int | None = None
    has_boarded: bool = False
    is_preempted: bool = False

    @property
    def phase(self) -> SequencePhase | None:
        """The phase of a sequence without a seat, None of one that has one."""
        if self.is_preempted:
            return SequencePhase.PREEMPTED
        return None if self.has_boarded else SequencePhase.STANDBY


class VllmEngine:
    """Implements `ServedEngine`. `publish` gets the results, `on_death` is called when vLLM has died. Must be used on
    the event loop's thread. `clock` is in seconds."""

    def __init__(
        self,
        backend: Backend,
        limits: SchedulerLimits,
        publish: Callable[[EngineOutput], None],
        on_death: Callable[[], None],
        clock: Callable[[], float] | None = None,
        today: Callable[[], int] = unix_day,
    ) -> None:
        facts = backend.facts
        self._backend = backend
        self._limits = limits
        self._publish = publish
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._block_size, self._num_blocks = facts.block_size, facts.num_blocks
        self._gate = Gate(
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_accepted=limits.max_num_sequences + limits.num_standby_sequences,
            context_length=limits.context_length,
        )
        # In order of acceptance, in which vLLM takes those of a class.
        self._requests: dict[Sequence, Request] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._free_seats = list(range(limits.max_num_sequences))
        self._deadlines = DeadlineHeap()
        self._timer: asyncio.TimerHandle | None = None
        self._standby = StandbyDepth(limits.num_standby_sequences)
        self._newest = NO_STEP
        self._steps = StepCounts(self._clock, limits.max_num_tokens)
        self._work = Work()
        self._accounting = Accounting()
        self._today = today
        self._output = EngineOutput(0)
        self._is_flush_due = False
        self._is_dead = False
        # Blocks in vLLM's prefix cache.
        self._num_published_blocks = 0
        backend.watch_steps(self._on_step)
        backend.watch_cache(self._on_cache)

    # Commands.

    @property
    def num_steps(self) -> int:
        """Steps of vLLM since the start."""
        return self._steps.num_steps

    @property
    def expected_step_s(self) -> float:
        """Steps are not predicted. One that first uses something of vLLM, such as log probabilities, may compile it."""
        return FIRST_USE_S

    def start(self) -> None:
        """Publishes the status of an idle engine."""
        self._flush_soon()

    def submit(self, sequence: Sequence, time_left_ms: int | None = None) -> None:
        """See `ServedEngine`."""
        if time_left_ms is not None:
            sequence.deadline_ms = self._now_ms() + time_left_ms
        refusal = self._offer(sequence)
        if refusal is not None:
            self._output.rejected.append((sequence, refusal))
        else:
            self._output.accepted.append(sequence)
            self._standby.refilled(self._clock())
            self._deadlines.add(sequence, self._requests)
            self._arm()
            self._make_way()
        self._flush_soon()

    def _offer(self, sequence: Sequence) -> Refusal | None:
        """Accepts the sequence and gives it to vLLM, or returns why not. A newer attempt ends an older one."""
        if self._gate.is_stale(sequence):
            return Refusal.STALE_ATTEMPT
        older = self._gate.find(sequence.request_id)
        if older is not None:
            self._end(older, FinishReason.CANCELLED)
        refusal = self._gate.enter(sequence, self._num_overrun_blocks)
        if refusal is not None:
            return refusal
        num_reserved_tokens = sequence.num_reserved_blocks * self._block_size
        sequence.length_limit = min(self._gate.max_total_tokens(sequence), num_reserved_tokens)
        is_replayed = replays(sequence, can_replay=self._backend.facts.can_replay)
        request = self._requests[sequence] = Request(sequence, sequence.num_output_tokens if is_replayed else 0)
        if sequence.is_ready:
            self._begin(request)
        return None

    def _make_way(self) -> None:
        """Hands sequences of class batch back whose seats others wait for, as `Scheduler.giving_way` does."""
        boarded, others = self._boarded, self._others
        num_free = max(0, self._limits.max_num_sequences - len(boarded))
        num_missing = sum(not one.sequence.is_batch for one in others[num_free:])
        if not num_missing:
            return
        seated = {one.sequence for one in chain(boarded, others[:num_free])}
        batch = [one for one in reversed(self._requests) if one in seated and one.gives_way]
        for sequence in batch[:num_missing]:
            self._end(sequence, FinishReason.PREEMPTED)

    def mark_prepared(self, sequence: Sequence, error: str = "") -> None:
        """See `ServedEngine`."""
        request = self._requests.get(sequence)
        if request is None or request.reader is not None:
            return
        if error:
            self._end(sequence, FinishReason.ERROR, error=error)
        else:
            self._begin(request)

    def cancel(self, request_id: str, attempt: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """See `ServedEngine`."""
        sequence = self._gate.find(request_id)
        if sequence is not None and sequence.attempt == attempt:
            self._end(sequence, reason)

    def drain(self) -> None:
        """See `ServedEngine`."""
        self._gate.close()
        self._flush_soon()

    def list_sequences(self) -> None:
        """See `ServedEngine`."""
        requests = sorted(self._requests.values(), key=lambda one: (one.seat is None, one.seat or 0))
        self._output.sequences = tuple(self._snapshot(request) for request in requests)
        self._flush_soon()

    async def close(self) -> None:
        """Aborts what is left, and waits until nothing reads from vLLM any more."""
        if self._timer is not None:
            self._timer.cancel()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    # What comes from vLLM.

    def _begin(self, request: Request) -> None:
        name = f"generate {request.sequence.request_id}"
        reader = request.reader = self._loop.create_task(self._read(request), name=name)
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def _read(self, request: Request) -> None:
        """Reads a request to its end. An end from outside cancels it."""
        sequence = request.sequence
        # Attempts of a request are different requests to vLLM.
        name, num_given = f"{sequence.request_id}#{sequence.attempt}", len(sequence.token_ids) - request.num_replayed
        parameters = sampling_parameters(sequence, num_given)
        try:
            await self._backend.generate(
                name,
                sequence.token_ids[:num_given],
                parameters,
                cache_salt(sequence),
                partial(self._take, request),
                sequence.adapter_slot,
                -sequence.priority,
            )
        except BackendLostError:
            self._die()
        except RefusedError as refusal:
            self._end(sequence, FinishReason.ERROR, error=f"vLLM refuses the request: {refusal}")
        except Exception as error:
            log.exception("%s failed in vLLM", name)
            self._end(sequence, FinishReason.ERROR, error=f"vLLM failed: {type(error).__name__}")
        else:
            # Reads nothing more; without an end from vLLM there would never be one.
            self._end(sequence, FinishReason.ERROR, error="vLLM ended the request without a reason")

    def _take(self, request: Request, produced: Produced) -> None:
        """Takes the output of a step for a request that has not ended."""
        sequence = request.sequence
        if sequence not in self._requests:
            return
        if not request.has_boarded:
            sequence.num_cached_tokens = min(produced.num_cached_tokens, sequence.num_prompt_tokens)
            self._work.board(sequence)
            self._accounting.board(sequence, self._now_ns())
            self._accounting.count_prompt(sequence)
        elif request.is_preempted:
            self._accounting.board(sequence, self._now_ns())
        if not request.has_boarded or request.is_preempted:
            request.has_boarded, request.is_preempted = True, False
            request.seat = heapq.heappop(self._free_seats) if self._free_seats else None
            self._output.boarded += (sequence,)
        self._score(sequence, produced)
        is_same, num_again = self._compare(request, produced.token_ids)
        if not is_same:
            self._end(sequence, FinishReason.ERROR, error="vLLM has not generated the output so far again")
            return
        token_ids = produced.token_ids[num_again:]
        logprobs = produced.logprobs[num_again:] or (None,) * len(token_ids)
        tokens = self._output.tokens
        for token_id, values in zip(token_ids, logprobs, strict=True):
            offset = sequence.num_output_tokens
            if values is not None:
                sequence.logprobs[offset] = values
            sequence.token_ids.append(token_id)
            tokens.sequences.append(sequence)
            tokens.offsets.append(offset)
            tokens.token_ids.append(token_id)
        self._work.produce(len(token_ids))
        if produced.finish_reason is not None:
            self._end_as(sequence, produced.finish_reason)
        self._flush_soon()

    def _compare(self, request: Request, token_ids: tuple[int, ...]) -> tuple[bool, int]:
        """Takes what was to be generated again. Returns whether it is the same, and how many of the tokens it was."""
        num_left, num_again = request.num_replayed, min(request.num_replayed, len(token_ids))
        known = request.sequence.token_ids
        start = len(known) - num_left
        request.num_replayed -= num_again
        return known[start : start + num_again] == list(token_ids[:num_again]), num_again

    def _score(self, sequence: Sequence, produced: Produced) -> None:
        """Keeps the log probabilities of the prompt. Those of earlier output, which is prompt to vLLM, are not asked
        for."""
        start = len(sequence.prompt_logprobs)
        end = min(sequence.num_prompt_tokens - 1, start + len(produced.prompt_logprobs))
        if end > start:
            sequence.prompt_logprobs += produced.prompt_logprobs[: end - start]
            sequence.num_scored = end
            self._output.scored += (ScoredRows(0, sequence, start, end),)

    def _end_as(self, sequence: Sequence, finish_reason: str) -> None:
        """Ends a sequence for vLLM's reason."""
        match finish_reason:
            case "stop":
                self._end(sequence, FinishReason.STOP_TOKEN, stop_token_id=sequence.token_ids[-1])
            case "length":
                is_whole = sequence.length_limit == self._gate.max_total_tokens(sequence)
                self._end(sequence, FinishReason.LENGTH if is_whole else FinishReason.PREEMPTED)
            case "abort":
                # Not by us: we had ended the sequence before.
                self._end(sequence, FinishReason.PREEMPTED)
            case _:
                self._end(sequence, FinishReason.ERROR, error=f"vLLM ended the request: {finish_reason}")

    def _end(self, sequence: Sequence, reason: FinishReason, stop_token_id: int | None = None, error: str = "") -> None:
        """Ends a sequence that is held. vLLM frees its blocks at its next step, before it starts another one."""
        request = self._requests.pop(sequence, None)
        if request is None or self._is_dead:
            return
        self._gate.leave(sequence)
        self._leave_seat(request)
        self._accounting.end(sequence, self._now_ns())
        sequence.used = None  # without its busy time, these are not the figures of a request
        if request.reader is not None and request.reader is not asyncio.current_task():
            request.reader.cancel()
        self._output.finished.append(FinishEvent.of(sequence, reason, stop_token_id, error))
        self._standby.ended(1, self._clock())
        self._flush_soon()

    def _leave_seat(self, request: Request) -> None:
        if request.seat is not None:
            heapq.heappush(self._free_seats, request.seat)
            request.seat = None

    def _on_step(self, stats: StepStats) -> None:
        """Takes vLLM's statistics of a step. Its tokens were taken, or are before the flush."""
        self._newest = stats
        self._work.step(stats)
        self._flush_soon()

    def _on_cache(self, num_blocks: int) -> None:
        """Takes the size of the prefix cache, which comes a moment after the step that changed it. It is published with
        the next one, if there is work."""
        self._num_published_blocks = num_blocks
        if not self._requests:
            self._flush_soon()

    def _die(self) -> None:
        """Ends nothing: routers see their streams break, and continue the requests elsewhere."""
        if not self._is_dead:
            self._is_dead = True
            log.error("vLLM's engine has died")
            self._on_death()

    # Deadlines.

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        time_left_s = self._deadlines.time_left_s(self._clock() * 1000)
        if time_left_s is not None:
            self._timer = self._loop.call_later(time_left_s, self._expire)

    def _expire(self) -> None:
        for request_id, attempt in self._deadlines.take_due(self._now_ms()):
            self.cancel(request_id, attempt, FinishReason.DEADLINE)
        self._arm()

    # What is published.

    def _flush_soon(self) -> None:
        """Publishes what has come, behind everything that is ready to run now."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._is_dead:
            return
        work = self._work.take()
        if work.num_steps:
            self._note_preemptions()
        standing = self._standing()
        if work.num_steps:
            self._steps.add(work, standing)
        elif not self._requests:
            self._steps.rest()
        elif self._output.accepted:
            self._steps.wake()
        output, self._output = self._output, EngineOutput(self.num_steps)
        output.step = self.num_steps
        output.status = self._steps.status(standing)
        if work.num_steps:
            num_finished = sum(event.sequence.num_output_tokens > 0 for event in output.finished)
            output.record = self._steps.record(work, num_finished, len(output.preempted), standing)
        now_ns = self._now_ns()
        if not self._requests or self._accounting.is_due(now_ns):
            output.usage = self._accounting.take(now_ns, self._today())
        self._publish(output)

    def _note_preemptions(self) -> None:
        """Pauses boarded requests if fewer run than have boarded: of the lowest class, the latest."""
        boarded = sorted(self._boarded, key=_class_order)
        num_missing = len(boarded) - self._newest.num_running
        for request in boarded[len(boarded) - num_missing :] if num_missing > 0 else ():
            request.is_preempted = True
            self._leave_seat(request)
            self._accounting.preempt(request.sequence, self._now_ns())
            self._output.preempted += (request.sequence,)

    @property
    def _boarded(self) -> list[Request]:
        return [one for one in self._requests.values() if one.has_boarded and not one.is_preempted]

    @property
    def _others(self) -> list[Request]:
        """Those without a token, in the order in which vLLM gives them seats."""
        return sorted((one for one in self._requests.values() if not one.has_boarded), key=_class_order)

    @property
    def _num_used_blocks(self) -> int:
        """By vLLM's newest step; an idle vLLM holds none, and says so only at its next step."""
        return round(self._newest.kv_usage * self._num_blocks) if self._requests else 0

    @property
    def _num_overrun_blocks(self) -> int:
        """Blocks that reservations lack: those of preempted sequences, and what is used beyond all of them."""
        preempted = sum(one.sequence.num_reserved_blocks for one in self._requests.values() if one.is_preempted)
        return preempted + max(0, self._num_used_blocks - self._gate.num_reserved_blocks)

    def _standing(self) -> Standing:
        requests, others = self._requests.values(), self._others
        num_boarded = len(self._boarded)
        num_preempted = len(requests) - num_boarded - len(others)
        # vLLM runs as many as it says beyond those that have boarded.
        prefilling = others[: max(0, self._newest.num_running - num_boarded)]
        return Standing(
            total_blocks=self._num_blocks,
            used_blocks=self._num_used_blocks,
            published_blocks=self._num_published_blocks,
            overrun_blocks=self._num_overrun_blocks,
            reserved_blocks=self._gate.num_reserved_blocks,
            max_num_sequences=self._limits.max_num_sequences,
            num_standby=self._standby.depth,
            num_running=num_boarded + len(prefilling),
            num_waiting=len(others) - len(prefilling),
            num_preempted=num_preempted,
            waiting_prefill_tokens=sum(len(one.sequence.token_ids) for one in others),
            held=tuple(_reported(one, has_seat=one in prefilling) for one in requests),
            draining=self._gate.is_closed,
        )

    def _snapshot(self, request: Request) -> SequenceSnapshot:
        sequence = request.sequence
        num_tokens = len(sequence.token_ids)
        return SequenceSnapshot(
            sequence.request_id,
            SequencePhase.DECODE if request.phase is None else request.phase,
            request.seat,
            sequence.num_prompt_tokens,
            num_tokens - 1 if request.has_boarded else 0,
            sequence.num_output_tokens,
            -(-num_tokens // self._block_size) if request.seat is not None else 0,
            sequence.num_reserved_blocks,
        )


def _class_order(request: Request) -> int:
    return -request.sequence.priority


def _reported(request: Request, *, has_seat: bool) -> ReportedSequence:
    sequence, phase = request.sequence, None if has_seat else request.phase
    return ReportedSequence(
        sequence.request_id, sequence.attempt, sequence.num_reserved_blocks, phase, sequence.adapter_hash
    )
