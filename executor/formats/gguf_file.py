"""GGUF files, whose quantized matrices are read without a copy in the disk cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from inflight.common.model_files.gguf_header import GgufHeader, GgufTensor
from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.expert_matrices import PARAMETERS, ExpertMatrices, alternates, is_transposed
from inflight.executor.checkpoint.gguf_metadata import ROPE_TENSORS
from inflight.executor.checkpoint.gguf_tensors import Read, rules_of
from inflight.executor.checkpoint.quantized_weight import Matrix
from inflight.executor.formats.gguf_blocks import BLOCK_TYPES, quantized_weight
from inflight.executor.formats.network import empty_network, fill, placed

# Types that are not quantized, by their number in the file.
DENSE_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")


def unsupported_reason(header: GgufHeader) -> str | None:
    """Returns why a file cannot be read here; None if it can."""
    rules = rules_of(header)
    if rules is None:
        return f"its architecture is {header.architecture}"
    known = [{name for rule in of_part for name in rule.tensors} for of_part in rules]
    for tensor in _used_tensors(header):
        match = LAYER_TENSOR.fullmatch(tensor.name)
        if (tensor.name if match is None else match[2]) not in known[match is not None]:
            return f"it has the tensor {tensor.name}"
        kind = BLOCK_TYPES.get(tensor.type_number)
        if kind is None and tensor.type_number not in DENSE_TYPES:
            return f"{tensor.name} is of type {tensor.type_name}"
        if kind is not None and len(tensor.shape) not in (2, 3):
            return f"{tensor.name} is quantized and not a matrix"
    return None


def load_gguf(
    header: GgufHeader, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Loads a file for which there is no `unsupported_reason`; see `placed`. `config` has the factors of rotary
    frequencies that are tensors of the file."""
    network = empty_network(config, dtype)
    fill(network, placed(_weights(header, network), device))
    return network


def _used_tensors(header: GgufHeader) -> list[GgufTensor]:
    """Returns the tensors that are weights of layers that are computed: not of those that predict further tokens."""
    counts = [header.metadata.get(f"{header.architecture}.{key}", 0) for key in ("block_count", "nextn_predict_layers")]
    num_layers = int(str(counts[0])) - int(str(counts[1]))
    drafts = () if not counts[1] else tuple(f"blk.{num_layers + i}." for i in range(int(str(counts[1]))))
    return [
        tensor
        for tensor in header.tensors
        if tensor.name not in ROPE_TENSORS and not (drafts and tensor.name.startswith(drafts))
    ]


def _weights(header: GgufHeader, network: PreTrainedModel) -> Iterator[tuple[str, Matrix | ExpertMatrices]]:
    rules = rules_of(header)
    assert rules is not None
    of_network: dict[str, GgufTensor] = {}
    of_layers: dict[int, dict[str, GgufTensor]] = {}
    for tensor in _used_tensors(header):
        match = LAYER_TENSOR.fullmatch(tensor.name)
        tensors = of_network if match is None else of_layers.setdefault(int(match[1]), {})
        tensors[tensor.name if match is None else match[2]] = tensor
    groups: list[tuple[str, dict[str, GgufTensor]]] = [
        (f"model.layers.{number}.", tensors) for number, tensors in sorted(of_layers.items())
    ]
    for prefix, tensors, of_part in [("", of_network, rules[0]), *((*group, rules[1]) for group in groups)]:
        for rule in of_part:
            if all(name in tensors for name in rule.tensors):
                read = rule.make([_read(tensors[name]) for name in rule.tensors], network.config)
                yield prefix + rule.parameter, _for_module(read, network, prefix + rule.parameter)


def _for_module(read: Read, network: PreTrainedModel, name: str) -> Matrix | ExpertMatrices:
    """Returns a parameter as its module has it. Dense matrices of experts are a tensor unless its order is another."""
    if not isinstance(read, ExpertMatrices):
        return read
    module_name, _, leaf = name.rpartition(".")
    try:
        module = network.get_submodule(module_name)
    except AttributeError:
        raise ModelError(f"the model has no layer for the weight {name}") from None
    has_gates = leaf == PARAMETERS[0] and alternates(module)
    if isinstance(read.matrix, Tensor):
        read = replace(read, matrix=read.matrix.to(network.dtype))
        if not (has_gates or is_transposed(module)):
            return read.matrix
    return replace(read, dtype=network.dtype, is_transposed=is_transposed(module), alternates=has_gates)


def _read(tensor: GgufTensor) -> Read:
    """Returns a vector or matrix, or the matrices of experts if the tensor has three dimensions."""
    # Not mapped, because what was read of a mapped file stays in the memory of the process.
    content = torch.from_numpy(np.fromfile(tensor.file, np.uint8, tensor.num_bytes, offset=tensor.start))
    kind = BLOCK_TYPES.get(tensor.type_number)
    matrix: Matrix
    if kind is None:
        matrix = content.clone().view(DENSE_TYPES[tensor.type_number]).view(tensor.shape)
    else:
        if tensor.shape[-1] % kind.num_numbers:
            message = f"has rows of {tensor.shape[-1]} numbers, not a multiple of {kind.num_numbers}"
            raise ModelError(f"{tensor.name} {message}")
        try:
            matrix = quantized_weight(kind, content.view(-1, tensor.shape[-1] // kind.num_numbers * kind.num_bytes))
        except ValueError as error:
            raise ModelError(f"{tensor.name} has {error}") from None
    if len(tensor.shape) < 3 or tensor.name.endswith("conv1d.weight"):
        return matrix
    return ExpertMatrices(matrix, tensor.shape[0], torch.float32)
