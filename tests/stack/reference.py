"""The output of `transformers` alone: the oracle for the whole stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.model_source import resolve_model
from executor.checkpoint.gguf import import_gguf

NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Generation:
    """Greedy output ids, and at each position the gap between the two largest logits, as the options changed them."""

    output_ids: list[int]
    gaps: list[float]


def load_reference() -> PreTrainedModel:
    """The default model in float32, with the attention of `transformers`."""
    source = resolve_model("")
    model = AutoModelForCausalLM.from_pretrained(import_gguf(source), dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def generate(model: PreTrainedModel, prompt_ids: list[int], max_tokens: int, **options: Any) -> Generation:
    """Greedy generation of exactly `max_tokens` tokens, unless the options have an `eos_token_id`."""
    with torch.inference_mode():
        result = model.generate(  # type: ignore[operator]
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **{"min_new_tokens": None, "eos_token_id": None} | options,
        )
    tops = [torch.topk(scores[0], 2).values for scores in result.scores]
    return Generation(result.sequences[0, len(prompt_ids) :].tolist(), [float(top[0] - top[1]) for top in tops])


def assert_same_greedy(got: list[int], reference: Generation) -> None:
    """Equal tokens; from the first near tie of the reference on, the two may part."""
    for position, (ours, theirs) in enumerate(zip(got, reference.output_ids, strict=False)):
        if ours != theirs:
            gap = reference.gaps[position]
            assert gap < NEAR_TIE, f"token {position} is {ours}, the reference has {theirs} by {gap}"
            return
    assert len(got) == len(reference.output_ids)
