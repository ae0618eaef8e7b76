"""Checkpoints of compressed-tensors (llm-compressor) whose weights alone are quantized.

A linear layer has, besides `weight_scale`:

    pack-quantized                      weight_packed int32 [out, in * bits / 32], and mostly weight_shape
    int-quantized, naive-quantized      weight int8 [out, in]
    float-quantized, naive-quantized    weight float8_e4m3fn [out, in]

`weight_scale` is `[out, groups]`, `[out, 1]` for channels or `[1]` for the whole tensor. The weight is `scale * (code -
zero)`. Packed codes are those of int8 plus half their range, the lowest bits first, and so are zeros: if the scheme is
not symmetric, `weight_zero_point` is packed along the outputs, or of int8 where the weight is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.quantized_weight import Matrix, QuantizedWeight
from inflight.executor.formats.layer_tensors import INDEX_DTYPES, SCALE_DTYPES, LayerTensors, as_bytes, unpacked
from inflight.executor.formats.quantization_config import ANY, check_fields, required, whole_number

log = logging.getLogger(__name__)

WHAT = "compressed-tensors checkpoint"
PACKED, INT, FLOAT, NAIVE, MIXED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
)
FORMATS = (PACKED, INT, FLOAT, NAIVE)
_CONFIG_FIELDS: Mapping[str, Any] = {
    "quant_method": ("compressed-tensors",),
    "format": (*FORMATS, MIXED),
    "quantization_status": ("compressed", "frozen"),
    "config_groups": ANY,
    "ignore": ANY,
    "global_compression_ratio": ANY,
    "version": ANY,
    "sparsity_config": ({"format": "dense"},),
}
_GROUP_FIELDS: Mapping[str, Any] = {"targets": ANY, "weights": ANY, "format": FORMATS}
_WEIGHT_FIELDS: Mapping[str, Any] = {
    "num_bits": (4, 8),
    "type": ("int", "float"),
    "symmetric": (True, False),
    "strategy": ("tensor", "channel", "group"),
    "group_size": ANY,
    "dynamic": (False,),
    "actorder": ("group", "weight", "static", "dynamic", False),
    "observer": ANY,
    "observer_kwargs": ANY,
    "scale_dtype": ANY,
    "zp_dtype": ANY,
}


class Strategy(StrEnum):
    """What shares a scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the layers that `targets` name are encoded."""

    targets: tuple[str, ...]
    form: str
    bits: int
    is_float: bool
    is_symmetric: bool
    strategy: Strategy
    group_size: int


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The schemes of a checkpoint. The first that matches a layer applies."""

    schemes: tuple[Scheme, ...]

    @property
    def marker(self) -> str:
        """The tensor that a quantized layer has."""
        return "weight_scale"

    @property
    def description(self) -> str:
        """The encoding in words."""
        return "compressed-tensors, " + ", ".join(f"{scheme.form} of {scheme.bits} bits" for scheme in self.schemes)

    def read(self, layer: LayerTensors) -> Matrix:
        """Returns the matrix of a layer: dense in float32 for FP8, whose numbers are not evenly spaced."""
        scheme = next((scheme for scheme in self.schemes if _targets(scheme, layer.layer)), None)
        if scheme is None:
            raise ModelError(f"{WHAT}: {layer.layer} has a scale, but no group of the configuration names it")
        if scheme.is_float:
            return _read_float(scheme, layer)
        return _read_packed(scheme, layer) if scheme.form == PACKED else _read_int(scheme, layer)


