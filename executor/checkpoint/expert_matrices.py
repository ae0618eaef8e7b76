"""The matrices of all experts of a layer, as a checkpoint has them or in the order of rows that products need.

They take the place of a parameter of transformers' module of experts, which reads one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inflight.executor.checkpoint.quantized_weight import Coded, Matrix, dense_matrix

# The parameters of a module of experts that are matrices; and those of one without gates (Nemotron-H).
PARAMETERS = ("gate_up_proj", "down_proj")
WITHOUT_GATES = ("up_proj", "down_proj")


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """One matrix of every expert. `matrix` is a tensor `[experts, out, in]`, or of codes `[experts * out, in]`, the
    experts one below the other. Gates are the first half of the outputs, what they gate the second.

    With `orders` (int32 `[experts, in]`) column j of expert e multiplies input `orders[e, j]` (GPTQ's act-order). The
    module reads matrices in `dtype`, with `is_transposed` as `[in, out]`, with `alternates` each gate followed by what
    it gates.
    """

    matrix: Matrix
    num_experts: int
    dtype: torch.dtype
    is_transposed: bool = False
    alternates: bool = False
    orders: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter: `[experts, out, in]`, or with `is_transposed` `[experts, in, out]`."""
        num_out, num_in = self.matrix.shape[-2:]
        num_out //= 1 if isinstance(self.matrix, Tensor) else self.num_experts
        return torch.Size((self.num_experts, *((num_in, num_out) if self.is_transposed else (num_out, num_in))))

    def __getitem__(self, expert: Tensor | int) -> Tensor:
        """Returns the dense matrix of an expert as the module reads it."""
        dense = self._dense(int(expert))
        if self.alternates:
            dense = dense.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        return dense.t() if self.is_transposed else dense

    def expanded(self) -> Tensor:
        """Returns the parameter, dense. The memory of codes is freed."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for expert in range(self.num_experts):
            dense[expert] = self[expert]
        if not isinstance(self.matrix, Tensor):
            self.matrix.free()
        return dense

    @property
    def device(self) -> torch.device:
        """Where the matrices are."""
        return self.matrix.device if isinstance(self.matrix, Tensor) else self.matrix.codes.device

    def to(self, device: torch.device) -> ExpertMatrices:
        """Returns the matrices on a device."""
        orders = None if self.orders is None else self.orders.to(device)
        return replace(self, matrix=self.matrix.to(device), orders=orders)

    def _dense(self, expert: int) -> Tensor:
        if isinstance(self.matrix, Tensor):
            return self.matrix[expert]
        num_out = self.matrix.shape[0] // self.num_experts
        dense = dense_matrix(self.matrix.rows(expert * num_out, (expert + 1) * num_out), self.dtype)
        if self.orders is None:
            return dense
        ordered = torch.empty_like(dense)
        ordered[:, self.orders[expert].long()] = dense
        return ordered


def alternates(experts: Any) -> bool:
    """Returns whether the outputs of a module of experts are gates, each followed by what it gates."""
    return not getattr(experts, "is_concatenated", True)


def is_transposed(experts: Any) -> bool:
    """Returns whether a module of experts has matrices `[in, out]`."""
    return bool(getattr(experts, "is_transposed", False))


def order_experts(network: PreTrainedModel) -> None:
    """Replaces the dense matrices of experts that transformers has in another order than products need."""
    for module in expert_modules(network).values():
        if not (alternates(module) or is_transposed(module)):
            continue
        for name in parameters_of(module):
            parameter = getattr(module, name)
            if isinstance(parameter, Tensor):
                replace_parameter(network, module, name, _ordered(module, name, parameter.detach()))


def _ordered(module: nn.Module, name: str, parameter: Tensor) -> ExpertMatrices:
    rows = parameter.transpose(1, 2) if is_transposed(module) else parameter
    has_gates = alternates(module) and name == PARAMETERS[0]
    if has_gates:
        rows = rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return ExpertMatrices(rows.contiguous(), len(rows), rows.dtype, is_transposed(module), has_gates)


def expand_experts(network: PreTrainedModel) -> int:
    """Replaces the matrices of experts by the parameters of transformers, which are dense, one after the other. Returns
    how many were of codes."""
    count = 0
    for module in expert_modules(network).values():
        for name in parameters_of(module):
            matrices = getattr(module, name)
            if isinstance(matrices, ExpertMatrices):
                count += not isinstance(matrices.matrix, Tensor)
                replace_parameter(network, module, name, matrices.expanded())
    return count


def has_coded_experts(network: nn.Module) -> bool:
    """Returns whether a layer has experts with matrices of codes."""
    return any(True for _ in coded_experts(network))


def coded_experts(network: nn.Module) -> Iterator[Coded]:
    """Yields the matrices of experts that are of codes."""
    for module in expert_modules(network).values():
        for name in parameters_of(module):
            matrices = getattr(module, name)
            if isinstance(matrices, ExpertMatrices) and not isinstance(matrices.matrix, Tensor):
                yield matrices.matrix


def expert_modules(network: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of experts with a matrix of every expert in each parameter, by name."""
    return {
        name: module for name, module in network.named_modules() if name.endswith(".experts") and parameters_of(module)
    }


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the matrices of a module of experts, none of another module."""
    kinds = (PARAMETERS, WITHOUT_GATES)
    return next((names for names in kinds if all(hasattr(module, name) for name in names)), ())


def replace_parameter(
    network: PreTrainedModel, module: nn.Module, name: str, matrices: Tensor | ExpertMatrices
) -> None:
    """Gives a module other matrices. Its eager forward pass reads one at a time, so it is the one that is used."""
    delattr(module, name)
    if isinstance(matrices, Tensor):
        setattr(module, name, nn.Parameter(matrices, requires_grad=False))
        return
    setattr(module, name, matrices)
    network.set_experts_implementation("eager")
