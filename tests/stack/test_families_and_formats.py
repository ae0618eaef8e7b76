"""Families and formats of checkpoints from a client's call to its tokens: a router, Redis and an executor with a real
model give the greedy tokens of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from inflight.common import model_source
from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.gguf import import_gguf
from inflight.executor.settings import ExecutorSettings
from tests.property.test_families import CONFIGS as FAMILY_CONFIGS
from tests.property.test_families import TEXTS
from tests.property.test_hybrid_models import CONFIGS as HYBRID_CONFIGS
from tests.support.checkpoints.gguf_models import save_gguf_model
from tests.support.checkpoints.gpt_oss import save_mxfp4
from tests.support.checkpoints.quantized_checkpoints import save_gguf, save_quantized
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.greedy import assert_same, generate_alone
from tests.support.stack.cluster import run_router, token_request, until_ready
from tests.support.stack.real_executor import run_real_executor
from tests.unit.test_quantized_checkpoints import KINDS, RUN

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

LENGTH = 8
# One of each kind of layers and of cache. `tests/property` compares every family with transformers.
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**sizes(tie_word_embeddings=True)),
    "mistral-window": MistralConfig(**sizes(sliding_window=8)),
    **{name: FAMILY_CONFIGS[name] for name in ("gemma3", "glm4-moe")},
    **{name: HYBRID_CONFIGS[name] for name in ("lfm2", "qwen3_5-native")},
}
FORMATS = ("gptq", "packed int4", "fp8")

# Makes a checkpoint and the dense model in float32 that it stands for.
Maker = Callable[[Path], tuple[Path, Path]]


def family(config: PretrainedConfig) -> Maker:
    def make(folder: Path) -> tuple[Path, Path]:
        path = save_model(config, folder / "model", has_random_vectors=True)
        return path, path

    return make


def quantized(name: str) -> Maker:
    def make(folder: Path) -> tuple[Path, Path]:
        encode, config = RUN[name]
        return save_quantized(folder / "model", "llama", config, encode), folder / "model-dense"

    return make


def gguf_file(folder: Path) -> tuple[Path, Path]:
    path = save_gguf(folder / "tiny.gguf", "llama", [KINDS["Q4_K"], KINDS["Q6_K"]])
    return path, import_gguf(resolve_model(str(path)))


def gpt_oss_in_mxfp4(folder: Path) -> tuple[Path, Path]:
    return save_mxfp4(folder / "model"), folder / "model-dense"


def experts_in_gguf(folder: Path) -> tuple[Path, Path]:
    config = Qwen3MoeConfig(**sizes(num_experts=4, num_experts_per_tok=2, hidden_size=256, moe_intermediate_size=256))
    path = folder / "tiny.gguf"
    config.norm_topk_prob = True
    return path, save_gguf_model(path, "qwen3moe", config, [KINDS["Q4_K"], KINDS["Q6_K"]])


MAKERS: dict[str, Maker] = {
    **{name: family(config) for name, config in CONFIGS.items()},
    "gpt-oss-mxfp4": gpt_oss_in_mxfp4,
    "gguf-qwen3moe": experts_in_gguf,
    **{name: quantized(name) for name in FORMATS},
    "gguf-q4_k-q6_k": gguf_file,
}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports of GGUF files go to the folder of the test; compiled kernels stay where they are."""
    monkeypatch.setattr(model_source, "cache_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize("name", MAKERS)
async def test_greedy_tokens_through_a_router_are_those_of_transformers(
    name: str, redis_url: str, pool: str, tmp_path: Path
) -> None:
    path, dense = MAKERS[name](tmp_path)
    settings = ExecutorSettings(
        model=str(path),
        served_model_name=pool,
        listen="127.0.0.1:0",
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_tokens_in_paged_kv_cache=1024,
        max_num_sequences=4,
    )
    async with run_real_executor(settings) as (_, address), run_router(pool, pool, redis_url, [address]) as router:
        await until_ready(router, 1)

        async def generate(prompt: list[int]) -> list[int]:
            call = router.stub.Generate(token_request(prompt, LENGTH))
            return [token_id async for response in call for token_id in response.event.delta.token_ids]

        outputs = await asyncio.gather(*map(generate, TEXTS))

    network: Any = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager")
    for output_ids, prompt in zip(outputs, TEXTS, strict=True):
        assert_same(output_ids, generate_alone(network, prompt, LENGTH))
