"""Encodings that the benchmarks of formats make: what the executor reads is the model, rounded."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from inflight.bench.engine.formats import encodings
from inflight.bench.engine.formats.encodings import Encoder
from inflight.bench.engine.formats.padding import copy_padded
from inflight.bench.engine.formats.superblocks import quantize
from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.quantized_linear import QuantizedLinear
from inflight.executor.formats.loading import load_network
from tests.support.checkpoints.quantized_checkpoints import CONFIGS
from tests.support.checkpoints.tiny_models import save_model


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIGS["llama"], tmp_path_factory.mktemp("model") / "dense", has_random_vectors=True)


def load(folder: Path) -> Any:
    return load_network(resolve_model(str(folder)), torch.float32, torch.device("cpu"))[0]


def test_copy_off_grid_computes_the_same_with_other_numbers(dense: Path, tmp_path: Path) -> None:
    encodings.copy_off_grid(dense, tmp_path / "copy")
    before, after = load_file(dense / encodings.WEIGHTS), load_file(tmp_path / "copy" / encodings.WEIGHTS)
    matrices = [name for name in before if name.endswith("_proj.weight")]
    assert matrices
    assert not any(torch.equal(before[name], after[name]) for name in matrices)
    assert_computes_the_same(dense, tmp_path / "copy", 1e-4)


def assert_computes_the_same(dense: Path, other: Path, tolerance: float) -> None:
    token_ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.inference_mode():
        expected, logits = (load(folder)(input_ids=token_ids).logits for folder in (dense, other))
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)


def test_padded_model_computes_the_same_in_a_wider_stream(dense: Path, tmp_path: Path) -> None:
    config = json.loads((dense / "config.json").read_text())
    # So large that it matters.
    config |= {"rms_norm_eps": 0.25}
    shutil.copytree(dense, tmp_path / "dense")
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    copy_padded(tmp_path / "dense", tmp_path / "padded", 512)
    weights = load_file(tmp_path / "padded" / encodings.WEIGHTS)
    assert {shape for name, weight in weights.items() if "self_attn" in name for shape in weight.shape} == {256, 512}
    assert_computes_the_same(tmp_path / "dense", tmp_path / "padded", 1e-5)


@pytest.mark.parametrize("hidden_size", [128, 320], ids=["smaller", "not whole heads"])
def test_padding_to_sizes_that_no_heads_have_is_refused(hidden_size: int, dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"hidden size {hidden_size} is not a multiple of 128, or is smaller"):
        copy_padded(dense, tmp_path / "padded", hidden_size)


@pytest.mark.parametrize(
    ("form", "bits", "group_size"),
    [
        (encodings.gptq(4, 32), 4, 32),
        (encodings.gptq(8, 64), 8, 64),
        (encodings.awq(128), 4, 128),
        (encodings.compressed_int4(32), 4, 32),
        (encodings.compressed_int8(), 8, None),
    ],
    ids=["gptq-int4", "gptq-int8", "awq", "compressed-int4", "compressed-int8"],
)
def test_executor_reads_the_rounded_matrices(
    form: tuple[Any, Encoder], bits: int, group_size: int | None, dense: Path, tmp_path: Path
) -> None:
    config, encode = form
    encodings.save_folder(dense, tmp_path / "encoded", config, encode)
    network, weights = load(tmp_path / "encoded"), load_file(dense / encodings.WEIGHTS)
    layers = {name: module for name, module in network.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(layers) == sum(name.endswith("_proj.weight") for name in weights)
    for name, layer in layers.items():
        weight = weights[f"{name}.weight"]
        largest = weight.unflatten(1, (-1, group_size or weight.shape[1])).abs().amax(-1)
        steps = largest * 2 / ((1 << bits) - 1)
        errors = (layer.weight.dequantized() - weight).abs().unflatten(1, (steps.shape[1], -1)).amax(-1)
        # Half a step, one at the end of a group's range, and what the scale's own rounding moves its largest number.
        assert (errors <= steps + largest * math.ldexp(1, -8)).all()


@pytest.mark.parametrize(("kind", "group_size", "bits"), [("Q4_K", 32, 4), ("Q6_K", 16, 6)])
def test_superblocks_hold_the_numbers_to_half_a_step(kind: str, group_size: int, bits: int) -> None:
    of_kind = gguf.GGMLQuantizationType[kind]
    numbers = np.random.default_rng(0).standard_normal((8, 512), np.float32)
    # Groups and whole blocks of zeros, and groups of one sign.
    numbers[0], numbers[1, :256], numbers[2, 64:128] = 0, 0, 0
    numbers[3] = np.abs(numbers[3])
    numbers[4] = -numbers[3]
    found = gguf.dequantize(quantize(numbers, of_kind), of_kind)
    groups, errors = (part.reshape(8, -1, group_size) for part in (numbers, np.abs(found - numbers)))
    spread = np.maximum(np.abs(groups).max(-1), groups.max(-1) - groups.min(-1))
    # Half a step, and what rounding scales and minima to 6 bits moves: half a step of the block's largest one.
    in_block = np.abs(numbers).reshape(8, 2, 256).max(-1).repeat(256 // group_size, 1)
    assert (errors.max(-1) <= spread * (2 if bits == 6 else 1) / (1 << bits) + in_block / 63).all()
    assert (found[0] == 0).all()
    assert (found[1, :256] == 0).all()
