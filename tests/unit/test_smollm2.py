"""The model that is served by default, in float32: its tokens through paged attention are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.common.model_source import load_tokenizer, resolve_model
from inflight.executor.attention.backend import KvShape
from inflight.executor.checkpoint.gguf import import_gguf
from inflight.executor.model.loader import load_model
from tests.support.device.greedy import Reference, assert_same, generate_alone, generate_together

NUM_TOKENS = 10
PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3,",
    "In the beginning there was a long text about many things. " * 4,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(resolve_model(""))
    return [list(tokenizer(prompt).input_ids) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def references(prompts: list[list[int]]) -> list[Reference]:
    folder: Path = import_gguf(resolve_model(""))
    network: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return [generate_alone(network, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_greedy_tokens_are_those_of_transformers(
    backend: str, prompts: list[list[int]], references: list[Reference]
) -> None:
    model = load_model(resolve_model(""), dtype_name="float32", backend_name=backend, device_name="cpu")
    together = generate_together(model, prompts, NUM_TOKENS, chunk_tokens=32)
    for output_ids, reference in zip(together, references, strict=True):
        assert_same(output_ids, reference)


@pytest.mark.parametrize("weight_dtype", ["quantized", "quantized_a8"])
def test_bfloat16_knows_the_capital_of_france(weight_dtype: str, prompts: list[list[int]]) -> None:
    model = load_model(resolve_model(""), dtype_name="bfloat16", weight_dtype=weight_dtype, device_name="cpu")
    description = model.description
    assert [layer.shape for layer in model.forward.layout.layers] == [KvShape(num_kv_heads=3, head_dim=64)] * 30
    assert (description.vocabulary_size, description.context_length) == (49152, 8192)
    assert description.eos_token_ids == (2, 0), "<|im_end|>, and <|endoftext|> by its text"
    assert description.defaults.sampling == {"temperature": 0.2, "top_p": 0.9}
    (output_ids,) = generate_together(model, prompts[:1], NUM_TOKENS, chunk_tokens=512)
    assert "Paris" in str(load_tokenizer(resolve_model("")).decode(output_ids))
