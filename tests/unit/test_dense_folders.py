"""Model folders whose tensors do not fit their configuration: each is refused by the name of a tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.formats.loading import describe_weights, load_network
from inflight.tools.sizing.model_shape import read_model_shape
from tests.support.checkpoints.adapter_files import save_adapter
from tests.support.checkpoints.quantized_checkpoints import gptq, gptq_config, save_quantized
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes

CPU = torch.device("cpu")
LAYER = "model.layers.0.self_attn"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LlamaConfig(**sizes()), tmp_path_factory.mktemp("llama") / "model")


def changed(folder: Path, target: Path, change: Callable[[Tensors], None], **files: Any) -> Path:
    """Writes a copy of a folder with other tensors, and with JSON files."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    target.mkdir()
    for path in folder.glob("*.json"):
        (target / path.name).write_text(path.read_text())
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def load(folder: Path) -> Any:
    return load_network(resolve_model(str(folder)), torch.float32, CPU)[0]


def added(**tensors: Tensor) -> Callable[[Tensors], None]:
    return lambda of_model: of_model.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})


def quantized(dtype: torch.dtype, scale: str) -> Callable[[Tensors], None]:
    """Returns a change of a projection to another type with a scale beside it."""

    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.q_proj.weight"] = tensors[f"{LAYER}.q_proj.weight"].to(dtype)
        tensors[f"{LAYER}.q_proj.{scale}"] = torch.tensor(1.0)

    return change


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (added(model__layers__0__self_attn__q_proj__bias=torch.zeros(64)), f"{LAYER}.q_proj.bias"),
        (added(model__layers__1__self_attn__k_norm__weight=torch.ones(16)), "model.layers.1.self_attn.k_norm.weight"),
        (added(model__layers__2__mlp__up_proj__weight=torch.ones(96, 64)), "model.layers.2.mlp.up_proj.weight"),
        (added(model__layers__0__self_attn__q_proj__lora_A__weight=torch.ones(4, 64)), f"{LAYER}.q_proj.lora_A.weight"),
        (added(score__weight=torch.ones(1, 64)), "score.weight"),
        (added(v_head__summary__bias=torch.ones(1)), "v_head.summary.bias"),
        (quantized(torch.float8_e4m3fn, "weight_scale"), f"{LAYER}.q_proj.weight_scale"),
        (quantized(torch.float8_e4m3fn, "weight_scale_inv"), f"{LAYER}.q_proj.weight_scale_inv"),
        (added(model__layers__0__self_attn__k_proj__k_scale=torch.ones(1)), f"{LAYER}.k_proj.k_scale"),
    ],
    ids=["bias", "norm", "layer", "lora", "reward", "value head", "fp8", "fp8 in blocks", "scale of the KV cache"],
)
def test_tensor_without_a_place_is_refused_by_name(
    change: Callable[[Tensors], None], tensor: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"the model has no place for {tensor}$"):
        load(changed(llama, tmp_path / "model", change))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_whole_numbers_without_a_quantization_are_refused_by_name(
    dtype: torch.dtype, llama: Path, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.q_proj.weight"] = tensors[f"{LAYER}.q_proj.weight"].to(dtype)

    with pytest.raises(ModelError, match=rf"{LAYER}.q_proj.weight is of \w+, and config.json names no quantization"):
        load(changed(llama, tmp_path / "model", change))


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (32, 32)])
def test_tensor_of_another_shape_is_refused_with_both_shapes(
    rows: int, columns: int, llama: Path, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.k_proj.weight"] = torch.ones(rows, columns)

    words = rf"{LAYER}.k_proj.weight has the shape \[{rows}, {columns}\] instead of \[32, 64\]"
    with pytest.raises(ModelError, match=words):
        load(changed(llama, tmp_path / "model", change))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(MixtralConfig(**sizes(num_local_experts=4)), tmp_path_factory.mktemp("mixtral") / "model")


EXPERTS = "model.layers.0.block_sparse_moe.experts"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {f"{EXPERTS}.1.w1.weight": torch.ones(96, 16)},
            r"experts.1.w1.weight has the shape \[96, 16\], others \[96, 64\]",
        ),
        ({f"{EXPERTS}.1.w1.weight": None}, "experts.1.w1.weight is missing"),
        ({f"{EXPERTS}.2.w{i}.weight": None for i in (1, 2, 3)}, "experts.2.w1.weight is missing"),
        (
            {f"{EXPERTS}.{n}.w3.weight": None for n in range(4)},
            "tensors of its files, such as those of experts, do not make those of the model",
        ),
        ({"model.layers.0.block_sparse_moe.gate.weight": torch.ones(5, 64)}, r"gate.weight has the shape \[5, 64\]"),
    ],
    ids=["shape", "tensor", "expert", "projection", "gate"],
)
def test_experts_that_differ_are_refused_by_name(
    change: dict[str, Tensor | None], words: str, mixtral: Path, tmp_path: Path
) -> None:
    def apply(tensors: Tensors) -> None:
        for name, tensor in change.items():
            assert name in tensors
            del tensors[name]
            if tensor is not None:
                tensors[name] = tensor

    with pytest.raises(ModelError, match=words):
        load(changed(mixtral, tmp_path / "model", apply))


