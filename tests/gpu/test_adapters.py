"""LoRA on a GPU: the kernels, captured steps that serve other adapters than at the capture, and loads beside steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from inflight.executor.adapters.peft_files import parse, read_files
from inflight.executor.adapters.weights import AdapterLimits
from inflight.executor.gpu.runner import GpuRunner
from tests.kernels.adapted import (
    NUM_TOKENS,
    adapted_requests,
    adapter_files,
    assert_rows_change_by_their_adapters,
    load_adapted,
    merged_tokens,
)
from tests.kernels.test_gpu_runner import BLOCK_SIZE, LIMITS, NUM_BLOCKS, outputs
from tests.support.checkpoints.tiny_models import save_model, sizes

pytestmark = pytest.mark.gpu
GREEDY = (0, 1, 3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_change_by_their_adapters(gpu: torch.device, dtype: torch.dtype) -> None:
    assert_rows_change_by_their_adapters(dtype, gpu)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("uses_graphs", [True, False], ids=["graphs", "launches"])
def test_adapters_and_the_base_in_one_batch_say_what_merged_models_say(tmp_path: Path, uses_graphs: bool) -> None:
    base, files = save_model(LlamaConfig(**sizes()), tmp_path / "tiny"), adapter_files(tmp_path / "adapters")
    model, decoder = load_adapted(base, files, "cuda", NUM_BLOCKS)
    runner = GpuRunner(decoder, model.kv, LIMITS, BLOCK_SIZE, uses_graphs=uses_graphs)
    runner.prepare()
    together = outputs(runner, adapted_requests(GREEDY))
    for output, adapter, request in zip(together, (None, 0, 2, 0), adapted_requests(GREEDY), strict=True):
        if adapter is not None:
            assert output == merged_tokens(base, files[adapter], request.token_ids, NUM_TOKENS)

    # When the slot of adapter 0 gets adapter 1 behind the capture
    decoder.load_adapter(1, parse(read_files(files[1]), AdapterLimits(decoder.shape, 16)))
    (request,) = adapted_requests((1,))
    request.cache_salt = b"another"
    prompt = list(request.token_ids)
    assert outputs(runner, [request]) == [merged_tokens(base, files[1], prompt, NUM_TOKENS)]
