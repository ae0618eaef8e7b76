"""Hybrids from quantized checkpoints on a GPU, under Triton's interpreter: matrices stay as they are in the file, and
logits are those of transformers with the dense ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import NemotronHConfig, PretrainedConfig, Qwen3_5TextConfig

import inflight.common.model_source as model_source
from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.fp8_weight import Fp8Weight
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.decoder import FusedLayer
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.products.coded import CodedMatrix, CodedWeight
from tests.kernels.test_coded_experts import MODEL_OPT
from tests.kernels.test_gpu_recurrent import check_logits
from tests.support.checkpoints.float_checkpoints import fp4_of_modelopt, fp8_in_blocks, fp8_of_matrices
from tests.support.checkpoints.gguf_models import save_gguf_model
from tests.support.checkpoints.quantized_checkpoints import (
    CONFIGS,
    HYBRID,
    Encoder,
    awq,
    awq_config,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
    save_quantized,
)
from tests.support.checkpoints.tiny_models import save_model
from tests.unit.test_gguf_architectures import KINDS, configs

FP8_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
CHANNELS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
CASES: dict[str, tuple[str, Encoder, dict[str, Any]]] = {
    "qwen3.5-moe in FP8 blocks": ("qwen3_5_moe", fp8_in_blocks(32, 32), FP8_BLOCKS),
    "qwen3.5-moe in GPTQ with act-order": (
        "qwen3_5_moe", gptq(4, 32, has_act_order=True), gptq_config(4, 32, desc_act=True),
    ),
    "qwen3.5-moe in NVFP4": ("qwen3_5_moe", fp4_of_modelopt, MODEL_OPT),
    "qwen3-next in FP8 blocks": ("qwen3_next", fp8_in_blocks(32, 32), FP8_BLOCKS),
    "qwen3.5 in FP8 of channels": (
        "qwen3_5",
        compressed("float-quantized", torch.float32, **CHANNELS),
        compressed_config("float-quantized", **CHANNELS),
    ),
    "lfm2 in AWQ": ("lfm2", awq(32), awq_config(32)),
    "nemotron-h in FP8 of ModelOpt": (
        "nemotron_h",
        fp8_of_matrices("weight_scale", input_scale=torch.tensor(0.1)),
        MODEL_OPT | {"quant_algo": "FP8"},
    ),
    "nemotron-h in GPTQ with act-order": (
        "nemotron_h", gptq(4, 32, has_act_order=True), gptq_config(4, 32, desc_act=True),
    ),
}  # fmt: skip


def load(path: Path, **options: Any) -> PagedModel:
    source = resolve_model(str(path))
    return load_model(source, **{"dtype_name": "float32", "backend_name": "triton", "device_name": "cpu"} | options)


def layers_of(model: PagedModel) -> tuple[FusedLayer, ...]:
    assert isinstance(model.forward, GpuForward)
    return model.forward.decoder._layers


def assert_keeps_codes(layer: FusedLayer) -> None:
    """Asserts that nothing of a layer is dense but its router and the projection of a number for each head."""
    for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
        if weight is None:
            continue
        assert isinstance(weight, CodedWeight)
        dense = [part for part in weight.parts if isinstance(part, Tensor)]
        has_gates = weight is layer.qkv and layer.mixer is not None and layer.mixer.shape.corrects
        num_gates = 2 * layer.mixer.shape.num_heads if layer.mixer is not None and has_gates else 0
        assert sum(part.shape[0] for part in dense) == num_gates
        assert len(dense) <= 1, "those that the checkpoint leaves dense are one product"
    if layer.experts is not None:
        assert all(isinstance(one.matrix, CodedMatrix) for one in (layer.experts.gate_up, layer.experts.down))


@pytest.mark.parametrize("name", CASES)
def test_matrices_stay_as_in_the_file_and_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    # Loading compares each layer with that of transformers, in chunks and decodes.
    family, encode, config = CASES[name]
    folder = save_quantized(tmp_path / "model", family, config, encode)
    model = load(folder)
    assert model.description.weight_dtype == "quantized"
    for layer in layers_of(model):
        assert_keeps_codes(layer)
    check_logits(tmp_path / "model-dense", model, 35, (3, 1, 27, 1, 3))


def test_projections_of_one_form_are_one_product(tmp_path: Path) -> None:
    # Given blocks that queries, gates, keys and values consist of, also where the rows of heads are in turn
    family, encode, config = CASES["qwen3-next in FP8 blocks"]
    recurrent, attention = layers_of(load(save_quantized(tmp_path / "model", family, config, encode)))
    for layer, num_parts in ((recurrent, 2), (attention, 1)):
        assert isinstance(layer.qkv, CodedWeight)
        assert len(layer.qkv.parts) == num_parts
        matrix = layer.qkv.parts[0]
        assert isinstance(matrix, CodedMatrix)
        assert matrix.row_block == 32


def test_decoder_of_a_model_for_images_is_read(tmp_path: Path) -> None:
    # Given the names that a checkpoint of Qwen3.6 has, and what is not used of it
    family, encode, config = CASES["qwen3.5-moe in FP8 blocks"]
    path = save_quantized(tmp_path / "model", family, config, encode) / "model.safetensors"
    tensors = {
        f"model.language_model.{name.removeprefix('model.').removeprefix('language_model.')}"
        if name.startswith("model.")
        else name: tensor
        for name, tensor in load_file(path).items()
    }
    unused = {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(2, 2), "mtp.fc.weight": torch.zeros(2, 2)}
    save_file(tensors | unused, path, {"format": "pt"})
    # When it is loaded, which compares its layers
    model = load(path.parent)
    # Then nothing is expanded
    for layer in layers_of(model):
        assert_keeps_codes(layer)


def test_gguf_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given two types in turn, and columns of values in another order
    name = "qwen35moe"
    monkeypatch.setattr(model_source, "cache_folder", lambda: tmp_path / "cache")
    path, config = tmp_path / "tiny.gguf", configs()[name]
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    save_gguf_model(path, name, config, [KINDS.Q4_K, KINDS.Q6_K, KINDS.Q4_K])
    model = load(path)
    assert model.description.weight_dtype == "quantized"
    for layer in layers_of(model):
        for weight in (layer.qkv, layer.output):
            # Rows of other sizes have no whole blocks, and are dense in the file.
            if weight.shape[1] % 256 == 0:
                assert isinstance(weight, CodedWeight)
                assert all(isinstance(part, CodedMatrix) for part in weight.parts)


# Heads whose gates are whole rows of the products in FP8.
HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_value_head_dim": 16}


# The same of the time steps of Mamba 2.
NEMOTRON_H = NemotronHConfig(
    **CONFIGS["nemotron_h"].to_dict()
    | {"layers_block_type": ["linear_attention", "linear_attention", "mlp", "full_attention"], "mamba_num_heads": 16}
)


@pytest.mark.parametrize(
    "config",
    [CONFIGS["lfm2"], Qwen3_5TextConfig(**HYBRID | HEADS), NEMOTRON_H],
    ids=["lfm2", "qwen3.5", "nemotron-h"],
)
def test_fp8_of_weights_and_kv(config: PretrainedConfig, tmp_path: Path) -> None:
    # Loading compares each layer with that of transformers, in chunks and decodes.
    folder = save_model(config, tmp_path / "model", has_random_vectors=True)
    model = load(folder, weight_dtype="fp8", kv_cache_dtype="fp8")
    assert all(isinstance(layer.qkv, Fp8Weight) and isinstance(layer.output, Fp8Weight) for layer in layers_of(model))
    assert model.forward.layout.layer_dtypes == (torch.float8_e4m3fn,)
