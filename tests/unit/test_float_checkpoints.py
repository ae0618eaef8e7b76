"""Checkpoints in FP8, MXFP4 and NVFP4: their matrices are those of the formats, they run like transformers on those
matrices, and what is not supported is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.checkpoint.quantized_linear import QuantizedLinear, make_dense
from inflight.executor.checkpoint.quantized_weight import FloatWeight
from inflight.executor.formats import loading
from inflight.executor.formats.folder import format_of
from inflight.executor.formats.loading import describe_weights, load_network
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from tests.support.checkpoints.float_checkpoints import (
    compressed_fp4,
    fp4_of_compressed_tensors,
    fp4_of_modelopt,
    fp8_in_blocks,
    fp8_of_matrices,
    with_activations,
)
from tests.support.checkpoints.quantized_checkpoints import (
    Encoder,
    assert_runs_like,
    compressed,
    compressed_config,
    load_float32,
    save_quantized,
)
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.torch_threads import torch_threads

pytestmark = pytest.mark.timeout(600)

ONE = torch.tensor(0.5)
FP8: Any = {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"


def fp8_config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | fields


def modelopt_config(algorithm: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt"}} | fields


CASES: dict[str, tuple[Encoder, dict[str, Any]]] = {
    # As of Qwen3-FP8 and DeepSeek; 256 rows are no multiple of 96.
    "fp8 blocks": (
        fp8_in_blocks(128, 128),
        fp8_config(weight_block_size=[128, 128], modules_to_not_convert=["lm_head"]),
    ),
    "fp8 partial blocks": (fp8_in_blocks(96, 64), fp8_config(weight_block_size=[96, 64])),
    "fp8 of matrices, static": (
        fp8_of_matrices("weight_scale_inv", activation_scale=ONE),
        fp8_config(weight_block_size=None, activation_scheme="static"),
    ),
    "autofp8": (
        fp8_of_matrices("weight_scale", input_scale=ONE),
        fp8_config(activation_scheme="static", ignored_layers=["lm_head"]),
    ),
    # The presets of llm-compressor.
    "FP8": (
        fp8_of_matrices("weight_scale", input_scale=torch.tensor([0.5])),
        with_activations("float-quantized", STATIC, strategy="tensor", **FP8),
    ),
    "FP8_DYNAMIC": (
        compressed("float-quantized", strategy="channel", **FP8),
        with_activations("float-quantized", DYNAMIC, strategy="channel", **FP8),
    ),
    "FP8_BLOCK": (
        fp8_in_blocks(128, 128, "weight_scale"),
        with_activations("float-quantized", DYNAMIC, strategy="block", block_structure=[128, 128], **FP8),
    ),
    "NVFP4A16": (fp4_of_compressed_tensors(NVFP4), compressed_config(NVFP4, **compressed_fp4(NVFP4))),
    "MXFP4A16": (fp4_of_compressed_tensors(MXFP4), compressed_config(MXFP4, **compressed_fp4(MXFP4))),
    "modelopt FP8": (
        fp8_of_matrices("weight_scale", input_scale=ONE),
        modelopt_config("FP8", kv_cache_quant_algo="FP8"),
    ),
    "modelopt NVFP4": (fp4_of_modelopt, modelopt_config("NVFP4", group_size=16, exclude_modules=["lm_head"])),
}
RUN = ("fp8 partial blocks", "MXFP4A16", "modelopt NVFP4")


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    encode, config = CASES[name]
    network = load_float32(save_quantized(tmp_path / "model", "qwen2", config, encode))
    layers = [module for module in network.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 14
    assert all(isinstance(layer.weight, FloatWeight) for layer in layers), "they stay as they are in the file"
    make_dense(network, torch.float32)
    for key, weight in load_file(tmp_path / "model-dense" / "model.safetensors").items():
        if weight.ndim == 2:
            # compressed-tensors rounds products to the type of the scales, and divides by a scale where we multiply.
            torch.testing.assert_close(network.state_dict()[key].to(weight.dtype), weight, rtol=2e-7, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_folder_runs_like_transformers_on_its_dense_matrices(name: str, tmp_path: Path) -> None:
    encode, config = CASES[name]
    assert_runs_like(save_quantized(tmp_path / "model", "llama", config, encode), tmp_path / "model-dense")


@pytest.mark.parametrize(("name", "bytes_each"), [("fp8 blocks", 1 + 4 / 64), ("MXFP4A16", 0.5 + 1 / 32)])
def test_matrices_stay_as_in_the_file_on_a_cpu(name: str, bytes_each: float, tmp_path: Path) -> None:
    encode, config = CASES[name]
    source = resolve_model(str(save_quantized(tmp_path / "model", "llama", config, encode)))
    with torch_threads(1):
        model, dense = (
            load_model(source, dtype_name="float32", device_name="cpu", weight_dtype=weight_dtype)
            for weight_dtype in ("auto", "dense")
        )
    assert model.description.weight_dtype == "quantized"
    assert isinstance(model.forward, NativeForward)
    assert isinstance(dense.forward, NativeForward)
    shape = model.forward.decoder.shape
    each_layer = 2 * shape.head_dim * (shape.num_heads + shape.num_kv_heads) + 3 * shape.intermediate_size
    numbers = shape.num_layers * shape.hidden_size * each_layer
    saved = dense.forward.decoder.num_matrix_bytes - model.forward.decoder.num_matrix_bytes
    assert saved == pytest.approx((4 - bytes_each) * numbers, rel=0.01)


def test_weights_that_do_not_fit_a_gpu_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, config = CASES["fp8 blocks"]
    folder = save_quantized(tmp_path / "model", "llama", config, encode)
    monkeypatch.setattr(loading, "free_device_bytes", lambda device: 1000)
    with pytest.raises(ModelError, match=r"its weights take \d+ bytes, and 1000 are free on meta"):
        load_network(resolve_model(str(folder)), torch.float32, torch.device("meta"))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_dense_weights_that_do_not_fit_are_refused_with_what_does(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(LlamaConfig(**sizes(num_hidden_layers=1)), tmp_path / "model")
    # Given a GPU, or a CPU, whose memory holds the weights in 8 bits and not in float32
    num_bytes = (folder / "model.safetensors").stat().st_size
    free_bytes = num_bytes // 3
    monkeypatch.setattr(loading, "is_gpu", lambda device: device.type == "meta")
    monkeypatch.setattr(loading, "free_device_bytes", lambda device: free_bytes if device.type == "meta" else None)
    monkeypatch.setattr(loading, "num_available_memory_bytes", lambda: free_bytes)
    ranks = ", with tensor_parallel_size=4, on each GPU .*" if device == "meta" else ""
    fits = rf"what fits: with 8 bits \d+ bytes, with 4 bits \d+ bytes{ranks}"
    with pytest.raises(ModelError, match=rf"its weights take \d+ bytes, and {free_bytes} are free on {device}; {fits}"):
        load_network(resolve_model(str(folder)), torch.float32, torch.device(device))


def test_dense_weights_that_fit_once_rounded_or_divided_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files are mapped, so they need not fit."""
    source = resolve_model(str(save_model(LlamaConfig(**sizes(num_hidden_layers=1)), tmp_path / "model")))
    free_bytes = (source.folder / "model.safetensors").stat().st_size // 3
    monkeypatch.setattr(loading, "num_available_memory_bytes", lambda: free_bytes)
    load_model(source, dtype_name="float32", weight_dtype="int8")
    load_network(source, torch.float32, torch.device("cpu"), kept_share=1 / 4)
    with pytest.raises(ModelError, match="are free on cpu"):
        load_network(source, torch.float32, torch.device("cpu"), kept_share=1 / 2)


