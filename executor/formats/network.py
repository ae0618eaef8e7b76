"""A network of transformers whose weights come from a quantized checkpoint, one after the other.

It is made without weights. Matrices of linear layers and of experts that are quantized stay so (`QuantizedLinear`,
`ExpertMatrices`); everything else is dense in the network's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.expert_matrices import ExpertMatrices, parameters_of, replace_parameter
from inflight.executor.checkpoint.quantized_linear import QuantizedLinear
from inflight.executor.checkpoint.quantized_weight import Matrix, dense_matrix


def empty_network(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a network without memory for its parameters."""
    with init_empty_weights(include_buffers=False):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    return network


def fill(network: PreTrainedModel, weights: Iterable[tuple[str, Matrix | ExpertMatrices]]) -> None:
    """Sets the parameters of an empty network by their names. All must be there, except a tied output layer."""
    for name, weight in weights:
        _set(network, name, weight)
    head: Any = network.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.is_meta and network.config.tie_word_embeddings:
        embedding: Any = network.get_input_embeddings()
        head.weight = embedding.weight
    missing = sorted(name for name, parameter in network.named_parameters() if parameter.is_meta)
    if missing:
        raise ModelError(f"the checkpoint lacks {len(missing)} weights, such as {missing[0]}")


def placed(
    weights: Iterable[tuple[str, Matrix | ExpertMatrices]], device: torch.device
) -> Iterator[tuple[str, Matrix | ExpertMatrices]]:
    """Yields weights on a device. Quantized ones stay quantized."""
    for name, weight in weights:
        yield name, weight if device.type == "cpu" else weight.to(device)


def linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """Returns the layers that may be quantized, by name. Subclasses may compute something else."""
    return {name: module for name, module in network.named_modules() if type(module) is nn.Linear}


def _set(network: PreTrainedModel, name: str, weight: Matrix | ExpertMatrices) -> None:
    module_name, _, leaf = name.rpartition(".")
    try:
        module = network.get_submodule(module_name)
    except AttributeError:
        raise ModelError(f"the model has no layer for the weight {name}") from None
    parameter = getattr(module, leaf, None)
    if not isinstance(parameter, Tensor):
        raise ModelError(f"the model has no parameter {name}")
    if parameter.shape != weight.shape:
        raise ModelError(f"{name} has the shape {list(weight.shape)} instead of {list(parameter.shape)}")
    if isinstance(weight, ExpertMatrices):
        assert leaf in parameters_of(module)
        replace_parameter(network, module, leaf, weight)
        return
    if isinstance(weight, Tensor):
        if not weight.is_floating_point() or weight.itemsize == 1:
            raise ModelError(f"{name} is of {str(weight.dtype).removeprefix('torch.')}, and has no scales")
        setattr(module, leaf, nn.Parameter(weight.to(_dtype_of(network, name, parameter)), requires_grad=False))
        return
    if type(module) is nn.Linear:
        network.set_submodule(module_name, QuantizedLinear(weight, module.bias))
        return
    if module is not network.get_input_embeddings():
        raise ModelError(f"{name} is quantized, and not the weight of a linear layer")
    setattr(module, leaf, nn.Parameter(dense_matrix(weight, parameter.dtype), requires_grad=False))
    head: Any = network.get_output_embeddings()
    if type(head) is nn.Linear and network.config.tie_word_embeddings:
        # A step reads few rows of the embedding but the whole output layer, which is worth keeping small.
        network.set_submodule(_name_of(network, head), QuantizedLinear(weight, head.bias))


def _dtype_of(network: PreTrainedModel, name: str, parameter: Tensor) -> torch.dtype:
    """Returns the type of a dense parameter. transformers keeps some in float32, such as what corrects the choice of
    experts."""
    kept = network._keep_in_fp32_modules_strict or ()
    return torch.float32 if any(part in name for part in kept) else parameter.dtype


def _name_of(network: nn.Module, module: nn.Module) -> str:
    names: Iterator[str] = (name for name, candidate in network.named_modules() if candidate is module)
    return next(names)
