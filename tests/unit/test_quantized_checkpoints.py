"""Quantized checkpoints: their matrices are those of the formats' own packages, and what is not supported is refused by
name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import inflight.common.model_source as model_source
import inflight.executor.model.loader as model_module
from inflight.cli import doctor
from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.checkpoint.gguf import import_gguf
from inflight.executor.checkpoint.quantized_linear import QuantizedLinear, make_dense
from inflight.executor.checkpoint.quantized_weight import (
    Coded,
    QuantizedWeight,
    dense_matrix,
    pack_halves,
    unpack_halves,
)
from inflight.executor.formats.folder import format_of
from inflight.executor.formats.gguf_blocks import BLOCK_TYPES, quantized_weight
from inflight.executor.formats.loading import describe_weights, load_network
from inflight.executor.model.loader import load_model
from inflight.tools.sizing.model_shape import read_model_shape
from tests.support.checkpoints.quantized_checkpoints import (
    AUTO_ROUND,
    Encoder,
    assert_runs_like,
    auto_round_config,
    awq,
    awq_config,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
    load_float32,
    random_blocks,
    save_gguf,
    save_quantized,
)

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

CPU = torch.device("cpu")
KINDS: Any = gguf.GGMLQuantizationType
GROUP, CHANNEL, TENSOR = {"strategy": "group", "group_size": 32}, {"strategy": "channel"}, {"strategy": "tensor"}


def case_of(form: str, **weights: Any) -> tuple[Encoder, dict[str, Any]]:
    return compressed(form, **weights), compressed_config(form, **weights)


CASES: dict[str, tuple[Encoder, dict[str, Any]]] = {
    "gptq int4": (gptq(4, 128), gptq_config(4, 128)),
    "gptq int8, whole rows": (gptq(8, -1), gptq_config(8, -1)),
    "gptq version 2": (gptq(4, 32, is_v1=False), gptq_config(4, 32, checkpoint_format="gptq_v2")),
    "gptq act-order": (gptq(4, 64, has_act_order=True), gptq_config(4, 64, desc_act=True)),
    "gptq act-order, int8": (gptq(8, 64, has_act_order=True), gptq_config(8, 64, desc_act=True)),
    "gptq groups of 256": (gptq(4, 256), gptq_config(4, 256)),
    "awq": (awq(64), awq_config(64)),
    "auto-round": (gptq(4, 64), auto_round_config("auto_round:auto_gptq", 64)),
    "auto-round without a packing": (gptq(4, 64), auto_round_config(None, 64)),
    "auto-round as awq": (awq(64), auto_round_config("auto_round:auto_awq", 64)),
    "auto-round under the label gptq": (gptq(4, 64), gptq_config(4, 64, **AUTO_ROUND)),
    "auto-round under the label awq": (awq(64), awq_config(64, zero_point=False, **AUTO_ROUND)),
    "packed int4": case_of("pack-quantized", num_bits=4, type="int", symmetric=True, **GROUP),
    "packed int4 with zeros": case_of("pack-quantized", num_bits=4, type="int", symmetric=False, **GROUP),
    "packed int8": case_of("pack-quantized", num_bits=8, type="int", symmetric=False, **CHANNEL),
    "int8": case_of("int-quantized", num_bits=8, type="int", symmetric=True, **CHANNEL),
    "int8 with zeros": case_of("int-quantized", num_bits=8, type="int", symmetric=False, **GROUP),
    "int8 of one scale": case_of("naive-quantized", num_bits=8, type="int", symmetric=True, **TENSOR),
    "fp8": case_of("float-quantized", num_bits=8, type="float", symmetric=True, **CHANNEL),
}


def exact_case(form: str, **weights: Any) -> tuple[Encoder, dict[str, Any]]:
    """Returns a case with scales in float32, whose products the package does not round further."""
    return compressed(form, torch.float32, **weights), compressed_config(form, **weights)


# One of each kind of layout runs through the engine.
RUN: dict[str, tuple[Encoder, dict[str, Any]]] = {
    "gptq": CASES["gptq act-order"],
    "awq": CASES["awq"],
    "packed int4": exact_case("pack-quantized", num_bits=4, type="int", symmetric=False, **GROUP),
    "int8": exact_case("int-quantized", num_bits=8, type="int", symmetric=True, **CHANNEL),
    "fp8": exact_case("float-quantized", num_bits=8, type="float", symmetric=True, **CHANNEL),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for imports; compiled kernels stay where they are."""
    monkeypatch.setattr(model_source, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def matrices_of(network: Any) -> dict[str, Tensor]:
    """Returns the weights of all linear layers, dense."""
    make_dense(network, torch.float32)
    return {name: weight for name, weight in network.state_dict().items() if weight.ndim == 2}


def count_quantized(network: Any) -> int:
    return sum(isinstance(module, QuantizedLinear) for module in network.modules())


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
def test_blocks_of_gguf_have_the_numbers_of_its_package(kind: Any) -> None:
    rows = random_blocks(np.random.default_rng(0), KINDS[kind.name], 48, 512)
    weight = quantized_weight(kind, torch.from_numpy(rows))
    assert np.array_equal(weight.dequantized().numpy(), gguf.dequantize(rows, KINDS[kind.name]))
    assert (weight.bits, weight.group_size) == (kind.bits, kind.group_size)


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    encode, config = CASES[name]
    folder = save_quantized(tmp_path / "model", "qwen2", config, encode)
    network = load_float32(folder)
    assert count_quantized(network) == 14
    found = matrices_of(network)
    dense = load_file(tmp_path / "model-dense" / "model.safetensors")
    expected = {key: weight for key, weight in dense.items() if weight.ndim == 2}
    assert found.keys() - expected.keys() <= {"lm_head.weight"}
    for key, weight in expected.items():
        # Packages round products to the type of the scales; here they are not rounded.
        assert torch.equal(found[key].to(weight.dtype), weight), key


@pytest.mark.parametrize(
    "fields",
    [
        {"failsafe": {"strategy": "rtn", "threshold": "1.0%"}},
        {"dynamic": {"-:lm_head": {}, r"-:.*\.mlp\.gate$": {}}},
        {"data_type": "int", "act_bits": 16},
        AUTO_ROUND,
    ],
)
def test_fields_that_change_no_number_are_accepted(fields: dict[str, Any], gptq_folder: Path, tmp_path: Path) -> None:
    assert count_quantized(load_float32(changed(gptq_folder, tmp_path / "model", **fields))) == 14


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing_format": "auto_round:gptqmodel"}, "packing_format 'auto_round:gptqmodel' is not supported"),
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format 'auto_round:llm_compressor' is not"),
        ({"backend": "auto_round:exllamav2"}, "backend 'auto_round:exllamav2' is not supported"),
        ({"extra_config": {"lm_head": {"bits": 8}}}, "extra_config has other settings for lm_head"),
        ({"extra_config": {"lm_head": {"group_size": 32}}}, "extra_config has other settings for lm_head"),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp' is not supported"),
        ({"act_bits": 8}, "act_bits 8 is not supported"),
        ({"bits": 2}, "bits 2 is not supported"),
        ({"super_bits": 6}, "super_bits is not supported"),
        ({"rotation_configs": [{}]}, "rotation_configs is not supported"),
    ],
)
def test_auto_round_that_is_not_supported_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        format_of(auto_round_config("auto_round:auto_gptq", 64) | fields)


