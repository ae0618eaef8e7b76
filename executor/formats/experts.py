"""Experts of quantized checkpoints: the tensors of every expert, or MXFP4 of all of them in one tensor (gpt-oss).

A checkpoint mostly has the linear layers `experts.N.gate_proj`, `up_proj` and `down_proj`, or `w1`, `w3` and `w2`, in
the format of the other layers; without gates there is no `gate_proj`. gpt-oss has for each of `gate_up_proj` and
`down_proj`, with the outputs of a gate and of what it gates alternating,

    *_blocks    uint8 [experts, out, in / 32, 16]   pairs of codes of e2m1, the even column in the low half
    *_scales    uint8 [experts, out, in / 32]       the exponent of 2 plus 127

All become one matrix with the rows of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.expert_matrices import (
    PARAMETERS,
    ExpertMatrices,
    alternates,
    is_transposed,
    parameters_of,
)
from inflight.executor.checkpoint.quantized_weight import Coded, FloatWeight, Matrix, QuantizedWeight, stacked
from inflight.executor.formats.layer_tensors import LayerTensors
from inflight.executor.formats.quantization_config import ANY, check_fields

WHAT = "MXFP4 checkpoint"
GROUP_SIZE, BYTES_OF_GROUP = 32, 16
# The exponent that stands for NaN.
NAN_EXPONENT = 255
# An expert's linear layers, by the parameter of the module that they are part of.
NAMES: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    {"up_proj": ("up_proj",), "down_proj": ("down_proj",)},
)
_FIELDS: Mapping[str, Any] = {
    "quant_method": ("mxfp4",),
    # Names of layers that are dense in the files.
    "modules_to_not_convert": ANY,
    "dequantize": (True, False),
}

# The leaves of a layer's tensors, and what reads a tensor of a layer.
Leaves = Mapping[str, Collection[str]]
ReadTensor = Callable[[str, str], Tensor]


class LinearFormat(Protocol):
    """How linear layers are encoded."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The tensors of which a quantized layer has one."""

    def read(self, layer: LayerTensors) -> Matrix:
        """Returns the matrix of a layer."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts in MXFP4, and nothing else that is quantized."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The tensors of which a quantized layer has one."""
        return tuple(f"{name}_blocks" for name in PARAMETERS)

    @property
    def description(self) -> str:
        """The encoding in words."""
        return f"MXFP4 of experts, groups of {GROUP_SIZE}"

    def read(self, layer: LayerTensors) -> Matrix:
        """Refuses a linear layer."""
        raise ModelError(f"{layer.layer} is quantized, and only experts are in an {WHAT}")


