"""Constrained rows on the GPU runner, under Triton's interpreter, beside others: the tokens of the generic runner."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.sequence import Processors, Sequence
from tests.kernels.test_gpu_runner import BLOCK_SIZE, LIMITS, load, outputs
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.text.small_vocabulary import EOS_ID, OTHER_EOS_ID, VOCABULARY_SIZE, schema_grammar
from tests.unit.test_constrained import make

GRAMMARS = (
    schema_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5}),
    None,
    schema_grammar({"type": "string", "maxLength": 12}),
    schema_grammar({"type": ["boolean", "null"]}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def write_model(folder: Path) -> Path:
    """Writes a random model of one layer with the vocabulary of the grammars."""
    config = LlamaConfig(**sizes(num_hidden_layers=1, vocab_size=VOCABULARY_SIZE, eos_token_id=[EOS_ID, OTHER_EOS_ID]))
    return save_model(config, folder / "tiny")


def requests() -> list[Sequence]:
    """More than there are seats, one of them with penalties besides its grammar."""
    sequences = [make(f"r{i}", grammar, i, max_tokens=14) for i, grammar in enumerate(GRAMMARS)]
    sequences[2].processors = Processors(presence_penalty=1.0, bad_words=((20,),))
    return sequences


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_constrained_rows_beside_others_are_those_of_the_generic_runner(folder: Path, num_ahead: int) -> None:
    expected = outputs(ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), requests(), num_ahead=0)
    model = load(folder, "triton")
    assert isinstance(model.forward, GpuForward)
    runner = GpuRunner(model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE)
    assert outputs(runner, requests(), num_ahead=num_ahead) == expected
    assert all(expected)
