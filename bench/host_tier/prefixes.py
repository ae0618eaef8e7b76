"""What the host tier brings to conversations whose prefixes exceed the pool: `python -m
inflight.bench.host_tier.prefixes`.

Conversations take turns, the one that waited longest next, and a few run at once. Each turn's prompt is all that was
said before and some new tokens. The pool holds a part of the conversations, and the least recently used one, which it
gives up, is always the next to return. The same trace runs alternately without and with host memory, through the
engine with its real model; the tokens must be equal. Prints Markdown, and in the last line the ratios.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass, field

import torch

from inflight.bench.engine.model_steps import BLOCK_SIZE, model_parser
from inflight.bench.report.table import Table
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import resolve_model
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Batching, SchedulerLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sampling, Sequence, Stopping
from inflight.executor.scheduler.step_record import HostPrefixCounts

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


@dataclass(frozen=True, slots=True)
class Trace:
    """Conversations and their lengths in tokens: the first prompt, what each further turn adds, and each output."""

    num_conversations: int
    num_turns: int
    first_tokens: int
    further_tokens: int
    output_tokens: int
    num_at_once: int

    @property
    def most_tokens(self) -> int:
        """Tokens of a conversation after its last turn."""
        return self.first_tokens + (self.num_turns - 1) * self.further_tokens + self.num_turns * self.output_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of the trace. `first_s` are the seconds to the first token of each turn after the first."""

    seconds: float
    num_output_tokens: int
    first_s: list[float]
    tokens: list[list[int]]
    counts: HostPrefixCounts

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds


@dataclass(slots=True)
class Run:
    """Runs the trace through an engine, at most `num_at_once` conversations at a time."""

    trace: Trace
    engine: Engine
    waiting: deque[int]
    tokens: list[list[int]]
    num_turns: list[int]
    numbers: random.Random = field(default_factory=lambda: random.Random(1))
    began_s: dict[str, float] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    num_running: int = 0

    def run(self) -> None:
        while self.waiting or self.num_running:
            while self.waiting and self.num_running < self.trace.num_at_once:
                self._begin_turn(self.waiting.popleft())
            self.engine.step()

    def publish(self, output: EngineOutput) -> None:
        """Takes what the engine publishes."""
        now_s = time.perf_counter()
        for sequence, offset, _ in output.tokens:
            turn = int(sequence.request_id.split("/")[1])
            if offset == 0 and turn > 1:
                self.first_s.append(now_s - self.began_s[sequence.request_id])
        for event in output.finished:
            number = int(event.sequence.request_id.split("/")[0])
            self.tokens[number] = list(event.sequence.token_ids)
            self.num_running -= 1
            if self.num_turns[number] < self.trace.num_turns:
                self.waiting.append(number)

    def _begin_turn(self, number: int) -> None:
        trace = self.trace
        self.num_turns[number] += 1
        turn = self.num_turns[number]
        numbers = random.Random(f"{number}/{turn}")
        num_new = trace.first_tokens if turn == 1 else trace.further_tokens
        prompt = [*self.tokens[number], *(numbers.randrange(100, 20_000) for _ in range(num_new))]
        request_id = f"{number}/{turn}"
        self.began_s[request_id] = time.perf_counter()
        self.num_running += 1
        self.engine.submit(
            Sequence(
                request_id=request_id,
                attempt=1,
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                sampling=GREEDY,
                stopping=Stopping(trace.output_tokens, 0, frozenset()),
                num_reserved_blocks=-(-(len(prompt) + trace.output_tokens) // BLOCK_SIZE),
                cache_salt=b"bench",
                inter_token_target_ms=100.0,
            )
        )


def run_trace(model: PagedModel, trace: Trace, num_blocks: int, num_host_blocks: int) -> Outcome:
    """Runs the trace once, from an empty pool."""
    limits = SchedulerLimits(
        max_num_sequences=trace.num_at_once,
        num_standby_sequences=0,
        max_num_tokens=1024,
        context_length=-(-trace.most_tokens // BLOCK_SIZE) * BLOCK_SIZE,
        enable_chunked_context=True,
        batching=Batching.INFLIGHT,
        enable_prefix_cache=True,
        num_host_blocks=num_host_blocks,
    )
    model.allocate_kv(num_blocks, BLOCK_SIZE)
    runner = ModelRunner(model, limits, BLOCK_SIZE)
    scheduler = Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE))
    numbers = range(trace.num_conversations)
    outputs: list[Run] = []
    engine = Engine(scheduler, runner, lambda output: outputs[0].publish(output), _fail)
    run = Run(trace, engine, deque(numbers), [[] for _ in numbers], [0 for _ in numbers])
    outputs.append(run)
    began_s = time.perf_counter()
    run.run()
    seconds = time.perf_counter() - began_s
    runner.close()
    num_output_tokens = trace.num_conversations * trace.num_turns * trace.output_tokens
    counts = scheduler.kv_counts().host_prefixes
    return Outcome(seconds, num_output_tokens, run.first_s, run.tokens, counts)


