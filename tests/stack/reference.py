"""The output of `transformers` alone: the oracle for the whole stack."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.model_source import resolve_model
from executor.checkpoint.gguf import import_gguf

NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Generation:
    """Greedy output ids, and at each position the logit gap between the two likeliest tokens."""

    output_ids: list[int]
    gaps: list[float]


def load_reference() -> PreTrainedModel:
    """The default model in float32, with the attention of `transformers`."""
    source = resolve_model("")
    model = AutoModelForCausalLM.from_pretrained(import_gguf(source), dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def generate(model: PreTrainedModel, prompt_ids: list[int], max_tokens: int) -> Generation:
    """Greedy generation of exactly `max_tokens` tokens."""
    with torch.inference_mode():
        result = model.generate(  # type: ignore[operator]
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
            do_sample=False,
            min_new_tokens=None,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tops = [torch.topk(logits[0], 2).values for logits in result.logits]
    return Generation(result.sequences[0, len(prompt_ids) :].tolist(), [float(top[0] - top[1]) for top in tops])


def assert_same_greedy(got: list[int], reference: Generation) -> None:
    """Equal tokens; from the first near tie of the reference on, the two may part."""
    for position, (ours, theirs) in enumerate(zip(got, reference.output_ids, strict=False)):
        if ours != theirs:
            gap = reference.gaps[position]
            assert gap < NEAR_TIE, f"token {position} is {ours}, the reference has {theirs} by {gap}"
            return
    assert len(got) == len(reference.output_ids)