def test_experts_are_not_renumbered(mixtral: Path, tmp_path: Path) -> None:
    # Given as many experts as there should be, one of which has the number of another
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(f"{EXPERTS}.2.")]:
            tensors[name.replace("experts.2.", "experts.4.")] = tensors.pop(name)

    with pytest.raises(ModelError, match=r"experts.2.w1.weight is missing"):
        load(changed(mixtral, tmp_path / "model", change))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Glm4MoeConfig(
        **sizes(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1)
    )
    return save_model(config, tmp_path_factory.mktemp("glm") / "model", has_random_vectors=True)


BLOCK = "model.layers.1.mlp"


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("gate.weight", None, "lacks 1 weights, such as {}"),
        ("gate.e_score_correction_bias", None, "lacks 1 weights, such as {}"),
        ("gate.e_score_correction_bias", torch.ones(5), r"{} has the shape \[5\] instead of \[4\]"),
        ("gate.e_score_correction_bias", torch.full((4,), torch.nan), "{} has numbers that are not finite"),
        ("shared_experts.down_proj.weight", torch.ones(64, 16), r"{} has the shape \[64, 16\] instead of \[64, 32\]"),
    ],
    ids=["no-router", "no-correction", "correction-shape", "correction-nan", "shared-shape"],
)
def test_router_and_shared_expert_that_do_not_fit_are_refused_by_name(
    name: str, tensor: Tensor | None, words: str, glm: Path, tmp_path: Path
) -> None:
    def apply(tensors: Tensors) -> None:
        del tensors[f"{BLOCK}.{name}"]
        if tensor is not None:
            tensors[f"{BLOCK}.{name}"] = tensor

    with pytest.raises(ModelError, match=words.format(f"{BLOCK}.{name}")):
        load(changed(glm, tmp_path / "model", apply))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_weight_that_is_no_number_is_refused_by_name(tensor: str, number: float, llama: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[tensor][-1, -1] = number

    with pytest.raises(ModelError, match=f"{tensor} has numbers that are not finite"):
        load(changed(llama, tmp_path / "model", change))


def test_buffers_of_older_checkpoints_are_left_out(llama: Path, tmp_path: Path) -> None:
    # Given tensors that follow from the configuration, as transformers once stored them
    old = added(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert load(changed(llama, tmp_path / "llama", old)).config.model_type == "llama"
    config = GPT2Config(vocab_size=VOCABULARY_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=256)
    gpt2 = save_model(config, tmp_path / "gpt2")
    old = added(h__0__attn__bias=torch.ones(1, 1, 8, 8), h__0__attn__masked_bias=torch.ones(1))

    def without_prefix(tensors: Tensors) -> None:
        for name in [*tensors]:
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        old(tensors)

    assert load(changed(gpt2, tmp_path / "old gpt2", without_prefix)).config.model_type == "gpt2"


def test_tied_output_layer_may_be_stored_as_well(tmp_path: Path) -> None:
    tied = save_model(Qwen2Config(**sizes(tie_word_embeddings=True)), tmp_path / "tied")

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    network = load(changed(tied, tmp_path / "both", change))
    assert torch.equal(network.lm_head.weight, network.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "ModelOpt checkpoint: quant_algo 'W4A8_AWQ' is not supported"),
        ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "ModelOpt checkpoint: quant_algo is missing"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo 'INT8' is not supported"),
    ],
)
def test_quantization_of_modelopt_is_refused_by_name(
    quantization: dict[str, Any], words: str, llama: Path, tmp_path: Path
) -> None:
    content = {"producer": {"name": "modelopt"}, "quantization": quantization}
    folder = changed(llama, tmp_path / "model", lambda tensors: None, hf_quant_config=content)
    with pytest.raises(ModelError, match=words):
        load(folder)
    with pytest.raises(ModelError, match=words):
        describe_weights(resolve_model(str(folder)))


def test_modelopt_without_a_quantization_changes_nothing(llama: Path, tmp_path: Path) -> None:
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}
    folder = changed(llama, tmp_path / "model", lambda tensors: None, hf_quant_config=content)
    assert load(folder).config.model_type == "llama"
    assert describe_weights(resolve_model(str(folder))) == "safetensors, not quantized"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapter_beside_a_merged_model_is_not_applied_again(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed(llama, tmp_path / "model", lambda tensors: None)
    save_adapter(folder)

    network = load(folder)

    assert {name: tensor.tolist() for name, tensor in network.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in load_file(llama / "model.safetensors").items()
    }
    assert "adapter_config.json has no effect" in caplog.text
    assert read_model_shape(str(folder)).num_parameters == read_model_shape(str(llama)).num_parameters


def test_model_in_several_files_is_the_same(llama: Path, tmp_path: Path) -> None:
    whole = load(llama)
    whole.save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    assert len([*(tmp_path / "parts").glob("*.safetensors")]) > 1
    parts = load(tmp_path / "parts").state_dict()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.state_dict().items())


def test_adapter_beside_a_quantized_model_is_not_read(tmp_path: Path) -> None:
    folder = save_quantized(tmp_path / "model", "llama", gptq_config(4, 64), gptq(4, 64))
    save_file({"base_model.model.lora_A.weight": torch.ones(4, 4)}, folder / "adapter_model.safetensors")
    assert load(folder).config.model_type == "llama"
    assert read_model_shape(str(folder)).num_parameters == read_model_shape(f"{folder}-dense").num_parameters
