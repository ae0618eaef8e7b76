"""Hugging Face folders whose safetensors files hold quantized weights.

`quantization_config` of config.json names the format. It is read here and not by transformers, which would need another
package for each format and keep the weights in the form of its kernels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from inflight.common.model_source import ModelError, read_json
from inflight.executor.checkpoint.expert_matrices import ExpertMatrices, expert_modules
from inflight.executor.checkpoint.files import weight_files
from inflight.executor.checkpoint.quantized_weight import Matrix
from inflight.executor.formats.auto_round import read_auto_round
from inflight.executor.formats.awq import read_awq
from inflight.executor.formats.compressed_tensors import read_compressed_tensors
from inflight.executor.formats.experts import ExpertTensors, read_mxfp4
from inflight.executor.formats.fp8 import read_fp8
from inflight.executor.formats.gptq import read_gptq
from inflight.executor.formats.layer_tensors import LayerTensors
from inflight.executor.formats.modelopt import read_modelopt
from inflight.executor.formats.network import empty_network, fill, linear_layers, placed

# Buffers that older checkpoints contain and that follow from the configuration.
IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".attention.bias",
    ".attention.masked_bias",
    ".attn.bias",
    ".attn.masked_bias",
)
# Scales for an FP8 KV cache. It has scales of its own here, one for each token and head.
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")


class Format(Protocol):
    """How the layers of a checkpoint are encoded."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The tensors of which a quantized layer has one."""

    @property
    def description(self) -> str:
        """The encoding in words."""

    def read(self, layer: LayerTensors) -> Matrix:
        """Returns the matrix of a layer."""


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "mxfp4": read_mxfp4,
}
# Names of modules in files, and those of the decoder in transformers: of older architectures (Mixtral, MiniMax-M2,
# Nemotron-H), and of models for images, whose decoder is one module of them (Qwen3.5).
RENAMED_MODULES = ((".block_sparse_moe.", ".mlp."), (".language_model.", "."), ("backbone.", "model."))


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """Returns the configuration of the quantization of a folder, also where older programs wrote it."""
    config = read_json(folder / "config.json")
    fields = config.get("quantization_config") or config.get("compression_config")
    if not fields and (legacy := read_json(folder / "quantize_config.json")):
        fields = {"quant_method": "gptq"} | legacy
    if not fields and (model_opt := read_json(folder / "hf_quant_config.json").get("quantization")):
        algorithms = [model_opt.get(name) for name in ("quant_algo", "kv_cache_quant_algo")]
        fields = {"quant_method": "modelopt"} | model_opt if any(algorithms) else None
    if fields is None or isinstance(fields, dict):
        return fields or None
    raise ModelError(f"{folder / 'config.json'}: quantization_config is not an object")


def format_of(quantization: Mapping[str, Any]) -> Format:
    """Returns how a checkpoint with this quantization is encoded. Raises `ModelError` if it is not supported."""
    method = str(quantization.get("quant_method"))
    if method not in _READERS:
        raise ModelError(f"quantization method {method!r} is not supported; only {', '.join(sorted(_READERS))}")
    return _READERS[method](quantization)


def load_folder(
    folder: Path,
    config: PretrainedConfig,
    quantization: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Loads a quantized checkpoint; see `placed`. Raises `ModelError` for what is not supported, damaged or missing."""
    form = format_of(quantization)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    network = empty_network(config, dtype)
    file_of: dict[str, Path] = {}
    for path in (folder / name for name in weight_files(folder)):
        with safe_open(path, framework="pt") as file:
            file_of |= dict.fromkeys(file.keys(), path)
    fill(network, placed(_weights(network, form, file_of), device))
    return network


def _weights(
    network: PreTrainedModel, form: Format, file_of: Mapping[str, Path]
) -> Iterator[tuple[str, Matrix | ExpertMatrices]]:
    """Yields the parameters of the network by name."""
    leaves: defaultdict[str, list[str]] = defaultdict(list)
    stored_name: dict[str, str] = {}
    for stored in _used_names(network, file_of):
        name = _renamed(network, stored)
        stored_name[name] = stored
        layer, _, leaf = name.rpartition(".")
        leaves[layer].append(leaf)

    def tensor(layer: str, leaf: str) -> Tensor:
        # Opened for each tensor and copied, because what was read of an open file stays in the memory of the process.
        name = stored_name[f"{layer}.{leaf}"]
        with safe_open(file_of[name], framework="pt") as file:
            loaded: Tensor = file.get_tensor(name).clone()
        return loaded

    linears = linear_layers(network)
    num_quantized = 0
    for name, module in expert_modules(network).items():
        experts = ExpertTensors.of(name, module, leaves)
        if experts is not None:
            for parameter, matrices in experts.read(form, tensor):
                num_quantized += isinstance(matrices, ExpertMatrices)
                yield parameter, matrices
            for layer, taken in experts.taken().items():
                leaves[layer] = [leaf for leaf in leaves[layer] if leaf not in taken]
    for layer, names in leaves.items():
        if layer not in linears or not any(marker in names for marker in form.markers):
            for leaf in names:
                yield f"{layer}.{leaf}", tensor(layer, leaf)
            continue
        num_quantized += 1
        linear = linears[layer]
        tensors = {leaf: tensor(layer, leaf) for leaf in names if leaf != "bias"}
        if "bias" in names:
            yield f"{layer}.bias", tensor(layer, "bias")
        yield f"{layer}.weight", form.read(LayerTensors(layer, tensors, linear.out_features, linear.in_features))
    if not num_quantized:
        raise ModelError(f"no layer of the model is quantized: none has a tensor {' or '.join(form.markers)}")


def _used_names(network: PreTrainedModel, names: Iterable[str]) -> Iterator[str]:
    """Yields the names of tensors that the model has a place for, or should have."""
    # Such as those of layers that predict more than the next token (GLM-4.5).
    unused = [re.compile(pattern) for pattern in getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for name in names:
        if not name.endswith((*IGNORED_SUFFIXES, *KV_SCALES)) and not any(key.search(name) for key in unused):
            yield name


def _renamed(network: PreTrainedModel, name: str) -> str:
    """Returns the name of a tensor as transformers has its module now."""
    for before, now in RENAMED_MODULES:
        module, found, rest = name.partition(before)
        if found and not _has_module(network, module + before.removesuffix(".")):
            return module + now + rest
    return name


def _has_module(network: PreTrainedModel, name: str) -> bool:
    try:
        network.get_submodule(name)
    except AttributeError:
        return False
    return True