def read_mxfp4(config: Mapping[str, Any]) -> Mxfp4:
    """Returns how a checkpoint with this configuration is encoded."""
    check_fields(WHAT, config, _FIELDS)
    return Mxfp4()


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTensors:
    """The tensors of a module of experts in a checkpoint. `names` are those of an expert's layers by the module's
    parameters, or None if one tensor has all experts."""

    name: str
    module: nn.Module
    leaves: Leaves
    names: Mapping[str, tuple[str, ...]] | None

    @classmethod
    def of(cls, name: str, module: nn.Module, leaves: Leaves) -> ExpertTensors | None:
        """Returns the tensors of a module; None if they are the module's own parameters."""
        parameters = parameters_of(module)
        for names in (names for names in NAMES if tuple(names) == parameters):
            first = names[parameters[0]][0]
            if any(layer.startswith(f"{name}.") and layer.endswith(f".{first}") for layer in leaves):
                return cls(name, module, leaves, names)
        return cls(name, module, leaves, None) if f"{PARAMETERS[0]}_blocks" in leaves.get(name, ()) else None

    @property
    def num_experts(self) -> int:
        parameter: Tensor = getattr(self.module, parameters_of(self.module)[0])
        return parameter.shape[0]

    def taken(self) -> dict[str, Collection[str]]:
        """Returns the layers of the checkpoint, with their leaves, that `read` reads."""
        if self.names is None:
            return {self.name: [f"{parameter}_{part}" for parameter in PARAMETERS for part in ("blocks", "scales")]}
        return {
            layer: self.leaves.get(layer, ())
            for expert in range(self.num_experts)
            for layer in (f"{self.name}.{expert}.{name}" for name in chain.from_iterable(self.names.values()))
        }

    def read(self, form: LinearFormat, read: ReadTensor) -> Iterator[tuple[str, Tensor | ExpertMatrices]]:
        """Yields the parameters of the module."""
        for parameter in parameters_of(self.module):
            shape = getattr(self.module, parameter).shape[1:]
            num_out, num_in = reversed(shape) if is_transposed(self.module) else shape
            found: Tensor | ExpertMatrices
            if self.names is None:
                found = self._fused(parameter, num_out, num_in, read)
            else:
                found = self._joined(parameter, num_out, num_in, form, read)
            yield f"{self.name}.{parameter}", found

    def _joined(
        self, parameter: str, num_out: int, num_in: int, form: LinearFormat, read: ReadTensor
    ) -> Tensor | ExpertMatrices:
        """Returns the matrices of the linear layers that are a parameter of the module."""
        assert self.names is not None
        names = self.names[parameter]
        num_out //= len(names)
        layers = [f"{self.name}.{expert}.{name}" for expert in range(self.num_experts) for name in names]
        parts: list[Matrix] = []
        orders: list[Tensor | None] = []
        for layer in layers:
            part = self._matrix(layer, num_out, num_in, form, read)
            if isinstance(part, Tensor) != isinstance(parts[0] if parts else part, Tensor):
                raise ModelError(f"{layer} is {_how(part)}, and {layers[0]} is {_how(parts[0])}")
            parts.append(part)
            orders.append(part.column_order if isinstance(part, QuantizedWeight) else None)
        coded = [part for part in parts if not isinstance(part, Tensor)]
        if not coded:
            dense = torch.stack([part for part in parts if isinstance(part, Tensor)])
            return dense.view(self.num_experts, -1, num_in)
        order = _order_of_experts(layers, orders, len(names), num_in)
        return self._of_codes(_stacked(layers, coded), parameter, order)

    def _matrix(self, layer: str, num_out: int, num_in: int, form: LinearFormat, read: ReadTensor) -> Matrix:
        leaves = self.leaves.get(layer, ())
        if not leaves:
            raise ModelError(f"{layer} is missing, of the experts 0 to {self.num_experts - 1}")
        tensors = LayerTensors(layer, {leaf: read(layer, leaf) for leaf in leaves}, num_out, num_in)
        if any(marker in leaves for marker in form.markers):
            return form.read(tensors)
        tensors.check_names(("weight",))
        weight = tensors.tensors["weight"]
        if not weight.is_floating_point() or weight.itemsize == 1:
            raise ModelError(f"{layer}.weight is of {str(weight.dtype).removeprefix('torch.')}, and has no scales")
        return tensors.get("weight", (weight.dtype,), (num_out, num_in))

    def _fused(self, parameter: str, num_out: int, num_in: int, read: ReadTensor) -> ExpertMatrices:
        """Returns the matrices of tensors with all experts."""
        names = f"{parameter}_blocks", f"{parameter}_scales"
        for name in names:
            if name not in self.leaves.get(self.name, ()):
                raise ModelError(f"{self.name}.{name} is missing")
        if num_in % GROUP_SIZE:
            raise ModelError(f"{self.name}.{names[0]}: {num_in} columns are not a multiple of groups of {GROUP_SIZE}")
        tensors = LayerTensors(self.name, {name: read(self.name, name) for name in names}, num_out, num_in)
        count, num_groups = self.num_experts, num_in // GROUP_SIZE
        blocks = tensors.get(names[0], (torch.uint8,), (count, num_out, num_groups, BYTES_OF_GROUP))
        scales = tensors.get(names[1], (torch.uint8,), (count, num_out, num_groups))
        if bool((scales == NAN_EXPONENT).any()):
            raise ModelError(f"{self.name}.{names[1]} has scales that are not finite")
        has_gates = parameter == PARAMETERS[0] and alternates(self.module)
        rows = [_gates_first(part.flatten(2), has_gates).contiguous() for part in (blocks, scales)]
        weight = FloatWeight(rows[0], rows[1].view(torch.float8_e8m0fnu), 4, GROUP_SIZE)
        return self._of_codes(weight, parameter)

    def _of_codes(self, matrix: Coded, parameter: str, orders: Tensor | None = None) -> ExpertMatrices:
        module, dtype = self.module, getattr(self.module, parameter).dtype
        has_gates = parameter == PARAMETERS[0] and alternates(module)
        return ExpertMatrices(matrix, self.num_experts, dtype, is_transposed(module), has_gates, orders)


def _gates_first(rows: Tensor, has_gates: bool) -> Tensor:
    """Returns rows `[experts, out, …]` of all experts as one matrix; gates that alternate with what they gate come
    before it."""
    if has_gates:
        rows = rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return rows.flatten(0, 1)


def _stacked(layers: list[str], parts: list[Coded]) -> Coded:
    """Returns the matrices of layers as one. Raises `ModelError` with the layer and the field in which it differs."""
    try:
        return stacked(parts)
    except ValueError:
        for layer, part in zip(layers, parts, strict=True):
            try:
                stacked([parts[0], part])
            except ValueError as error:
                raise ModelError(f"{layer} is encoded in another way than {layers[0]}: {error}") from error
        raise


def _order_of_experts(layers: list[str], orders: list[Tensor | None], num_layers: int, num_in: int) -> Tensor | None:
    """Returns the order of the columns of each expert, `[experts, in]`; None if all are in order. An expert's gate and
    up projection read the same inputs, so theirs must be the same."""
    if all(order is None for order in orders):
        return None
    in_order = torch.arange(num_in, dtype=torch.int32)
    found = [in_order if order is None else order for order in orders]
    for index in range(0, len(found), num_layers):
        for layer, order in zip(layers[index : index + num_layers], found[index : index + num_layers], strict=True):
            if not torch.equal(order, found[index]):
                raise ModelError(f"{layer}.g_idx is not that of {layers[index]}, which reads the same inputs")
    return torch.stack(found[::num_layers])


def _how(part: Matrix) -> str:
    return "dense" if isinstance(part, Tensor) else "quantized"
