"""The cost of constrained output: tokens per second of 32 constrained seats beside 32 plain ones, and first masks.

    python -m inflight.bench.engine.constrained [--seats 32] [--tokens 64] [--rounds 5]

The variants run in turn on the same model in the same process, so that a disturbance of the machine affects all of
them. `plain` rows have no processors. `processed` rows have a bias of 0: the difference to `constrained` rows is the
cost of the masks alone. `one costly` has plain rows and one whose grammar is ambiguous, so that each mask takes longer
than the one before, until its row is ended. Every other row samples at temperature 1 and runs to its last token. The
longest pause is the longest time between the tokens of two steps. A first mask is the time from a grammar that was
never seen to the mask of its first token.
"""

from __future__ import annotations

import functools
import hashlib
import json
import queue
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher

from inflight.bench.engine.model_steps import BLOCK_SIZE, made_up_ids, model_parser
from inflight.bench.report.table import Table
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import load_tokenizer, resolve_model
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.logits.grammar import GrammarCompiler, Guide, MaskFiller
from inflight.executor.logits.row import LogitsRow
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Batching, Scheduler, SchedulerLimits
from inflight.executor.scheduler.sequence import (
    NO_PROCESSORS,
    Constraint,
    FinishReason,
    Processors,
    Sampling,
    Sequence,
    Stopping,
)

VARIANTS = ("plain", "processed", "constrained", "one costly")
PROMPT_TOKENS = 16
NUM_FIRST_MASKS = 200
WHITESPACE = r"[ \n]{0,8}"
AMBIGUOUS = 'start: s\ns: s s | "a" | "b" | s s s\n'


def schema(number: int) -> dict[str, object]:
    """Returns a schema of a list of objects that is long enough for any run; each number has names of its own."""
    properties = {
        f"name_{number}": {"type": "string", "maxLength": 20 + number % 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 100 + number},
        "tags": {"type": "array", "items": {"enum": ["red", "green", f"colour {number}"]}, "maxItems": 4},
        "score": {"type": "number"},
        "note": {"type": "string"},
    }
    one = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "items": one, "minItems": 1000}


@functools.cache
def grammar(number: int) -> str:
    """Returns the grammar of a schema as a router makes it."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema(number)), overrides={"whitespace_pattern": WHITESPACE})


def constraint_of(text: str, eos_token_ids: SequenceOf[int]) -> Constraint:
    return Constraint(text, hashlib.sha256(text.encode()).digest(), frozenset(eos_token_ids))


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall and processor seconds of a run, and the longest pause between the tokens of two steps."""

    wall_s: float
    cpu_s: float
    longest_s: float