def test_layers_that_auto_round_leaves_dense_are_accepted() -> None:
    config = auto_round_config("auto_round:auto_gptq", 64, extra_config={"lm_head": {"bits": 16, "data_type": "fp"}})
    assert format_of(config).description == "GPTQ, 4 bits, groups of 64"


def test_awq_has_the_numbers_of_another_reader() -> None:
    tensors, dense = awq(32)(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))
    converted = AutoAWQConverter(group_size=32, ignore=()).process({f"one.{name}": t for name, t in tensors.items()})
    read = compressed_weight({name.removeprefix("one."): tensor for name, tensor in converted.items()})
    assert torch.equal(read, dense.half())


def compressed_weight(tensors: dict[str, Tensor]) -> Tensor:
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
    decompressed = BaseCompressor.get_value_from_registry("pack-quantized").decompress(tensors, scheme)
    weight: Tensor = decompressed["weight"]
    return weight


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), [*((name, "llama") for name in RUN), ("gptq", "qwen2")])
def test_quantized_folder_runs_like_transformers_on_its_dense_matrices(name: str, family: str, tmp_path: Path) -> None:
    encode, config = RUN[name]
    folder = save_quantized(tmp_path / "model", family, config, encode)
    assert_runs_like(folder, tmp_path / "model-dense")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen2", ("Q4_K", "Q6_K")),
        ("llama", ("Q4_0", "Q4_1", "Q5_K", "Q8_0")),
        ("llama", ("Q2_K", "Q3_K", "IQ4_XS")),
    ],
)
def test_gguf_runs_like_its_import_by_transformers(
    family: str, kinds: tuple[str, ...], tmp_path: Path, cache: Path
) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", family, [KINDS[kind] for kind in kinds])
    dense = import_gguf(resolve_model(str(path)))
    expected, found = load_file(dense / "model.safetensors"), matrices_of(load_float32(path))
    for key, weight in expected.items():
        assert weight.ndim != 2 or torch.equal(found[key], weight), key
    assert_runs_like(path, dense)


