"""The load: clients that ask each question in turn, and what becomes of every answer."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from inflight import AsyncClient
from inflight.aio_stream import AsyncStream
from inflight.bench.chaos.load import MAX_RETRY_S, STREAM_TIMEOUT_S
from inflight.errors import InflightError
from inflight.events import Completion
from tests.answers.schemas import QUESTIONS
from tests.answers.verdict import Verdict, judge

TEMPERATURE = 1.5
MAX_TOKENS = 120


@dataclass(slots=True)
class Answers:
    """The requests of these numbers: the number decides about the question and is the seed."""

    client: AsyncClient
    waiting: deque[int]
    on_problem: Callable[[str], None]
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    num_tokens: int = 0
    num_resumed: int = 0
    num_refused: int = 0
    num_under_way: int = 0

    @classmethod
    def of(cls, client: AsyncClient, numbers: Iterable[int], on_problem: Callable[[str], None]) -> Answers:
        return cls(client, deque(numbers), on_problem)

    @property
    def num_ended(self) -> int:
        return self.verdicts.total()

    @property
    def num_failed(self) -> int:
        return self.verdicts[Verdict.INVALID] + self.verdicts[Verdict.FAILED]

    async def run(self, num_clients: int) -> None:
        """Returns when every request has ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._ask_on())

    async def _ask_on(self) -> None:
        while self.waiting:
            number = self.waiting.popleft()
            self.num_under_way += 1
            verdict, problem = await self._ask(number)
            self.num_under_way -= 1
            self.verdicts[verdict] += 1
            if problem:
                self.on_problem(f"request {number}, {QUESTIONS[number % len(QUESTIONS)].text} {problem}")

    async def _ask(self, number: int) -> tuple[Verdict, str]:
        """Asks until the request is not refused, which is allowed while Redis is away."""
        question = QUESTIONS[number % len(QUESTIONS)]
        while True:
            stream = self.client.generate(
                question.text,
                json_schema=question.schema,
                temperature=TEMPERATURE,
                max_tokens=MAX_TOKENS,
                seed=number,
            )
            try:
                completion = await _result(stream)
            except TimeoutError:
                return Verdict.FAILED, "its stream stood still"
            except InflightError as error:
                if stream.request_id is not None or not is_refusal(error):
                    return Verdict.FAILED, str(error)
                self.num_refused += 1
                await asyncio.sleep(min(error.retry_after_s or 0.0, MAX_RETRY_S))
            else:
                self.num_tokens += completion.usage.output_tokens
                self.num_resumed += bool(stream.num_resumes)
                return judge(question.schema, completion)


async def _result(stream: AsyncStream) -> Completion:
    """Reads to the end. Raises `TimeoutError` if nothing comes for longer than any recovery takes."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(STREAM_TIMEOUT_S) as silence, stream, aclosing(stream.events()) as events:
        async for _ in events:
            silence.reschedule(loop.time() + STREAM_TIMEOUT_S)
    return stream.transcript.result()


def is_refusal(error: InflightError) -> bool:
    return error.code is grpc.StatusCode.UNAVAILABLE and error.retry_after_s is not None
