"""A model on a GPU, from the folder to its tokens: kernels, graphs, loop and pool as an executor uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.engine.runner import StepSizes
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.forward.gpu_memory import working_bytes
from inflight.executor.gpu.graphs import Bucket, Graph, capture
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.loader import load_executor
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.settings import ExecutorSettings
from tests.kernels.test_gpu_decoder import FAMILY, PROMPTS
from tests.kernels.test_gpu_drafts import MAKERS, check_drafts, folders
from tests.kernels.test_gpu_experts import FAMILY as EXPERTS
from tests.kernels.test_gpu_runner import (
    BLOCK_SIZE,
    LIMITS,
    NUM_BLOCKS,
    assert_same_sequences,
    changed_requests,
    outputs,
    requests,
)
from tests.support.checkpoints.tiny_models import save_model
from tests.support.device.greedy import assert_same, generate_alone, generate_together

__all__ = ["folders"]  # a fixture

pytestmark = pytest.mark.gpu

Compute = Callable[[Bucket], None]
# Tokens of the largest captured step with chunks: some steps of the requests are larger.
MOST_TOKENS = 8
GRAPHS = pytest.mark.parametrize(
    ("uses_graphs", "max_graph_tokens"),
    [(True, MOST_TOKENS), (True, 0), (False, MOST_TOKENS)],
    ids=["graphs", "graphs of decodes", "launches"],
)


def load(folder: Path, backend_name: str, forward_name: str = "auto") -> PagedModel:
    source, dtype = resolve_model(str(folder)), "float32"
    model = load_model(
        source, dtype_name=dtype, backend_name=backend_name, device_name="cuda", forward_name=forward_name
    )
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(FAMILY["llama"], tmp_path / "llama")


@pytest.mark.parametrize("name", FAMILY | EXPERTS)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = save_model((FAMILY | EXPERTS)[name], tmp_path / name)
    network: Any = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
    model = load(folder, "auto")
    assert isinstance(model.forward, GpuForward)

    together = generate_together(model, PROMPTS, num_tokens=20, chunk_tokens=6)

    for output_ids, prompt in zip(together, PROMPTS, strict=True):
        assert_same(output_ids, generate_alone(network, prompt, 20))


def test_generic_path_runs_on_the_same_kernels(folder: Path) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
    model = load(folder, "triton", "transformers")
    together = generate_together(model, PROMPTS, num_tokens=10, chunk_tokens=6)
    for output_ids, prompt in zip(together, PROMPTS, strict=True):
        assert_same(output_ids, generate_alone(network, prompt, 10))


@GRAPHS
def test_runner_gives_the_tokens_of_the_generic_runner(folder: Path, uses_graphs: bool, max_graph_tokens: int) -> None:
    expected = outputs(ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), requests())
    model = load(folder, "triton")
    assert isinstance(model.forward, GpuForward)
    runner = graph_runner(model, uses_graphs, max_graph_tokens)
    runner.prepare()
    assert outputs(runner, requests()) == expected


def graph_runner(model: PagedModel, uses_graphs: bool, max_graph_tokens: int) -> GpuRunner:
    assert isinstance(model.forward, GpuForward)
    sizes = (model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE)
    return GpuRunner(*sizes, uses_graphs=uses_graphs, max_graph_tokens=max_graph_tokens)


@GRAPHS
def test_changed_rows_are_those_of_the_generic_runner(folder: Path, uses_graphs: bool, max_graph_tokens: int) -> None:
    expected, ours = changed_requests(), changed_requests()
    outputs(ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), expected)
    model = load(folder, "triton")
    assert isinstance(model.forward, GpuForward)
    runner = graph_runner(model, uses_graphs, max_graph_tokens)
    runner.prepare()
    outputs(runner, ours)
    assert_same_sequences(ours, expected)


@pytest.mark.parametrize("kind", MAKERS)
def test_tokens_do_not_depend_on_drafts(folders: Mapping[str, Path], kind: str) -> None:
    limits = replace(LIMITS, max_num_tokens=48, max_drafts=5)
    check_drafts(folders[kind], kind, limits, load, captures_graphs=True)


def test_graph_of_freed_memory_is_refused(folder: Path) -> None:
    # Given graphs that were captured for the keys and values of another pool
    model = load(folder, "triton")
    assert isinstance(model.forward, GpuForward)
    decoder, old_kv = model.forward.decoder, model.kv
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    runner = GpuRunner(decoder, model.kv, LIMITS, BLOCK_SIZE)
    new_kv, runner._step.kv = runner._step.kv, old_kv

    def capture_of_old_pool(fill: Compute, compute: Compute, buckets: Iterable[Bucket]) -> Mapping[Bucket, Graph]:
        graphs = capture(fill, compute, buckets)
        runner._step.kv = new_kv
        return graphs

    runner._capture = capture_of_old_pool
    with pytest.raises(ModelError, match=r"the CUDA graph of .* does not compute what its kernels compute"):
        runner.prepare()


def test_times_of_a_step_do_not_overlap_those_of_the_next(folder: Path) -> None:
    model = load(folder, "triton")
    assert isinstance(model.forward, GpuForward)
    runner = GpuRunner(model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE)
    runner.prepare()
    outputs(runner, requests()[:1])
    newest = runner._newest
    assert newest is not None
    assert newest.began_s <= newest.ended_s


def test_pool_leaves_room_for_what_steps_take(folder: Path) -> None:
    settings = ExecutorSettings(model=str(folder), device="cuda", max_num_sequences=8, max_num_tokens=64)
    loaded = load_executor(settings)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assert (
        loaded.num_blocks * loaded.model.forward.layout.bytes_per_block(settings.tokens_per_block)
        > 0.5 * total_bytes * 0.9
    )
    assert free_bytes > 0
    model = load(folder, "triton")
    assert isinstance(model.forward, GpuForward)
    without, decodes, mixed = (
        working_bytes(model.forward.decoder, model.forward.layout, StepSizes(LIMITS, BLOCK_SIZE, *graphs))
        for graphs in ((False, MOST_TOKENS), (True, 0), (True, MOST_TOKENS))
    )
    # A tiny model's steps fit into memory that torch has reserved before; a graph has a pool of its own.
    assert 0 <= without <= decodes <= mixed
    assert mixed > 0