def read_compressed_tensors(config: Mapping[str, Any]) -> CompressedTensors:
    """Returns how a checkpoint with this configuration is encoded."""
    check_fields(WHAT, config, _CONFIG_FIELDS)
    groups = required(WHAT, config, "config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelError(f"{WHAT}: config_groups is not an object with groups")
    schemes = tuple(_scheme(f"{WHAT}: {name}", group, config.get("format")) for name, group in groups.items())
    if any(scheme.is_float for scheme in schemes):
        log.warning("FP8 weights are kept as dense matrices: they take the memory of an unquantized model")
    return CompressedTensors(schemes)


def _scheme(what: str, group: Any, form: str | None) -> Scheme:
    if not isinstance(group, dict):
        raise ModelError(f"{what} is not an object")
    check_fields(what, group, _GROUP_FIELDS)
    weights = required(what, group, "weights")
    what += ".weights"
    check_fields(what, weights, _WEIGHT_FIELDS)
    bits, kind = whole_number(what, weights, "num_bits"), weights.get("type", "int")
    form = group.get("format") or form
    group_size = weights.get("group_size") or -1
    strategy = weights.get("strategy") or (Strategy.GROUP if group_size > 0 else Strategy.TENSOR)
    if strategy == Strategy.GROUP and (not isinstance(group_size, int) or group_size < 1):
        raise ModelError(f"{what}: group_size {group_size} is not positive")
    kinds = {PACKED: ("int",), INT: ("int",), FLOAT: ("float",), NAIVE: ("int", "float")}.get(str(form), ())
    if kind not in kinds or (form != PACKED and bits != 8):
        raise ModelError(f"{what}: {bits} bits of type {kind} in the format {form} are not supported")
    return Scheme(
        tuple(map(str, group.get("targets") or ())),
        str(form),
        bits,
        kind == "float",
        bool(weights.get("symmetric", True)),
        Strategy(strategy),
        group_size,
    )


def _targets(scheme: Scheme, layer: str) -> bool:
    """Returns whether a scheme is that of a layer. Targets are classes, of which all layers here are `Linear`, names,
    or regular expressions after `re:`."""
    return any(
        re.match(target.removeprefix("re:"), layer) is not None
        if target.startswith("re:")
        else target in ("Linear", layer)
        for target in scheme.targets
    )


def _read_packed(scheme: Scheme, layer: LayerTensors) -> QuantizedWeight:
    layer.check_names(("weight_packed", "weight_scale"), ("weight_shape", "weight_zero_point", "weight_g_idx"))
    num_out, num_in, bits = layer.out_features, layer.in_features, scheme.bits
    num_bytes = num_in * bits // 8
    if "weight_shape" in layer.tensors:
        shape = layer.get("weight_shape", INDEX_DTYPES, (2,)).tolist()
        if shape != [num_out, num_in]:
            raise ModelError(f"{layer.layer}.weight_shape is {shape} instead of {[num_out, num_in]}")
    words = layer.get("weight_packed", (torch.int32,), (num_out, -(-num_bytes // 4)))
    scale = _scale(scheme, layer)
    zeros = torch.tensor(1 << (bits - 1)).expand_as(scale)
    if not scheme.is_symmetric:
        layer.check_names(("weight_zero_point", *layer.tensors))
        num_words = -(-num_out * bits // 32)
        packed = layer.get("weight_zero_point", (torch.int32,), (num_words, scale.shape[1]))
        zeros = unpacked(packed.t(), bits)[:, :num_out].t()
    groups = layer.get("weight_g_idx", INDEX_DTYPES, (num_in,)) if "weight_g_idx" in layer.tensors else None
    return layer.weight(as_bytes(words)[:, :num_bytes], scale, zeros, bits, groups)


def _read_int(scheme: Scheme, layer: LayerTensors) -> QuantizedWeight:
    layer.check_names(("weight", "weight_scale"), ("weight_zero_point",))
    numbers = layer.get("weight", (torch.int8,), (layer.out_features, layer.in_features))
    scale = _scale(scheme, layer)
    zeros = torch.full_like(scale, 128.0, dtype=torch.float32)
    if not scheme.is_symmetric:
        layer.check_names(("weight_zero_point", *layer.tensors))
        zeros = zeros + layer.get("weight_zero_point", (torch.int8,), *_scale_shapes(scheme, layer)).expand_as(scale)
    return layer.weight(numbers.contiguous().view(torch.uint8) ^ 0x80, scale, zeros, 8)


def _read_float(scheme: Scheme, layer: LayerTensors) -> Tensor:
    layer.check_names(("weight", "weight_scale"))
    numbers = layer.get("weight", (torch.float8_e4m3fn,), (layer.out_features, layer.in_features))
    scale = _scale(scheme, layer).float()
    groups: Tensor = numbers.float().unflatten(1, (scale.shape[1], -1))
    return groups.mul_(scale[..., None]).flatten(1)


def _scale(scheme: Scheme, layer: LayerTensors) -> Tensor:
    """Returns the scales `[out, groups]`."""
    scale = layer.get("weight_scale", SCALE_DTYPES, *_scale_shapes(scheme, layer))
    return scale.expand(layer.out_features, -1) if scale.ndim == 2 else scale.expand(layer.out_features, 1)


def _scale_shapes(scheme: Scheme, layer: LayerTensors) -> tuple[tuple[int, ...], ...]:
    if scheme.strategy == Strategy.TENSOR:
        return (1,), (), (1, 1)
    num_groups = layer.num_groups(scheme.group_size) if scheme.strategy == Strategy.GROUP else 1
    return ((layer.out_features, num_groups),)
