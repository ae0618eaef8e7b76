"""A real scheduler fed by a real ledger, in turns: a turn is a step of 20 ms of the ledger's time.

There is no device. Each sequence ends after the number of tokens that its request was submitted with.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import (
    FinishEvent,
    FinishReason,
    Sampling,
    Sequence,
    StepPlan,
    StepResult,
    Stopping,
)
from inflight.router.ledger.types import (
    NO_LIMITS,
    Demand,
    Ending,
    ExecutorReport,
    HeldSequence,
    LedgerEvent,
    Placement,
    PreemptRequested,
    TenantLimits,
)
from tests.support.ledger.store_pool import RouterSide, StorePool
from tests.support.scheduler.scheduling import STOP_ID

STEP_MS = 20
PRIORITY_OF_CLASS = {1: 1, 2: 0, 3: -1}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for, and how long its answer will be, which is unknown beforehand."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    tenant: str = "t"
    priority_class: int = 2
    limits: TenantLimits = NO_LIMITS


@dataclass(slots=True)
class ServedLine:
    """One router, one executor. `boarded` and `ended` are in order."""

    pool: StorePool
    scheduler: Scheduler
    router: RouterSide
    asked: dict[str, Asked] = field(default_factory=dict)
    output: dict[str, list[int]] = field(default_factory=dict)
    boarded: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    paused: list[str] = field(default_factory=list)
    num_handed_back: int = 0

    async def open(self) -> None:
        """The executor reports for the first time."""
        await self.router.store.report(self._report())

    async def learn(self, asked: Asked) -> None:
        """So many requests of this kind have ended that the ledger takes their length for likely."""
        for i in range(32):
            demand = self._demand(replace(asked, request_id=f"{asked.request_id} {i}"))
            placement = await self.router.place_demand(demand)
            ending = Ending(
                placement.request_id, placement.attempt, asked.prompt_tokens, asked.output_tokens, by_itself=True
            )
            await self.router.store.settle([ending])

    async def submit(self, asked: Asked) -> None:
        """A request arrives; it is offered to the executor at once where the ledger says so."""
        self.asked[asked.request_id] = asked
        self.output[asked.request_id] = []
        result = await self.router.store.submit(self._demand(asked))
        if isinstance(result, Placement):
            self._offer(result)

    async def turn(self) -> StepPlan:
        """One step, and what follows from it for the ledger."""
        await self._make_way()
        plan = self.scheduler.schedule()
        self.boarded += [sequence.request_id for sequence in plan.boarded]
        self.paused += [sequence.request_id for sequence in plan.preempted]
        finished = self.scheduler.take_finished()
        if plan.rows:
            sampled = tuple(self._next_token(row.sequence) for row in plan.rows if row.samples)
            outcome = self.scheduler.update(StepResult(plan, sampled))
            for sequence, _, token_id in outcome.tokens:
                self.output[sequence.request_id].append(token_id)
            finished += outcome.finished
        await self.pool.wait(STEP_MS)
        await self._settle(finished)
        await self.router.store.report(self._report())
        await self.router.store.reap()  # which also does what only time makes possible
        await self._obey(await self.router.told())
        return plan

    async def run(self, num_requests: int, max_turns: int) -> None:
        """Turns until so many requests have ended. Work that exists is computed at every one of them."""
        for _ in range(max_turns):
            if len(self.ended) >= num_requests:
                return
            plan = await self.turn()
            assert plan.rows, f"{self.scheduler.num_held} are held, others wait, and nothing is computed"
        raise AssertionError(f"{len(self.ended)} of {num_requests} have ended after {max_turns} turns")

    def _demand(self, asked: Asked) -> Demand:
        block_size = self.scheduler.pool.block_size
        return Demand(
            asked.request_id,
            asked.priority_class,
            blocks=-(-(asked.prompt_tokens + asked.max_tokens) // block_size),
            tenant=asked.tenant,
            limits=asked.limits,
            prompt_tokens=asked.prompt_tokens,
            max_tokens=asked.max_tokens,
            block_size=block_size,
        )

    def _next_token(self, sequence: Sequence) -> int:
        is_last = sequence.num_output_tokens + 1 == self.asked[sequence.request_id].output_tokens
        return STOP_ID if is_last else 1

    def _offer(self, placement: Placement) -> None:
        asked, output = self.asked[placement.request_id], self.output[placement.request_id]
        sequence = Sequence(
            request_id=placement.request_id,
            attempt=placement.attempt,
            token_ids=[7] * asked.prompt_tokens + output,
            num_prompt_tokens=asked.prompt_tokens,
            sampling=Sampling(0.0, 0, 1.0, 0),
            stopping=Stopping(asked.max_tokens, 0, frozenset({STOP_ID})),
            num_reserved_blocks=placement.blocks,
            cache_salt=None,
            priority=PRIORITY_OF_CLASS[asked.priority_class],
        )
        refusal = self.scheduler.offer(sequence)
        assert refusal is None, f"{placement} was refused: {refusal}"

    async def _settle(self, finished: tuple[FinishEvent, ...]) -> None:
        for event in finished:
            sequence = event.sequence
            if event.reason is FinishReason.PREEMPTED:
                self.num_handed_back += 1
                await self._hand_back(sequence)
                continue
            self.ended.append(sequence.request_id)
            ending = Ending(
                sequence.request_id, sequence.attempt, sequence.num_prompt_tokens, sequence.num_output_tokens, True
            )
            await self.router.store.settle([ending])

    async def _hand_back(self, sequence: Sequence) -> None:
        num_tokens = len(self.output[sequence.request_id])
        result = await self.router.store.hand_back(
            sequence.request_id, sequence.attempt, 3, preempted=True, output_tokens=num_tokens
        )
        if isinstance(result, Placement):
            self._offer(result)

    async def _make_way(self) -> None:
        """Hands back what gives way on the executor, as its engine does."""
        for sequence in self.scheduler.giving_way():
            ended = self.scheduler.cancel(sequence.request_id, sequence.attempt, FinishReason.PREEMPTED)
            assert ended is not None
            self.paused.append(sequence.request_id)
            await self._settle((ended,))

    async def _obey(self, events: list[LedgerEvent]) -> None:
        for event in events:
            if isinstance(event, Placement):
                self._offer(event)
            elif isinstance(event, PreemptRequested):
                ended = self.scheduler.cancel(event.request_id, event.attempt, FinishReason.PREEMPTED)
                assert ended is not None, f"{event} concerns no request"
                self.paused.append(event.request_id)
                await self._settle((ended,))

    def _report(self) -> ExecutorReport:
        limits, scheduler = self.scheduler.limits, self.scheduler
        report = self.pool.next_report(
            blocks=scheduler.budget_blocks,
            sequences=limits.max_num_sequences + limits.num_standby_sequences,
            held=tuple(HeldSequence(s.request_id, s.attempt, s.num_reserved_blocks) for s in scheduler.held()),
            reserve_quantile=scheduler.reserve_quantile,
        )
        return replace(report, total_blocks=scheduler.pool.num_blocks)


async def open_line(pool: StorePool, scheduler: Scheduler, router: RouterSide | None = None) -> ServedLine:
    """A line whose executor has reported."""
    line = ServedLine(pool, scheduler, router or pool.router("a"))
    await line.open()
    return line
