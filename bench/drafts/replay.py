"""What drafts predict of real outputs, by proposer, and what the proposers cost; no step is timed.

    python -m inflight.bench.drafts.replay [--tokens 256] [--limit 7] [--show]

A model answers prompts of four kinds, greedily and at temperature 0.8. The answers are then replayed: at each step a
proposer drafts up to `--limit` tokens, and the step yields those that are equal to the answer and one more. Output does
not depend on drafts, so these are the steps that the executor would take. `tokens/step` verifies every draft in full.
The next columns are for an executor of 1, 4 or 32 seats and what its budget chooses: the time of the steps without
drafts divided by that with them, by the step times of SmolLM2-135M on two cores of a Xeon with AMX (docs/cpu.md).
Processor time is per token appended and per call.
"""

from __future__ import annotations

import json
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from inflight.bench.engine.model_steps import BLOCK_SIZE, model_parser
from inflight.bench.report.table import Table
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import ModelSource, load_tokenizer, resolve_model
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.prefill_budget import PrefillBudget
from inflight.executor.logits.grammar import CompiledGrammar, GrammarCompiler
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.limits import Batching, SchedulerLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Constraint, Sampling, Stopping
from inflight.executor.scheduler.sequence import Sequence as TokenSequence
from inflight.executor.speculation.budget import DraftBudget
from inflight.executor.speculation.choice import PROPOSERS, choose_proposer
from inflight.executor.speculation.proposer import Draft, Proposer
from inflight.router.constraint.source import DEFAULT_MAX_WHITESPACE, ConstraintSource, canonical

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = Path(__file__).parents[1] / "texts" / "passages.txt"
CONTEXT_LENGTH = 1024
BLOCKS_EACH = CONTEXT_LENGTH // BLOCK_SIZE
MAX_DRAFTS = 7
# Answers per seat, so that most steps are full.
ROUNDS = 5
TEMPERATURES = (0.0, 0.8)
SEATS = (1, 4, 32)
# Seconds of a step without prefill by its tokens.
STEP_TIMES_S = ((1, 0.0117), (8, 0.0123), (32, 0.0175), (64, 0.0240), (128, 0.0430), (512, 0.1200))
EDITS = (
    "Repeat the text below and change nothing.",
    "Repeat the text below, but replace every number with the number 7.",
    "Correct the spelling of the text below and repeat it in full.",
    "Copy the text below. Write British spelling, and change nothing else.",
)
# What a schema of the answers to the JSON task describes, as the router makes a grammar of it.
RECORD_FIELDS = {
    "id": {"type": "integer"},
    "name": {"type": "string"},
    "city": {"type": "string"},
    "active": {"type": "boolean"},
    "score": {"type": "number"},
    "country": {"type": "string"},
}
JSON_TASK = 'Add a field "country" to each record of this JSON list. Answer with JSON only.'
QUESTIONS = (
    "What is the difference between a lake and a sea?",
    "Explain to a child why the sky is blue.",
    "Write a short story about a clockmaker who loses the time.",
    "How do I make a good vegetable soup?",
    "Give me three tips for learning a language.",
    "Why do ships float although they are made of steel?",
    "Describe a walk through a forest in winter.",
    "What should I think about before I buy a used car?",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the model answered."""

    kind: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps of an answer with drafts, and the tokens that were drafted and accepted."""

    num_steps: int
    num_drafted: int
    num_accepted: int


def edit_messages() -> list[str]:
    """Returns requests to copy or edit a passage each, all different."""
    return [f"{EDITS[i % len(EDITS)]}\n\n{passage}" for i, passage in enumerate(_passages())]


def _passages() -> list[str]:
    return [part for part in TEXT.read_text(encoding="utf-8").split("\n\n") if 300 < len(part) < 1000]


def messages() -> dict[str, list[str]]:
    """Returns the user messages by kind."""
    records = [
        {"id": 100 + i, "name": name, "city": city, "active": i % 2 == 0, "score": round(3.7 * i, 1)}
        for i, (name, city) in enumerate(
            (("Ada", "Arnholt"), ("Boris", "Bergen"), ("Clara", "Cadiz"), ("Dmitri", "Delft"), ("Elena", "Essen"))
        )
    ]
    lists = [json.dumps(records[: 2 + i % 4], indent=2 if i % 2 else None) for i in range(8)]
    return {
        "copy and edit": edit_messages()[:8],
        "JSON": [f"{JSON_TASK}\n\n{one}" for one in lists],
        "chat": list(QUESTIONS),
        "summary": [f"Summarise this text in a few sentences.\n\n{passage}" for passage in _passages()[8:16]],
    }


def sequences_of(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    temperature: float,
    max_tokens: int,
    compiled: CompiledGrammar | None = None,
) -> list[TokenSequence]:
    """Returns the sequences of user messages; each may draft up to `MAX_DRAFTS` tokens where the scheduler drafts.
    `compiled` constrains the answers."""
    made = []
    ends = frozenset(eos_ids)
    for seed, text in enumerate(texts):
        chat = [{"role": "user", "content": text}]
        prompt: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        sampling = Sampling(temperature, 0, 0.95, seed)
        stopping = Stopping(max_tokens, 0, ends)
        sequence = TokenSequence(f"r{seed}", 1, list(prompt), len(prompt), sampling, stopping, BLOCKS_EACH, None)
        sequence.max_drafts = MAX_DRAFTS
        sequence.constraint = None if compiled is None else Constraint("", b"", ends, compiled=compiled)
        made.append(sequence)
    return made


def records_grammar(
    source: ModelSource, vocabulary_size: int, eos_ids: Sequence[int], max_whitespace: int = DEFAULT_MAX_WHITESPACE
) -> CompiledGrammar:
    """Returns the grammar of the answers to the JSON task."""
    record = {
        "type": "object",
        "properties": RECORD_FIELDS,
        "required": list(RECORD_FIELDS),
        "additionalProperties": False,
    }
    schema = json.dumps({"type": "array", "items": record, "minItems": 1})
    text = canonical(ConstraintSource("json_schema", (schema,), max_whitespace))
    compiler = GrammarCompiler(lambda: load_tokenizer(source), vocabulary_size, eos_ids)
    compiled = compiler.compile(Constraint(text, text.encode(), frozenset(eos_ids))).result()
    compiler.close()
    return compiled


def answer_all(
    model: PagedModel,
    sequences: Sequence[TokenSequence],
    drafting: Drafting | None = None,
    budget: PrefillBudget | None = None,
) -> tuple[float, float]:
    """Runs the sequences in one batch, to their ends. The first step computes all prompts. Returns the wall and
    processor seconds of the steps after it. The model needs KV for `BLOCKS_EACH` blocks of each sequence."""
    num_blocks = len(sequences) * BLOCKS_EACH
    limits = SchedulerLimits(
        max_num_sequences=len(sequences),
        num_standby_sequences=0,
        max_num_tokens=len(sequences) * CONTEXT_LENGTH,
        context_length=CONTEXT_LENGTH,
        enable_chunked_context=True,
        batching=Batching.INFLIGHT,
        enable_prefix_cache=False,
    )
    outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
    runner = ModelRunner(model, limits, BLOCK_SIZE)
    scheduler = Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE), drafting)
    engine = Engine(scheduler, runner, outputs.put, lambda error: None, prefill_budget=budget)
    for sequence in sequences:
        engine.submit(sequence)
    engine.start()
    began = began_cpu = 0.0
    num_left = len(sequences)
    while num_left:
        output = outputs.get()
        if not began and len(output.tokens):
            began, began_cpu = time.perf_counter(), time.process_time()
        num_left -= len(output.finished)
    seconds = time.perf_counter() - began, time.process_time() - began_cpu
    engine.stop()
    runner.close()
    return seconds


