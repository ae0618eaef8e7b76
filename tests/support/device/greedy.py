"""Greedy generation through a `PagedModel` without engine and scheduler, and by transformers alone."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.sequence import PlanRow, Sequence, StepPlan
from inflight.executor.step.batch import pack
from tests.support.device.paged_cases import make_sequence

NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy output of transformers, and at each position the gap between the two largest logits, as the options
    changed them."""

    output_ids: list[int]
    gaps: list[float]


def generate_together(
    model: PagedModel, prompts: SequenceOf[list[int]], num_tokens: int, chunk_tokens: int, block_size: int = 16
) -> list[list[int]]:
    """Generates for all prompts at once; one joins at each step, prefilled in chunks beside the others' decodes."""
    num_blocks = sum(-(-(len(prompt) + num_tokens) // block_size) for prompt in prompts)
    model.allocate_kv(num_blocks, block_size)
    free = list(range(1, num_blocks + 1))
    random.Random(0).shuffle(free)
    sequences: list[Sequence] = []
    while len(sequences) < len(prompts) or any(s.num_output_tokens < num_tokens for s in sequences):
        if len(sequences) < len(prompts):
            sequences.append(make_sequence(list(prompts[len(sequences)]), []))
        rows = [_plan_row(s, chunk_tokens) for s in sequences if s.num_output_tokens < num_tokens]
        rows.sort(key=lambda row: row.num_tokens != 1)
        for row in rows:
            while len(row.sequence.block_table) * block_size < row.start + row.num_tokens:
                row.sequence.block_table.append(free.pop())
        token_ids = model.logits(pack(StepPlan.of(rows), block_size)).argmax(-1).tolist()
        for row in rows:
            row.sequence.num_computed += row.num_tokens
            if row.samples:
                row.sequence.token_ids.append(token_ids.pop(0))
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def generate_alone(network: Any, prompt: list[int], num_tokens: int, **options: Any) -> Reference:
    """Greedy `generate` of transformers: `num_tokens` tokens, unless the options have an `eos_token_id`."""
    with torch.inference_mode():
        result = network.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **{"min_new_tokens": None, "eos_token_id": None} | options,
        )
    tops = [scores[0].topk(2).values for scores in result.scores]
    return Reference(result.sequences[0, len(prompt) :].tolist(), [float(top[0] - top[1]) for top in tops])


def assert_same(output_ids: list[int], reference: Reference) -> None:
    """Compares outputs up to the first near tie of the reference."""
    for position, (ours, theirs) in enumerate(zip(output_ids, reference.output_ids, strict=False)):
        if ours != theirs:
            gap = reference.gaps[position]
            assert gap < NEAR_TIE, f"token {position} is {ours}, the reference has {theirs} by {gap}"
            return
    assert len(output_ids) == len(reference.output_ids)


def assert_greedy(network: Any, prompt: list[int], output_ids: list[int]) -> None:
    """Asserts that each token is the likeliest one behind those before it, or in a near tie with that. One forward pass
    of transformers says so for all of them, at a fraction of the time of `generate_alone`."""
    with torch.inference_mode():
        logits = network(input_ids=torch.tensor([[*prompt, *output_ids[:-1]]]), use_cache=False).logits[0]
    likely = logits[len(prompt) - 1 :]
    gaps = likely.max(dim=1).values - likely.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
    wrong = {position: gap for position, gap in enumerate(gaps.tolist()) if gap >= NEAR_TIE}
    assert not wrong, f"tokens that are less likely than others, by how much: {wrong}"


def _plan_row(sequence: Sequence, chunk_tokens: int) -> PlanRow:
    start = sequence.num_computed
    num_tokens = min(chunk_tokens, sequence.num_tokens - start)
    return PlanRow(sequence, start, num_tokens, start + num_tokens == sequence.num_tokens)
