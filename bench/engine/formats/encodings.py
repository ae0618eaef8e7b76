"""Encodings of a dense Llama model in formats of quantized checkpoints, rounded to nearest without data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.bench.engine.formats.superblocks import quantize
from inflight.executor.formats.awq import PLACES
from inflight.executor.formats.gguf_file import LAYER_NAMES, NAMES

WEIGHTS = "model.safetensors"
# What padding changes, by its key in GGUF.
CHANGED_FIELDS = {
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
Tensors = dict[str, Tensor]
# Returns the tensors of a layer, by the last part of their names, for its matrix.
Encoder = Callable[[Tensor], Tensors]


def copy_off_grid(dense: Path, folder: Path) -> None:
    """Writes a Llama model in float32 that computes the same with other numbers.

    A dense copy of a quantized checkpoint has numbers that the same groups of another format hold exactly. Norms become
    part of the matrices that follow them, and each output of `up_proj` and `v_proj` gets a factor that the input of the
    next matrix takes back, so that the largest numbers of both are equal.
    """
    shutil.copytree(dense, folder)
    config, weights = json.loads((dense / "config.json").read_text()), load_file(dense / WEIGHTS)
    repeats = config["num_attention_heads"] // config["num_key_value_heads"]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        after_norms = {
            f"{layer}input_layernorm.weight": [f"{attention}{name}_proj.weight" for name in "qkv"],
            f"{layer}post_attention_layernorm.weight": [f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"],
        }
        for norm, names in after_norms.items():
            for name in names:
                weights[name] = weights[name] * weights[norm]
            weights[norm] = torch.ones_like(weights[norm])
        _balance(weights, f"{mlp}up_proj.weight", f"{mlp}down_proj.weight", 1, 1)
        _balance(
            weights, f"{attention}v_proj.weight", f"{attention}o_proj.weight", config["num_key_value_heads"], repeats
        )
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def _balance(weights: Tensors, first: str, second: str, num_heads: int, repeats: int) -> None:
    """Moves factors from the rows of the first matrix to the columns of the second, in which each of the heads of rows
    occurs `repeats` times."""
    columns = weights[second].unflatten(1, (num_heads, repeats, -1))
    largest = columns.abs().amax((0, 2)).flatten()
    factors = (largest / weights[first].abs().amax(1)).sqrt()
    weights[first] = weights[first] * factors[:, None]
    weights[second] = (columns / factors.view(num_heads, 1, -1)).flatten(1)


def save_folder(dense: Path, folder: Path, config: Mapping[str, Any], encode: Encoder) -> None:
    """Writes a folder whose layers' matrices are encoded. The embedding stays dense."""
    shutil.copytree(dense, folder)
    stored: Tensors = {}
    for name, weight in load_file(dense / WEIGHTS).items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and layer.endswith("_proj"):
            stored |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in encode(weight).items()}
        else:
            stored[name] = weight
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    fields = json.loads((dense / "config.json").read_text()) | {"quantization_config": dict(config)}
    (folder / "config.json").write_text(json.dumps(fields))


def gptq(bits: int, group_size: int) -> tuple[Mapping[str, Any], Encoder]:
    """Returns the configuration and the encoder of GPTQ's layout: a scale and a whole zero for each group."""

    def encode(weight: Tensor) -> Tensors:
        codes, zeros, scale = _rounded(weight, bits, group_size)
        return {"qweight": _words(codes, bits).t(), "qzeros": _words(zeros.t(), bits), "scales": scale.t()}

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "checkpoint_format": "gptq_v2"}
    return config | {"desc_act": False, "sym": False}, encode


def awq(group_size: int) -> tuple[Mapping[str, Any], Encoder]:
    """Returns the configuration and the encoder of AWQ's layout, without its search for scales by data."""
    order = sorted(range(8), key=PLACES.__getitem__)

    def words(numbers: Tensor) -> Tensor:
        return _words(numbers.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    def encode(weight: Tensor) -> Tensors:
        codes, zeros, scale = _rounded(weight, 4, group_size)
        return {"qweight": words(codes), "qzeros": words(zeros), "scales": scale.t()}

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return config, encode


def _rounded(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes `[out, in]`, and whole zeros and scales `[out, groups]`."""
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    highest = (1 << bits) - 1
    scale = _or_one((high - low) / highest).half()
    zeros = (-low / scale.float()).round().clamp(0, highest)
    codes = (groups / scale.float()[..., None]).round().add(zeros[..., None]).clamp(0, highest)
    return codes.flatten(1), zeros, scale


def compressed_int4(group_size: int) -> tuple[Mapping[str, Any], Encoder]:
    """Returns the configuration and the encoder of 4 bits of compressed-tensors, symmetric."""

    def encode(weight: Tensor) -> Tensors:
        groups = weight.unflatten(1, (-1, group_size))
        scale = _or_one(groups.abs().amax(-1) / 7.5).bfloat16()
        codes = (groups / scale.float()[..., None]).round().clamp(-8, 7) + 8
        return {
            "weight_packed": _words(codes.flatten(1), 4),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    return _compressed_config("pack-quantized", weights), encode


def compressed_int8() -> tuple[Mapping[str, Any], Encoder]:
    """Returns the configuration and the encoder of 8 bits of compressed-tensors, symmetric, with a scale per output."""

    def encode(weight: Tensor) -> Tensors:
        scale = _or_one(weight.abs().amax(1, keepdim=True) / 127.5).bfloat16()
        codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scale}

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return _compressed_config("int-quantized", weights), encode


def _compressed_config(form: str, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def _or_one(scale: Tensor) -> Tensor:
    """Replaces the scale of groups that have only zeros, by which they cannot be divided."""
    return torch.where(scale > 0, scale, 1)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Packs codes `[rows, n]` in int32 words, the lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    words = (codes.long().unflatten(1, (-1, 32 // bits)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def save_gguf(
    dense: Path,
    original: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType,
    embedding_kind: gguf.GGMLQuantizationType,
) -> None:
    """Writes a GGUF file with the metadata of another one of the same model. Layers have the type `kind`, and the
    embedding, which is the output layer, `embedding_kind`."""
    config = json.loads((dense / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = _writer_like(original, path, config)
    for name, weight in load_file(dense / WEIGHTS).items():
        layer, _, _ = name.rpartition(".")
        if num_heads := heads.get(layer.rpartition(".")[2]):
            # llama.cpp has the halves of a head alternate.
            weight = weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
        numbers = weight.float().numpy()
        if weight.ndim == 1:
            writer.add_tensor(_gguf_name(name), numbers)
            continue
        of_tensor = embedding_kind if "embed" in name else kind
        writer.add_tensor(_gguf_name(name), quantize(numbers, of_tensor), raw_dtype=of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _writer_like(original: Path, path: Path, config: Mapping[str, Any]) -> gguf.GGUFWriter:
    """Returns a writer that has the metadata of a file, but the sizes of a configuration."""
    fields = gguf.GGUFReader(original).fields
    architecture = str(fields["general.architecture"].contents())
    changed = {f"{architecture}.{key}": config[name] for key, name in CHANGED_FIELDS.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            of_elements = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, changed.get(key, field.contents()), field.types[0], of_elements)
    return writer


def _gguf_name(name: str) -> str:
    stems = {theirs: ours for ours, theirs in (LAYER_NAMES | NAMES).items()}
    layer, _, leaf = name.rpartition(".")
    if layer.startswith("model.layers."):
        _, _, number, stem = layer.split(".", 3)
        return f"blk.{number}.{stems[stem]}.{leaf}"
    return f"{stems[layer]}.{leaf}"