def answers(model: PagedModel, tokenizer: PreTrainedTokenizerBase, temperature: float, max_tokens: int) -> list[Answer]:
    """Returns the model's answers to all messages."""
    by_kind = messages()
    kinds = [kind for kind, texts in by_kind.items() for _ in texts]
    texts = [text for texts in by_kind.values() for text in texts]
    sequences = sequences_of(texts, tokenizer, model.description.eos_token_ids, temperature, max_tokens)
    model.allocate_kv(len(sequences) * BLOCKS_EACH, BLOCK_SIZE)
    answer_all(model, sequences)
    return [
        Answer(
            kind,
            tuple(sequence.token_ids[: sequence.num_prompt_tokens]),
            tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
        )
        for kind, sequence in zip(kinds, sequences, strict=True)
    ]


def num_equal(draft: Sequence[int], actual: Sequence[int]) -> int:
    """Returns the number of leading ids that are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, actual, strict=False)))


def replay(answer: Answer, proposer: Proposer, limit: int) -> Replay:
    """Replays an answer whose first token is known, and verifies every draft."""
    proposer.extend((*answer.prompt_ids, *answer.output_ids[:1]))
    position, num_steps, num_drafted, num_accepted = 1, 0, 0, 0
    while position < len(answer.output_ids):
        draft = proposer.propose(limit)
        rest = answer.output_ids[position : position + limit + 1]
        accepted = min(num_equal(draft.ids, rest), len(rest) - 1)
        num_steps += 1
        num_drafted += len(draft.ids)
        num_accepted += accepted
        proposer.extend(rest[: accepted + 1])
        position += accepted + 1
    return Replay(num_steps, num_drafted, num_accepted)


def step_s(num_tokens: int) -> float:
    """Returns the seconds of a step, between the measured ones on a line."""
    for (fewer, short_s), (more, long_s) in pairwise(STEP_TIMES_S):
        if num_tokens <= more:
            return short_s + (long_s - short_s) * (num_tokens - fewer) / (more - fewer)
    return STEP_TIMES_S[-1][1] * num_tokens / STEP_TIMES_S[-1][0]


class Seat:
    """A replayed answer in a seat."""

    def __init__(self, answer: Answer, proposer: Proposer) -> None:
        self._output_ids, self._proposer, self._position = answer.output_ids, proposer, 1
        proposer.extend((*answer.prompt_ids, *answer.output_ids[:1]))
        self.is_done = len(answer.output_ids) < 2

    def advance(self, draft: Draft, num_verified: int, budget: DraftBudget) -> None:
        """Accepts what is right of a draft and lets the budget learn."""
        rest = self._output_ids[self._position : self._position + num_verified + 1]
        num_new = min(num_equal(draft.ids[:num_verified], rest), len(rest) - 1) + 1
        compared = min(len(draft.ids), num_new)
        budget.observe(draft, compared, num_equal(draft.ids[:compared], rest))
        self._proposer.extend(rest[:num_new])
        self._position += num_new
        self.is_done = self._position >= len(self._output_ids)

    def draft(self, limit: int) -> Draft:
        """Returns what may follow."""
        return self._proposer.propose(limit)


def decode_s(those: Sequence[Answer], make: Callable[[], Proposer], limit: int, num_seats: int) -> float:
    """Returns the time of the steps in which an executor yields the answers, several times over if the seats would
    stay empty. One of them boards per step."""
    budget, seats, seconds = DraftBudget(), list[Seat](), 0.0
    waiting = deque([*those] * max(1, -(-ROUNDS * num_seats // len(those))))
    while waiting or seats:
        if waiting and len(seats) < num_seats:
            seats.append(Seat(waiting.popleft(), make()))
        drafts = [seat.draft(limit) for seat in seats]
        chosen = budget.choose(drafts, len(seats), step_s, 10**6)
        seconds += step_s(len(seats) + sum(chosen))
        for seat, draft, number in zip(seats, drafts, chosen, strict=True):
            seat.advance(draft, number, budget)
        seats = [seat for seat in seats if not seat.is_done]
    return seconds


def speed_up(those: Sequence[Answer], make: Callable[[], Proposer], limit: int, num_seats: int) -> float:
    """Returns the time of the steps without drafts divided by that with them."""
    return decode_s(those, make, 0, num_seats) / decode_s(those, make, limit, num_seats)


def outcome(kind: Sequence[Answer], make: Callable[[], Proposer], limit: int) -> list[str]:
    """Returns a row of the table: tokens per step, share of drafts accepted, speed by seats."""
    replays = [replay(answer, make(), limit) for answer in kind]
    num_tokens = sum(len(answer.output_ids) - 1 for answer in kind)
    num_steps, num_drafted = sum(one.num_steps for one in replays), sum(one.num_drafted for one in replays)
    return [
        f"{num_tokens / num_steps:.2f}",
        f"{sum(one.num_accepted for one in replays) / max(1, num_drafted):.0%}",
        *(f"{speed_up(kind, make, limit, num_seats):.2f}" for num_seats in SEATS),
    ]


def cost_us(all_answers: Sequence[Answer], make: Callable[[], Proposer], limit: int) -> tuple[float, float, float]:
    """Returns the processor time of a prompt's token, of an output token that is appended alone, and of a draft."""
    prompt_s = output_s = draft_s = 0.0
    for answer in all_answers:
        proposer = make()
        began_s = time.process_time()
        proposer.extend(answer.prompt_ids)
        prompt_s += time.process_time() - began_s
        began_s = time.process_time()
        for token_id in answer.output_ids:
            proposer.extend((token_id,))
        output_s += time.process_time() - began_s
        began_s = time.process_time()
        for _ in answer.output_ids:
            proposer.propose(limit)
        draft_s += time.process_time() - began_s
    num_prompt = sum(len(answer.prompt_ids) for answer in all_answers)
    num_output = sum(len(answer.output_ids) for answer in all_answers)
    return 1e6 * prompt_s / num_prompt, 1e6 * output_s / num_output, 1e6 * draft_s / num_output