@pytest.mark.usefixtures("cache")
def test_gguf_of_another_kind_is_imported_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(cast(Any, BLOCK_TYPES), KINDS["IQ4_XS"].value)
    path = save_gguf(tmp_path / "tiny.gguf", "llama", [KINDS["Q8_0"], KINDS["IQ4_XS"]])
    assert count_quantized(load_float32(path)) == 0
    assert re.search(r"tiny.gguf is imported as a dense model, because .* is of type IQ4_XS", caplog.text)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0"])
def test_gguf_is_read_without_its_weights_in_the_cache(kind: str, tmp_path: Path, cache: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", "llama", [KINDS[kind]])
    assert count_quantized(load_float32(path)) == 15, "with the output layer"
    assert not [*cache.rglob("*.safetensors")]


@pytest.fixture(scope="module")
def gptq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    encode, config = CASES["gptq int4"]
    return save_quantized(tmp_path_factory.mktemp("gptq") / "model", "llama", config, encode)


def changed(folder: Path, target: Path, **fields: Any) -> Path:
    """Returns a copy of a folder whose quantization has these fields."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] |= fields
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization method 'bitsandbytes' is not supported; only auto-round, "),
        ({"bits": 3}, "GPTQ checkpoint: bits 3 is not supported; only 4 or 8"),
        ({"bits": None}, "GPTQ checkpoint: bits is missing"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ({"dynamic": {"+:.*": {"bits": 8}}}, "GPTQ checkpoint: dynamic is not supported"),
        ({"dynamic": {"-:lm_head": {}, ".*down.*": {"bits": 8}}}, "GPTQ checkpoint: dynamic is not supported"),
        ({"data_type": "fp"}, "GPTQ checkpoint: data_type 'fp' is not supported"),
        ({"is_marlin_format": True}, "is_marlin_format True is not supported"),
        ({"group_size": 0}, "group_size 0 is neither -1 nor positive"),
        ({"group_size": 96}, "down_proj: 512 .* groups of 96, only of 16, 32, 64, 128 or a whole row"),
        ({"group_size": 64}, r"down_proj.qzeros has the shape \[4, 32\] instead of \[8, 32\]"),
        ({"bits": 8}, r"down_proj.qweight has the shape \[64, 256\] instead of \[128, 256\]"),
    ],
)
def test_configuration_that_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], message: str, gptq_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load_float32(changed(gptq_folder, tmp_path / "model", **fields))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("input_activations",), {"num_bits": 8, "dynamic": True}, "group_0: input_activations is not supported"),
        (("weights", "strategy"), "block", "strategy 'block' with groups of 32 in pack-quantized is not supported"),
        (("weights", "num_bits"), 6, "num_bits 6 is not supported"),
        (("weights", "type"), "float", "4 bits of type float in the format pack-quantized are not supported"),
        (("weights",), "int4", "group_0.weights is not an object"),
        (("targets",), ["re:.*mlp.*"], "has a scale, but no group of the configuration names it"),
    ],
)
def test_scheme_of_compressed_tensors_that_is_not_supported_is_refused_by_name(
    path: tuple[str, ...], value: Any, message: str, tmp_path: Path
) -> None:
    encode, config = CASES["packed int4"]
    folder = save_quantized(tmp_path / "model", "llama", config, encode)
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    for name in path[:-1]:
        group = group[name]
    group[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_float32(folder)


def test_quantization_that_is_no_object_is_refused_by_its_field(gptq_folder: Path, tmp_path: Path) -> None:
    folder = changed(gptq_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": "gptq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config.json: quantization_config is not an object"):
        load_float32(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "marlin-24"),
        ("sparsity_config", {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}),
        ("transform_config", {"config_groups": {"R1": {}}}),
    ],
)
def test_checkpoint_of_compressed_tensors_with_more_than_weights_is_refused(
    field: str, value: Any, tmp_path: Path
) -> None:
    encode, config = CASES["packed int4"]
    folder = save_quantized(tmp_path / "model", "llama", config, encode)
    with pytest.raises(ModelError, match=f"compressed-tensors checkpoint: {field} .*is not supported"):
        load_float32(changed(folder, tmp_path / "changed", **{field: value}))


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"scales": t["scales"][:1]}, r"q_proj.scales has the shape \[1, 256\] instead of \[2, 256\]"),
        (lambda t: t | {"scales": t["scales"].int()}, "q_proj.scales is of int32 instead of float16 or bfloat16"),
        (lambda t: t | {"scales": t["scales"] * torch.inf}, "q_proj.scales has scales that are not finite"),
        (lambda t: t | {"qweight": t["qweight"][:-1]}, r"q_proj.qweight has the shape \[31, 256\]"),
        (lambda t: t | {"g_idx": t["g_idx"] * 0}, "q_proj: the groups of its columns are not of equal size"),
        (lambda t: t | {"g_idx": t["g_idx"] + 1}, "q_proj: the groups of its columns are not of equal size"),
        (lambda t: t | {"workspace": t["g_idx"]}, "q_proj.workspace is not supported"),
        (lambda t: {"qweight": t["qweight"]}, "q_proj.qzeros is missing"),
        (lambda t: {"g_idx": t["g_idx"]}, "the model has no parameter model.layers.0.self_attn.q_proj.g_idx"),
        (lambda t: {}, "the checkpoint lacks 1 weights, such as model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, gptq_folder: Path, tmp_path: Path
) -> None:
    folder = changed(gptq_folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    layer = {name: tensors.pop(f"{Q_PROJ}.{name}") for name in ("qweight", "qzeros", "scales", "g_idx")}
    tensors |= {f"{Q_PROJ}.{name}": tensor.clone() for name, tensor in change(layer).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_float32(folder)


@pytest.mark.usefixtures("cache")
def test_truncated_files_are_refused(gptq_folder: Path, tmp_path: Path) -> None:
    folder = changed(gptq_folder, tmp_path / "model")
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model.safetensors is truncated: \d+ bytes of \d+"):
        load_float32(folder)
    path = save_gguf(tmp_path / "tiny.gguf", "llama", [KINDS["Q4_K"]])
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"GGUF file .* is truncated: \d+ bytes of at least \d+"):
        load_float32(path)


def test_rows_and_column_order_of_a_matrix() -> None:
    codes = torch.randint(0, 16, (6, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale = torch.arange(1.0, 13).view(6, 2)
    weight = QuantizedWeight(pack_halves(codes), scale, -scale, 4, 32)
    expected = scale.repeat_interleave(32, 1) * codes.float() - scale.repeat_interleave(32, 1)
    assert torch.equal(unpack_halves(weight.codes), codes)
    assert torch.equal(weight.dequantized(), expected)
    assert torch.equal(weight.rows(2, 5).dequantized(), expected[2:5])
    assert torch.equal(dense_matrix(weight, torch.bfloat16), expected.bfloat16())
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(replace(weight, column_order=order.int()).dequantized()[:, order], expected)


def test_format_is_described_in_words(gptq_folder: Path, tmp_path: Path) -> None:
    assert describe_weights(resolve_model(str(gptq_folder))) == "GPTQ, 4 bits, groups of 128"
    path = save_gguf(tmp_path / "tiny.gguf", "llama", [KINDS["Q4_K"], KINDS["Q6_K"]])
    assert describe_weights(resolve_model(str(path))) == "GGUF, Q4_K, Q6_K, F32; read directly"
    with pytest.raises(ModelError, match="bits 3 is not supported"):
        describe_weights(resolve_model(str(changed(gptq_folder, tmp_path / "model", bits=3))))


@pytest.mark.parametrize(
    "name",
    ["gptq int4", "gptq int8, whole rows", "awq", "auto-round", "auto-round as awq", "packed int4 with zeros", "int8"],
)
def test_size_counts_the_weights_of_a_quantized_folder(name: str, tmp_path: Path) -> None:
    encode, config = CASES[name]
    folder = save_quantized(tmp_path / "model", "llama", config, encode)
    expected = read_model_shape(str(tmp_path / "model-dense")).num_parameters
    assert read_model_shape(str(folder)).num_parameters == expected


def test_doctor_names_the_format_or_what_is_not_supported(gptq_folder: Path, tmp_path: Path) -> None:
    found = doctor.weights(str(gptq_folder))
    assert (found.verdict, found.text) == (doctor.Verdict.GOOD, "GPTQ, 4 bits, groups of 128")
    refused = doctor.weights(str(changed(gptq_folder, tmp_path / "model", quant_method="hqq")))
    assert (refused.verdict, refused.advice[:38]) == (doctor.Verdict.MISSING, "quantization method 'hqq' is not suppo")


@pytest.mark.parametrize("kind", ["gptq", "gguf"])
def test_numbers_of_a_checkpoint_leave_memory_when_they_are_packed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    if kind == "gguf":
        path = save_gguf(path.with_suffix(".gguf"), "llama", [KINDS["Q4_K"], KINDS["Q8_0"]])
    else:
        save_quantized(path, "llama", gptq_config(4, 64), gptq(4, 64))
    read: list[Coded] = []

    def load(*args: Any) -> tuple[PreTrainedModel, Path]:
        network, folder = load_network(*args)
        assert str(path) not in Path("/proc/self/maps").read_text()
        read.extend(module.weight for module in network.modules() if isinstance(module, QuantizedLinear))
        return network, folder

    monkeypatch.setattr(model_module, "load_network", load)
    load_model(resolve_model(str(path)), dtype_name="float32", device_name="cpu")
    assert len(read) >= 14
    assert [weight.codes.untyped_storage().nbytes() for weight in read] == [0] * len(read)