def test_rows_of_blocks_have_their_scales(tmp_path: Path) -> None:
    tensors, dense = fp8_in_blocks(96, 64)(torch.randn(250, 200, generator=torch.Generator().manual_seed(0)))
    weight = FloatWeight(tensors["weight"].view(torch.uint8), tensors["weight_scale_inv"], 8, 64, 96)
    assert torch.equal(weight.dequantized(), dense)
    assert torch.equal(weight.rows(90, 201).dequantized(), dense[90:201])
    assert weight.num_bytes == 250 * 200 + 3 * 4 * 4


def test_fp4_has_the_same_numbers_as_whole_numbers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scale = torch.tensor([[0, 1, 127, 200]] * 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = FloatWeight(codes, scale, 4, 32)
    assert torch.equal(weight.to_whole_numbers().dequantized(), weight.dequantized())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fp8 blocks", "FP8, blocks of 128×128"),
        ("autofp8", "FP8, a scale per matrix"),
        ("FP8_DYNAMIC", "compressed-tensors, float-quantized of 8 bits"),
        ("modelopt NVFP4", "ModelOpt, NVFP4"),
    ],
)
def test_format_is_described_in_words(name: str, text: str) -> None:
    assert format_of(CASES[name][1]).description == text


def test_whole_numbers_may_have_activations_that_are_quantized_too() -> None:
    weights: Any = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    config = with_activations("int-quantized", activations, **weights)
    assert format_of(config).description == "compressed-tensors, int-quantized of 8 bits"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (fp8_config(fmt="e5m2"), "FP8 checkpoint: fmt 'e5m2' is not supported"),
        (fp8_config(weight_block_size=[128]), r"weight_block_size \[128\] is not supported"),
        (fp8_config(weight_block_size=[128, 96]), r"weight_block_size \[128, 96\] is not supported"),
        (fp8_config(weight_block_size=[0, 128]), r"weight_block_size \[0, 128\] is not supported"),
        (fp8_config(activation_scheme="groups"), "activation_scheme 'groups' is not supported"),
        (fp8_config(expert_dtype="fp4"), "expert_dtype 'fp4' is not supported"),
        (fp8_config(hadamard=True), r"FP8 checkpoint: hadamard is not supported \(it is True\)"),
        (modelopt_config("W4A8_AWQ"), "ModelOpt checkpoint: quant_algo 'W4A8_AWQ' is not supported"),
        (modelopt_config("NVFP4", group_size=32), "group_size 32 is not supported"),
        (modelopt_config("FP8", svdquant=True), "svdquant is not supported"),
        (
            with_activations("float-quantized", {"num_bits": 8, "type": "int"}, strategy="channel", **FP8),
            "group_0: input_activations is not supported",
        ),
        (compressed_config("float-quantized", strategy="block", **FP8), "block_structure None is not supported"),
        (
            compressed_config(NVFP4, **compressed_fp4(NVFP4) | {"group_size": 32}),
            "'tensor_group' with groups of 32 in nvfp4-pack-quantized is not supported",
        ),
    ],
)
def test_configuration_that_is_not_supported_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        format_of(config)