def tables(by_temperature: Mapping[float, Sequence[Answer]], limit: int) -> tuple[Table, Table]:
    """Returns what the proposers predict, and what they cost."""
    rows, costs = [], []
    for temperature, all_answers in by_temperature.items():
        by_kind: dict[str, list[Answer]] = {}
        for answer in all_answers:
            by_kind.setdefault(answer.kind, []).append(answer)
        by_kind["all together"] = [answer for some in zip(*by_kind.values(), strict=True) for answer in some]
        for kind, those in by_kind.items():
            for name in PROPOSERS:
                rows.append([kind, f"{temperature}", name, *outcome(those, choose_proposer(name), limit)])
    for name in PROPOSERS:
        every = [answer for all_answers in by_temperature.values() for answer in all_answers]
        costs.append([name, *(f"{us:.2f}" for us in cost_us(every, choose_proposer(name), limit))])
    seats = [f"speed at {number}" for number in SEATS]
    return (
        Table(["text", "temperature", "proposer", "tokens/step", "accepted", *seats], rows),
        Table(["proposer", "us per prompt token", "us per output token", "us per draft"], costs),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; with `--show` also the answers."""
    parser = model_parser(__doc__, ["bfloat16", "float32"], rounds=1)
    parser.add_argument("--tokens", type=int, default=256, help="longest answer; default: %(default)s")
    parser.add_argument("--limit", type=int, default=MAX_DRAFTS, help="longest draft; default: %(default)s")
    parser.add_argument("--show", action="store_true", help="print the answers")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(num_usable_cores())
    source = resolve_model(arguments.model)
    model = load_model(source, dtype_name=arguments.dtype, weight_dtype=arguments.weight_dtype)
    tokenizer = load_tokenizer(source)
    by_temperature = {each: answers(model, tokenizer, each, arguments.tokens) for each in TEMPERATURES}
    if arguments.show:
        for temperature, all_answers in by_temperature.items():
            for answer in all_answers:
                print(f"--- {answer.kind}, temperature {temperature}\n{tokenizer.decode(list(answer.output_ids))}")
    for table in tables(by_temperature, arguments.limit):
        print(table.text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