class Seats:
    """An engine whose seats are filled at once and run to their last token."""

    def __init__(self, model: PagedModel, compiler: GrammarCompiler, num_seats: int, num_tokens: int) -> None:
        self._model = model
        self._compiler = compiler
        self._num_tokens = num_tokens
        self._limits = SchedulerLimits(
            max_num_sequences=num_seats,
            num_standby_sequences=0,
            max_num_tokens=num_seats * PROMPT_TOKENS,
            context_length=1024,
            enable_chunked_context=True,
            batching=Batching.INFLIGHT,
            enable_prefix_cache=False,
        )
        blocks_per_seat = -(-(PROMPT_TOKENS + num_tokens) // BLOCK_SIZE)
        self._num_blocks = num_seats * blocks_per_seat
        self._blocks_per_seat = blocks_per_seat
        model.allocate_kv(self._num_blocks, BLOCK_SIZE)

    def run(self, variant: str, seed: int) -> Cost:
        """Runs all seats."""
        sequences = [self._sequence(variant, i, seed) for i in range(self._limits.max_num_sequences)]
        outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        runner = ModelRunner(self._model, self._limits, BLOCK_SIZE)
        scheduler = Scheduler(self._limits, BlockPool(self._num_blocks, BLOCK_SIZE))
        engine = Engine(scheduler, runner, outputs.put, lambda error: None)
        for sequence in sequences:
            engine.submit(sequence)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        engine.start()
        num_left = len(sequences)
        times_s = []
        while num_left:
            output = outputs.get()
            if len(output.tokens):
                times_s.append(time.perf_counter())
            for event in output.finished:
                is_costly = variant == "one costly" and event.sequence is sequences[0]
                assert event.reason is FinishReason.LENGTH or is_costly, event.error
                num_left -= 1
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        cost = Cost(wall_s, cpu_s, float(np.diff(times_s).max()))
        engine.stop()
        runner.close()
        return cost

    def _sequence(self, variant: str, index: int, seed: int) -> Sequence:
        constraint = None
        if variant == "constrained" or (variant == "one costly" and index == 0):
            text = grammar(index % 8) if variant == "constrained" else LLMatcher.grammar_from_lark(AMBIGUOUS)
            constraint = constraint_of(text, self._model.description.eos_token_ids)
            constraint.compiled = self._compiler.compile(constraint).result()
        return Sequence(
            f"r{index}",
            1,
            [1 + index, *made_up_ids(PROMPT_TOKENS - 1)],
            PROMPT_TOKENS,
            Sampling(1.0, 0, 1.0, seed + index),
            # Without stop tokens every variant runs to its end; a constrained list is never complete.
            Stopping(self._num_tokens, 0, frozenset()),
            self._blocks_per_seat,
            None,
            processors=Processors(bias=((5, 0.0),)) if variant == "processed" else NO_PROCESSORS,
            constraint=constraint,
        )


def first_masks(compiler: GrammarCompiler, model: PagedModel) -> list[float]:
    """Returns the seconds from a grammar to the mask of its first token, for grammars that were never seen."""
    filler = MaskFiller(num_usable_cores())
    seconds = []
    vocabulary_size = model.description.vocabulary_size
    for number in range(1000, 1000 + NUM_FIRST_MASKS):
        constraint = constraint_of(grammar(number), model.description.eos_token_ids)
        began_s = time.perf_counter()
        constraint.compiled = compiler.compile(constraint).result()
        guide = Guide(constraint, Stopping(9, 0, frozenset()), None, vocabulary_size)
        filler.start([LogitsRow(NO_PROCESSORS, [1], 1, 10, vocabulary_size, guide)])()
        seconds.append(time.perf_counter() - began_s)
    filler.close()
    return seconds


def in_turn(seats: Seats, number: int) -> dict[str, Cost]:
    """Runs each variant once, each round beginning with another one."""
    first = number % len(VARIANTS)
    return {variant: seats.run(variant, 1 + number) for variant in (*VARIANTS[first:], *VARIANTS[:first])}


def table_of(costs: SequenceOf[dict[str, Cost]], num_tokens: int) -> Table:
    """Returns speed and ratios. `least` compares the least processor time of all rounds: other processes add to it. The
    longest pause is that of the round where it was shortest, for the same reason."""
    rows = []
    for variant in VARIANTS:
        speeds = [num_tokens / one[variant].wall_s for one in costs]
        ratios = [one["plain"].wall_s / one[variant].wall_s for one in costs]
        cpu_ratios = [one["plain"].cpu_s / one[variant].cpu_s for one in costs]
        least = min(one["plain"].cpu_s for one in costs) / min(one[variant].cpu_s for one in costs)
        medians = (float(np.median(values)) for values in (speeds, ratios, cpu_ratios))
        longest_ms = 1000 * min(one[variant].longest_s for one in costs)
        rows.append([variant, *(f"{value:.3g}" for value in (*medians, least, longest_ms))])
    return Table(["rows", "tokens/s", "of plain, wall", "of plain, processor", "least", "longest pause ms"], rows)


def main(argv: SequenceOf[str] | None = None) -> int:
    """Prints the cost of the variants, their ratios by round, and the latency of first masks."""
    parser = model_parser("The cost of constrained output.", ["bfloat16", "float32"], rounds=5)
    parser.add_argument(
        "--threads", type=int, default=num_usable_cores(), help="of the forward pass; default: all cores"
    )
    parser.add_argument("--seats", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a seat; default: %(default)s")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    source = resolve_model(arguments.model)
    model = load_model(source, dtype_name=arguments.dtype, weight_dtype=arguments.weight_dtype)
    description = model.description
    load = functools.partial(load_tokenizer, source)
    compiler = GrammarCompiler(load, description.vocabulary_size, description.eos_token_ids)
    seats = Seats(model, compiler, arguments.seats, arguments.tokens)
    for variant in VARIANTS:
        seats.run(variant, 0)
    costs = [in_turn(seats, number) for number in range(arguments.rounds)]
    print(f"{arguments.seats} seats, {arguments.tokens} tokens each, medians of {arguments.rounds} rounds")
    print(table_of(costs, arguments.seats * arguments.tokens).text())
    seconds = first_masks(compiler, model)
    p50, p99 = (1000 * float(np.quantile(seconds, share)) for share in (0.5, 0.99))
    print(f"first mask of {NUM_FIRST_MASKS} grammars never seen: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    compiler.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