UP = "model.layers.0.mlp.up_proj"
Change = Callable[[dict[str, Tensor]], object]


def with_nan(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name].view(torch.uint8).flatten()[-1] = 0x7F


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "fp8 blocks",
            lambda t: t.update(weight_scale_inv=t["weight_scale_inv"][:3]),
            r"weight_scale_inv has the shape \[3, 2\] instead of \[4, 2\]",
        ),
        (
            "fp8 blocks",
            lambda t: t.update(weight_scale_inv=t["weight_scale_inv"] * torch.nan),
            "weight_scale_inv has scales that are not finite",
        ),
        ("fp8 blocks", lambda t: with_nan(t, "weight"), r"weight has numbers that are not finite \(NaN\)"),
        ("fp8 blocks", lambda t: t.update(weight=t["weight"].float()), "weight is of float32 instead of float8_e4m3fn"),
        ("fp8 blocks", lambda t: t.pop("weight_scale_inv"), "weight is of float8_e4m3fn, and has no scales"),
        ("fp8 blocks", lambda t: t.update(weight_zero_point=ONE.clone()), "weight_zero_point is not supported"),
        (
            "autofp8",
            lambda t: t.update(weight_scale=torch.ones(2)),
            r"weight_scale has the shape \[2\] instead of \[1\]",
        ),
        ("autofp8", lambda t: t.update(input_scale=ONE * torch.inf), "input_scale has scales that are not finite"),
        (
            "FP8_BLOCK",
            lambda t: t.update(weight_scale=t["weight_scale"][:, :1]),
            r"weight_scale has the shape \[4, 1\] instead of \[4, 2\]",
        ),
        (
            "MXFP4A16",
            lambda t: t.update(weight_scale=t["weight_scale"] | 255),
            "weight_scale has scales that are not finite",
        ),
        ("NVFP4A16", lambda t: with_nan(t, "weight_scale"), "weight_scale has scales that are not finite"),
        ("NVFP4A16", lambda t: t.update(weight_global_scale=torch.zeros(1)), "weight_global_scale is not positive"),
        ("modelopt NVFP4", lambda t: t.update(pre_quant_scale=ONE.clone()), "pre_quant_scale is not supported"),
        ("modelopt FP8", lambda t: t.pop("weight"), "weight is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, change: Change, message: str, tmp_path: Path) -> None:
    encode, config = CASES[name]
    folder = save_quantized(tmp_path / "model", "llama", config, encode)
    tensors = load_file(folder / "model.safetensors")
    layer = {key.removeprefix(f"{UP}."): tensors.pop(key) for key in [*tensors] if key.startswith(f"{UP}.")}
    change(layer)
    tensors |= {f"{UP}.{leaf}": tensor.contiguous() for leaf, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"up_proj.{message}"):
        load_float32(folder)


def test_scales_of_a_kv_cache_have_no_effect(tmp_path: Path) -> None:
    encode, config = CASES["modelopt FP8"]
    folder = save_quantized(tmp_path / "model", "llama", config, encode)
    tensors = load_file(folder / "model.safetensors")
    for name in ("k_proj.k_scale", "v_proj.v_scale", "k_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = ONE.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert load_float32(folder).config.model_type == "llama"


def test_configuration_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    encode, config = CASES["modelopt FP8"]
    folder = save_quantized(tmp_path / "model", "llama", config, encode)
    fields = json.loads((folder / "config.json").read_text())
    own = {name: value for name, value in fields.pop("quantization_config").items() if name.endswith("algo")}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": own | {"exclude_modules": ["lm_head"]}}))
    assert describe_weights(resolve_model(str(folder))) == "ModelOpt, FP8"
    assert load_float32(folder).config.model_type == "llama"
