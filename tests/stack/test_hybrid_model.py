"""A model with recurrent layers through the whole stack: drafts, cached prefixes, an executor that dies, refusals."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import Lfm2Config, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from inflight import AsyncClient, Completion
from inflight.bench.fleet.tiny_model import write_tokenizer
from inflight.common.model_source import ModelError, resolve_model
from inflight.common.settings import SettingError
from inflight.executor.checkpoint.shards import Shard
from inflight.executor.loader import load_executor
from inflight.executor.model.loader import load_model
from inflight.executor.settings import ExecutorSettings
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.local.state import read_state
from tests.integration.test_executor_metrics import documented
from tests.property.test_hybrid_models import CONFIGS as TEXT_CONFIGS
from tests.property.test_hybrid_models import TOKENS, Case, run, sequence_of
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.stack.executor_death import finished_after_death
from tests.support.stack.executors_linked import wait_for_executors
from tests.support.stack.http_pages import page

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

EXECUTOR_ARGS = (
    *("--dtype", "float32"),
    *("--num-threads", "1"),
    *("--max-num-sequences", "4"),
    *("--max-num-tokens", "48"),
    *("--max-tokens-in-paged-kv-cache", "4096"),
    *("--speculation", "suffix"),
)
PROMPT = "Once upon a time " * 6
ASKED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "ignore_eos": True, "want_token_ids": True}


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small LFM2 with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model") / "hybrid"
    folder.mkdir()
    vocabulary = write_tokenizer(folder)
    config = Lfm2Config(
        **sizes(vocab_size=len(vocabulary), num_hidden_layers=3, max_position_embeddings=1024),
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
    )
    return save_model(config, folder, has_random_vectors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hybrid_stack(tmp_path_factory: pytest.TempPathFactory, hybrid_model: Path) -> AsyncIterator[LocalStack]:
    """Two executors, so that one may die."""
    options = StackOptions(
        executors=2,
        model=str(hybrid_model),
        executor_args=EXECUTOR_ARGS,
        run_dir=tmp_path_factory.mktemp("run"),
    )
    async with LocalStack(options) as running:
        await wait_for_executors(running.address, options.executors)
        yield running


async def test_requests_at_once_and_behind_prefixes_say_what_each_says_alone(hybrid_stack: LocalStack) -> None:
    async with AsyncClient(hybrid_stack.address) as client:

        async def complete(number: int) -> Completion:
            asked = ASKED | {"seed": number}
            return await client.complete(f"{PROMPT}{number % 4}", max_tokens=40, **asked)

        alone = [await complete(number) for number in range(8)]
        again = await asyncio.gather(*(complete(number) for number in range(8)))
    assert [one.token_ids for one in again] == [one.token_ids for one in alone]
    # The whole prompt but its last tokens: its last checkpoint is where a block ends.
    assert max(one.usage.cached_tokens for one in again) == len(PROMPT) // 16 * 16


async def test_metrics_of_states_are_those_of_the_page(hybrid_stack: LocalStack) -> None:
    async with AsyncClient(hybrid_stack.address) as client:
        await client.complete(PROMPT, max_tokens=4, **ASKED)
    state = read_state(hybrid_stack.options.run_dir)
    assert state is not None
    saved = 0.0
    for process in state.processes:
        if process.role == "executor":
            _, text = await page(process.http_address)
            shown = dict(re.findall(r"^(inflight_state_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
            assert shown.keys() == {name for name in documented() if name.startswith("inflight_state_")}
            saved += float(shown["inflight_state_checkpoints_saved_total"])
    assert saved > 0


async def test_request_continues_with_its_tokens_when_its_executor_dies(hybrid_stack: LocalStack) -> None:
    async with AsyncClient(hybrid_stack.address) as client:
        whole = await client.complete(PROMPT, max_tokens=500, **ASKED)
        stream = client.generate(PROMPT, max_tokens=500, **ASKED)
        continued = await finished_after_death(hybrid_stack, stream)
    assert continued.token_ids == whole.token_ids


def test_executor_has_host_memory_for_preempted_requests(hybrid_model: Path) -> None:
    settings = ExecutorSettings(
        model=str(hybrid_model),
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_num_sequences=4,
        max_num_tokens=48,
        max_tokens_in_paged_kv_cache=208,
        batch_scheduler_policy="max_utilization",
        kv_cache_host_memory_bytes=2_000_000,
    )
    loaded = load_executor(settings)
    sequences = [sequence_of(str(number), TOKENS[number : number + 40], 60) for number in range(4)]
    for sequence in sequences:
        sequence.num_reserved_blocks = 3
    found = run(Case(loaded.model, None, {}), loaded.limits, [sequences], loaded.num_blocks)
    assert found.num_swapped_in == found.num_preemptions > 0 == found.num_recomputed_tokens


def test_ranks_on_gpus_are_refused_by_name(hybrid_model: Path) -> None:
    with pytest.raises(ModelError, match=r"its recurrent layers run on a GPU without tensor_parallel_size=2 only"):
        load_model(
            resolve_model(str(hybrid_model)),
            dtype_name="float32",
            backend_name="triton",
            device_name="cpu",
            shard=Shard(0, 2),
        )


def test_a_model_for_images_is_served_for_its_text(tmp_path: Path) -> None:
    """Its vision weights, and those that predict several tokens, are not used. Loading compares logits."""
    text = TEXT_CONFIGS["qwen3_5"]
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 52}
    config = Qwen3_5Config(
        text_config=text.to_dict(), vision_config=vision | {"num_position_embeddings": 16, "patch_size": 4}
    )
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(resolve_model(str(tmp_path)), dtype_name="bfloat16", device_name="cpu")
    assert model.forward.states is not None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"kv_cache_host_memory_bytes": 1_000_000},
            "only batch_scheduler_policy=max_utilization with batching=inflight",
        ),
        ({"weight_dtype": "fp8"}, "fp8 weights need the native forward pass on a GPU"),
        (
            {"attention_backend": "triton", "forward": "transformers"},
            "its recurrent layers need the native forward pass on a GPU, and forward=transformers is set",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_work_with_recurrent_layers_is_refused_by_name(
    hybrid_model: Path, changes: dict[str, Any], error: str
) -> None:
    settings = ExecutorSettings(model=str(hybrid_model), device="cpu", dtype="float32", num_threads=1, **changes)
    with pytest.raises((SettingError, ModelError), match=error):
        load_executor(settings)
