"""Experts whose matrices are as a checkpoint has them, under Triton's interpreter: products, and whole models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.checkpoint.quantized_weight import Coded, QuantizedWeight, stacked
from inflight.executor.experts.layer import ExpertLayer
from inflight.executor.experts.products import Activation, GroupedProduct
from inflight.executor.formats.loading import load_network
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.products.coded import CodedMatrix, coded_matrix
from inflight.tools.sizing.model_shape import read_model_shape
from inflight.tools.sizing.weights import Role
from tests.kernels.test_coded_products import NUM_COLUMNS, NUM_ROWS, bits, fp8, mxfp4, numbers, nvfp4, with_zeros
from tests.kernels.test_gpu_experts import shape_of
from tests.support.checkpoints.float_checkpoints import (
    compressed_fp4,
    fp4_of_compressed_tensors,
    fp4_of_modelopt,
    fp8_in_blocks,
    fp8_of_matrices,
)
from tests.support.checkpoints.quantized_checkpoints import (
    Encoder,
    awq,
    awq_config,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
    load_float32,
    save_quantized,
)

CPU = torch.device("cpu")
NUM_EXPERTS = 3
# Steps whose pairs are tiles of their own, and those with tiles of 16 and of 64 rows.
NUM_ROWS_OF_STEPS = (1, 9, 30)


def int8_of_rows() -> QuantizedWeight:
    return QuantizedWeight(
        bits(NUM_ROWS, NUM_COLUMNS), numbers(NUM_ROWS, 1).abs() * 0.01, numbers(NUM_ROWS, 1), 8, NUM_COLUMNS
    )


FORMATS: dict[str, Callable[[], Coded]] = {
    "int4 with zeros": with_zeros,
    "int8 with offsets": int8_of_rows,
    "fp8 of rows": lambda: fp8(1, NUM_COLUMNS),
    "fp8 in blocks": lambda: fp8(16, 128),
    # 80 rows are no multiple of 32: a block would have rows of two experts.
    "fp8 in blocks that do not divide": lambda: fp8(32, 128),
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
}


def of_experts(make: Callable[[], Coded], device: torch.device = CPU) -> tuple[CodedMatrix, Tensor]:
    """The matrices of all experts, whose codes differ, and the dense ones `[experts, rows, columns]`."""
    parts = [make() for _ in range(NUM_EXPERTS)]
    parts = [replace(part, codes=part.codes.roll(index, 0)) for index, part in enumerate(parts)]
    dense = torch.stack([part.dequantized() for part in parts])
    return coded_matrix(stacked(parts).to(device)), dense.to(device)


def multiply(product: GroupedProduct, num_rows: int, device: torch.device = CPU) -> Tensor:
    """The products of some rows with the experts that they choose."""
    shape = shape_of(NUM_EXPERTS, 2, hidden_size=NUM_COLUMNS)
    layer = ExpertLayer(shape, numbers(NUM_EXPERTS, NUM_COLUMNS).to(device), None, product, product)
    # Small enough for the exponential of a gate.
    hidden = 0.01 * numbers(num_rows, NUM_COLUMNS, seed=3).to(device)
    choice = layer.choose(hidden)
    return product.multiply(
        hidden, layer.order(choice.experts, 4), choice.weights if product.activation is None else None
    )


@pytest.mark.parametrize("activation", [None, Activation()], ids=["down", "gates"])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_dense_matrices(name: str, activation: Activation | None) -> None:
    assert_products_are_those_of_the_dense_matrices(name, activation, CPU)


def assert_products_are_those_of_the_dense_matrices(
    name: str, activation: Activation | None, device: torch.device
) -> None:
    """In float32."""
    matrix, dense = of_experts(FORMATS[name], device)
    coded, expected = GroupedProduct(matrix, NUM_EXPERTS, activation), GroupedProduct(dense, NUM_EXPERTS, activation)
    for num_rows in NUM_ROWS_OF_STEPS:
        found, wanted = multiply(coded, num_rows, device), multiply(expected, num_rows, device)
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_columns_of_each_expert_may_have_an_order_of_their_own() -> None:
    matrix, dense = of_experts(with_zeros)
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(NUM_COLUMNS, generator=generator) for _ in range(NUM_EXPERTS)])
    in_order = torch.empty_like(dense)
    for expert, order in enumerate(orders):
        in_order[expert][:, order] = dense[expert]
    coded = GroupedProduct(matrix, NUM_EXPERTS, None, order=orders.int())
    expected = multiply(GroupedProduct(in_order, NUM_EXPERTS), 9)
    torch.testing.assert_close(multiply(coded, 9), expected, rtol=1e-5, atol=1e-5)


def test_products_of_a_row_do_not_depend_on_the_others() -> None:
    matrix, _ = of_experts(lambda: fp8(16, 128))
    product = GroupedProduct(matrix, NUM_EXPERTS, Activation())
    together = multiply(product, 22).unflatten(0, (22, 2))
    assert torch.equal(multiply(product, 9).unflatten(0, (9, 2)), together[:9])


# --- checkpoints

NVFP4, INT4 = "nvfp4-pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
MODEL_OPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CASES: dict[str, tuple[str, Encoder, dict[str, Any]]] = {
    "qwen3-moe in FP8 blocks": (
        "qwen3_moe", fp8_in_blocks(64, 64), {"quant_method": "fp8", "weight_block_size": [64, 64]},
    ),
    "qwen3-moe in GPTQ with act-order": (
        "qwen3_moe", gptq(4, 32, has_act_order=True), gptq_config(4, 32, desc_act=True),
    ),
    "qwen3-moe in AWQ": ("qwen3_moe", awq(64), awq_config(64)),
    "qwen3-moe in NVFP4 of ModelOpt": ("qwen3_moe", fp4_of_modelopt, MODEL_OPT),
    "glm4-moe in FP8 of tensors": ("glm4_moe", fp8_of_matrices("weight_scale"), {"quant_method": "fp8"}),
    "glm4-moe in int4": (
        "glm4_moe",
        compressed("pack-quantized", torch.float32, **INT4, group_size=32),
        compressed_config("pack-quantized", **INT4, group_size=32),
    ),
    "nemotron-h in NVFP4 of ModelOpt": ("nemotron_h", fp4_of_modelopt, MODEL_OPT),
    "mixtral in NVFP4": (
        "mixtral", fp4_of_compressed_tensors(NVFP4), compressed_config(NVFP4, **compressed_fp4(NVFP4)),
    ),
}  # fmt: skip


def load(folder: Path, **options: Any) -> PagedModel:
    source = resolve_model(str(folder))
    return load_model(source, **{"dtype_name": "float32", "backend_name": "triton", "device_name": "cpu"} | options)


FP8_BLOCKS, ACT_ORDER = "qwen3-moe in FP8 blocks", "qwen3-moe in GPTQ with act-order"
MLP = "model.layers.0.mlp"
EXPERT = f"{MLP}.experts.1"


@pytest.mark.parametrize(
    ("case", "change", "reason"),
    [
        (FP8_BLOCKS, "without up_proj.weight", r"experts\.1\.up_proj\.weight is missing"),
        (FP8_BLOCKS, "without router", r"lacks 1 weights, such as model\.layers\.0\.mlp\.gate\.weight"),
        (FP8_BLOCKS, "without down_proj", r"experts\.1\.down_proj is missing, of the experts 0 to 3"),
        (FP8_BLOCKS, "dense down_proj", r"experts\.1\.down_proj is dense, and .*experts\.0\.down_proj is quantized"),
        (ACT_ORDER, "other order", r"experts\.1\.up_proj\.g_idx is not that of .*experts\.1\.gate_proj"),
    ],
)
def test_experts_that_are_not_one_matrix_are_refused_by_tensor(
    case: str, change: str, reason: str, tmp_path: Path
) -> None:
    family, encode, config = CASES[case]
    path = save_quantized(tmp_path / "model", family, config, encode) / "model.safetensors"
    tensors = load_file(path)
    if change.startswith("without"):
        name = change.split()[1]
        left_out = f"{MLP}.gate." if name == "router" else f"{EXPERT}.{name}."
        tensors = {key: one for key, one in tensors.items() if not f"{key}.".startswith(left_out)}
    elif change == "other order":
        tensors[f"{EXPERT}.up_proj.g_idx"] = tensors[f"{EXPERT}.up_proj.g_idx"].flip(0)
    else:
        del tensors[f"{EXPERT}.down_proj.weight_scale_inv"]
        tensors[f"{EXPERT}.down_proj.weight"] = tensors[f"{EXPERT}.down_proj.weight"].float()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=reason):
        load_float32(path.parent)


@pytest.mark.parametrize("name", CASES)
def test_layers_are_those_of_transformers_with_the_dense_matrices(name: str, tmp_path: Path) -> None:
    # Loading compares each layer, and the logits, with transformers' modules, which read the dense matrices.
    family, encode, config = CASES[name]
    folder = save_quantized(tmp_path / "model", family, config, encode)
    model = load(folder)
    assert model.description.weight_dtype == "quantized"
    assert isinstance(model.forward, GpuForward)
    experts = [layer.experts for layer in model.forward.decoder._layers if layer.experts is not None]
    assert experts
    for layer in experts:
        for product in (layer.gate_up, layer.down):
            assert isinstance(product.matrix, CodedMatrix), "nothing is expanded"
    # The matrices that transformers read are those that the encoder stands for.
    ours, theirs = (load_float32(path) for path in (folder, folder.with_name("model-dense")))
    ids = torch.tensor([[5, 9, 33, 7, 8]])
    with torch.inference_mode():
        assert (ours(ids).logits - theirs(ids).logits).abs().max() <= 1e-4


def test_corrections_of_the_choice_keep_their_precision(tmp_path: Path) -> None:
    family, encode, config = CASES["nemotron-h in NVFP4 of ModelOpt"]
    folder = save_quantized(tmp_path / "model", family, config, encode)
    network, _ = load_network(resolve_model(str(folder)), torch.bfloat16, torch.device("cpu"))
    read = dict(network.named_parameters())["model.layers.1.mixer.gate.e_score_correction_bias"]
    stored = load_file(folder / "model.safetensors")
    expected = next(one for name, one in stored.items() if name.endswith("e_score_correction_bias"))
    assert expected.dtype == torch.float32
    assert torch.equal(read, expected)


@pytest.mark.parametrize(
    ("name", "bytes_each"),
    [
        (FP8_BLOCKS, 1 + 4 / 64),
        ("mixtral in NVFP4", 0.5 + 2 / 16),
        ("nemotron-h in NVFP4 of ModelOpt", 0.5 + 2 / 16),
    ],
)
def test_experts_stay_as_in_the_file_on_a_cpu(name: str, bytes_each: float, tmp_path: Path) -> None:
    # Loading compares logits with those of transformers' modules, which read the dense matrices.
    family, encode, config = CASES[name]
    folder = save_quantized(tmp_path / "model", family, config, encode)
    model, dense = load(folder, backend_name="cpu"), load(folder, backend_name="cpu", weight_dtype="dense")
    assert model.description.weight_dtype == "quantized"
    assert isinstance(model.forward, NativeForward)
    assert isinstance(dense.forward, NativeForward)
    saved = dense.forward.decoder.num_matrix_bytes - model.forward.decoder.num_matrix_bytes
    experts = sum(weight.number for weight in read_model_shape(str(folder)).weights if weight.role is Role.EXPERT)
    assert saved >= (4 - bytes_each) * experts
