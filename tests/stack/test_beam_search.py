"""Beam search through the whole stack: the beams of `generate(num_beams=…)` of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight import AsyncClient
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.stack.conftest import EXECUTOR_ARGS

PROMPT = [10, 42, 7, 99, 23, 5, 64, 80, 11, 3, 17, 54, 31, 8, 70, 26, 13, 90]
BEAMS, MAX_TOKENS = 3, 8


async def test_beams_are_those_of_transformers(tmp_path: Path, tiny_model: Path) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        expected = network.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            do_sample=False,
            num_beams=BEAMS,
            num_return_sequences=BEAMS,
            max_new_tokens=MAX_TOKENS,
            output_scores=True,
            return_dict_in_generate=True,
        )
    options = StackOptions(model=str(tiny_model), executor_args=EXECUTOR_ARGS, run_dir=tmp_path)
    async with LocalStack(options) as stack, AsyncClient(stack.address) as client:
        beams = await client.beam_search(token_ids=PROMPT, beams=BEAMS, max_tokens=MAX_TOKENS, timeout=60.0)
        texts = [await client.detokenize(beam.token_ids) for beam in beams]
    outputs = [
        row[: len(beam.token_ids)]
        for beam, row in zip(beams, expected.sequences[:, len(PROMPT) :].tolist(), strict=True)
    ]
    assert [list(beam.token_ids) for beam in beams] == outputs
    assert [beam.score for beam in beams] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
    assert [beam.text for beam in beams] == texts
