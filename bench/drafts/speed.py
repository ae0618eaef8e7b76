"""Speed of decoding with drafts and without, on the real model, in turn in one process.

    python -m inflight.bench.drafts.speed [--seats 1,4,32] [--kinds "copy and edit,chat"] [--tokens 128] [--rounds 3]

Each seat answers a prompt of `inflight.bench.drafts.replay`. The first step computes all prompts and is not timed, nor
is the first round, in which the step-time model and the budget of drafts learn. The speed is the least time without
drafts divided by the least with them, as wall and as processor time. `equal` is the share of the answers that are the
same token by token: all of them in float32; in bfloat16 near ties may differ with the shape of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from inflight.bench.drafts.replay import BLOCKS_EACH, answer_all, messages, records_grammar, sequences_of
from inflight.bench.engine.model_steps import BLOCK_SIZE, model_parser
from inflight.bench.report.table import Table
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import load_tokenizer, resolve_model
from inflight.executor.engine.prefill_budget import PrefillBudget
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.sequence import Sequence as TokenSequence
from inflight.executor.speculation.budget import DraftBudget
from inflight.executor.speculation.choice import PROPOSERS, choose_proposer

OFF = "off"
# Answers that a schema constrains, by the longest run of whitespace that it allows.
CONSTRAINED = {"JSON with schema": 8, "compact JSON": 0}


@dataclass(slots=True)
class Variant:
    """A proposer, or none, with what its executor has learned and its times by round."""

    name: str
    drafting: Drafting | None
    budget: PrefillBudget = field(default_factory=PrefillBudget)
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def run(self, model: PagedModel, sequences: Sequence[TokenSequence]) -> None:
        """Answers the prompts once."""
        wall_s, cpu_s = answer_all(model, sequences, self.drafting, self.budget)
        self.wall_s.append(wall_s)
        self.cpu_s.append(cpu_s)
        self.outputs = [sequence.token_ids for sequence in sequences]

    @property
    def tokens_per_draft(self) -> float:
        """Tokens of a row that verifies drafts."""
        if self.drafting is None or not self.drafting.tally.counts.num_drafts:
            return 1.0
        counts = self.drafting.tally.counts
        return 1 + counts.num_accepted / counts.num_drafts


def variants() -> list[Variant]:
    """Returns a fresh one of each."""
    drafting = (Drafting(choose_proposer(name), DraftBudget()) for name in PROPOSERS)
    return [Variant(OFF, None), *(Variant(name, one) for name, one in zip(PROPOSERS, drafting, strict=True))]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the speeds."""
    parser = model_parser(__doc__, ["bfloat16", "float32"], rounds=3)
    parser.add_argument("--seats", default="1,4,32", help="default: %(default)s")
    parser.add_argument("--kinds", default="copy and edit,JSON,JSON with schema,chat", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="longest answer; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(num_usable_cores())
    source = resolve_model(arguments.model)
    model = load_model(source, dtype_name=arguments.dtype, weight_dtype=arguments.weight_dtype)
    tokenizer, eos_ids = load_tokenizer(source), model.description.eos_token_ids
    seats = [int(number) for number in arguments.seats.split(",")]
    model.allocate_kv(max(seats) * BLOCKS_EACH, BLOCK_SIZE)
    rows = []
    for number in seats:
        for kind in arguments.kinds.split(","):
            texts = (messages()["JSON" if kind in CONSTRAINED else kind] * number)[:number]
            grammar = None
            if kind in CONSTRAINED:
                grammar = records_grammar(source, model.description.vocabulary_size, eos_ids, CONSTRAINED[kind])
            options = (tokenizer, eos_ids, arguments.temperature, arguments.tokens, grammar)
            measured = variants()
            for turn in range(1 + arguments.rounds):
                first = turn % len(measured)
                for variant in (*measured[first:], *measured[:first]):
                    variant.run(model, sequences_of(texts, *options))
            rows += [[str(number), kind, *row] for row in _rows(measured)]
    print(Table(["seats", "answers", "drafts", "speed, wall", "processor", "tokens/draft", "equal"], rows).text())
    return 0


def _rows(measured: Sequence[Variant]) -> list[list[str]]:
    plain = measured[0]
    rows = []
    for variant in measured[1:]:
        equal = [one == other for one, other in zip(plain.outputs, variant.outputs, strict=True)]
        wall, cpu = (
            min(times[1:]) / min(own[1:])
            for times, own in ((plain.wall_s, variant.wall_s), (plain.cpu_s, variant.cpu_s))
        )
        share = sum(equal) / len(equal)
        rows.append([variant.name, f"{wall:.2f}", f"{cpu:.2f}", f"{variant.tokens_per_draft:.2f}", f"{share:.0%}"])
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