def _fail(error: BaseException) -> None:
    raise error


def row_of(name: str, outcomes: ReadOnlyList[Outcome]) -> list[str]:
    counts = outcomes[-1].counts
    return [
        name,
        f"{statistics.median(one.tokens_per_s for one in outcomes):.1f}",
        f"{1000 * statistics.median(s for one in outcomes for s in one.first_s):.0f}",
        f"{1000 * max(s for one in outcomes for s in one.first_s):.0f}",
        str(counts.stored_blocks),
        str(counts.restored_blocks),
        str(counts.dropped_blocks),
    ]


def main(argv: ReadOnlyList[str]) -> int:
    """Measures and prints; returns the exit code, which is 1 if the tokens differ."""
    parser = model_parser(__doc__, ["auto", "bfloat16", "float32"], rounds=3)
    add = parser.add_argument
    add("--conversations", type=int, default=8, help="default: %(default)s")
    add("--turns", type=int, default=4, help="turns of each; default: %(default)s")
    add("--first-tokens", type=int, default=1024, help="tokens of the first prompt; default: %(default)s")
    add("--further-tokens", type=int, default=32, help="tokens that a further turn adds; default: %(default)s")
    add("--output-tokens", type=int, default=16, help="tokens of each answer; default: %(default)s")
    add("--at-once", type=int, default=2, help="conversations that run at once; default: %(default)s")
    add("--pool", type=int, default=4, help="conversations that the pool has room for; default: %(default)s")
    options = parser.parse_args(argv)
    torch.set_num_threads(num_usable_cores())
    model = load_model(
        resolve_model(options.model), dtype_name=options.dtype, device_name="cpu", weight_dtype=options.weight_dtype
    )
    trace = Trace(
        options.conversations,
        options.turns,
        options.first_tokens,
        options.further_tokens,
        options.output_tokens,
        options.at_once,
    )
    blocks_each = -(-trace.most_tokens // BLOCK_SIZE)
    num_blocks, num_host_blocks = options.pool * blocks_each, trace.num_conversations * blocks_each
    described = model.description
    print(f"- {model.device}, {described.dtype}, weights: {options.weight_dtype}; {described.backend_reason}")
    print(f"- {trace}")
    print(f"- a pool of {num_blocks} blocks of {BLOCK_SIZE} tokens, {num_host_blocks} blocks of host memory\n")
    run_trace(model, Trace(1, 2, 64, 16, 4, 1), num_blocks, num_host_blocks)  # compiles and takes memory
    off, on = [], []
    for _ in range(options.rounds):
        off.append(run_trace(model, trace, num_blocks, 0))
        on.append(run_trace(model, trace, num_blocks, num_host_blocks))
    titles = ["host tier", "output tokens/s", "first token, ms p50", "max", "stored", "brought back", "dropped"]
    print(Table(titles, [row_of("off", off), row_of("on", on)]).markdown() + "\n")
    are_equal = all(one.tokens == off[0].tokens for one in (*off, *on))
    speed = statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in zip(off, on, strict=True))
    first = statistics.median(
        statistics.median(b.first_s) / statistics.median(a.first_s) for a, b in zip(off, on, strict=True)
    )
    print(f"prefixes: tokens_per_s_ratio={speed:.2f} first_token_ratio={first:.3f} equal_tokens={are_equal}")
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
