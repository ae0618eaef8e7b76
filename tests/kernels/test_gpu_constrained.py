"""Constrained rows on the GPU runner, by Triton's interpreter: the same tokens as on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from common.model_source import resolve_model
from executor.gpu.runner import GpuRunner
from executor.model.model import PagedModel
from executor.model.runner import ModelRunner
from executor.scheduler.blocks import BlockPool
from executor.scheduler.limits import Batching, SchedulerLimits
from executor.scheduler.scheduler import Scheduler
from executor.scheduler.sequence import Sampling, Sequence, Stopping
from tests.scheduling import run_overlapped
from tests.small_vocabulary import (
    EOS_ID,
    OTHER_EOS_ID,
    VOCABULARY_SIZE,
    constraint,
    regex_grammar,
    schema_grammar,
    text_of,
)
from tests.tiny_models import save_model, sizes
from tests.torch_threads import torch_threads

BLOCK_SIZE = 16
NUM_BLOCKS = 16
LIMITS = SchedulerLimits(
    max_num_sequences=3,
    num_standby_sequences=4,
    max_num_tokens=16,
    context_length=64,
    enable_chunked_context=True,
    batching=Batching.INFLIGHT,
    enable_prefix_cache=True,
)
ENDS = frozenset({EOS_ID, OTHER_EOS_ID})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    config = LlamaConfig(**sizes(vocab_size=VOCABULARY_SIZE, num_hidden_layers=1))
    with torch_threads(1):
        yield save_model(config, tmp_path_factory.mktemp("model") / "tiny")


def load(folder: Path, backend_name: str) -> PagedModel:
    source = resolve_model(str(folder))
    model = PagedModel.load(source, dtype_name="float32", backend_name=backend_name, device_name="cpu")
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return model


def requests() -> list[Sequence]:
    forms = [schema_grammar({"enum": ["abc", 12, None]}), None, regex_grammar("[ab]{2,4}c?")]
    prompt = [40, 7, 55]
    return [
        Sequence(
            f"r{i}",
            1,
            [*prompt, i],
            4,
            Sampling(1.0 if i % 2 else 0.0, 0, 1.0, i),
            Stopping(9, 0, ENDS),
            1,
            b"",
            constraint=None if (form := forms[i % 3]) is None else constraint(form),
        )
        for i in range(5)
    ]


def test_constrained_rows_get_the_tokens_of_the_cpu(folder: Path) -> None:
    outputs = []
    model = load(folder, "triton")
    assert model.gpu_decoder is not None
    reference = load(folder, "reference")
    for runner in (
        GpuRunner(model.gpu_decoder, model.kv, LIMITS, BLOCK_SIZE),
        ModelRunner(reference, LIMITS, BLOCK_SIZE),
    ):
        sequences = requests()
        scheduler = Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
        for sequence in sequences:
            assert scheduler.offer(sequence) is None
        run_overlapped(scheduler, runner, 1)
        runner.close()
        outputs.append([sequence.token_ids[4:] for sequence in sequences])
        assert text_of(outputs[-1][0]) in ('"abc"', "12", "null")
    assert outputs[0] == outputs[1]
