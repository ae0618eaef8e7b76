"""Checkpoints of compressed-tensors (llm-compressor).

A linear layer has, besides `weight_scale`:

    pack-quantized                      weight_packed int32 [out, in * bits / 32], and mostly weight_shape
    int-quantized, naive-quantized      weight int8 [out, in]
    float-quantized, naive-quantized    weight float8_e4m3fn [out, in]
    nvfp4-pack-quantized                weight_packed uint8 [out, in / 2], and weight_global_scale, one number
    mxfp4-pack-quantized                weight_packed uint8 [out, in / 2]

`weight_scale` is `[out, groups]`, `[out, 1]` for channels, `[1]` for the whole tensor, and for FP8 also
`[ceil(out / rows), ceil(in / columns)]` for blocks. It is float8_e4m3fn in NVFP4, which divides it by the global scale,
and in MXFP4 uint8 with the exponent of 2 plus 127. The weight is `scale * number`, or `scale * (code - zero)`. Packed
codes are those of int8 plus half their range, the lowest bits first, and so are zeros: if the scheme is not symmetric,
`weight_zero_point` is packed along the outputs, or of int8 where the weight is.

Activations may be quantized too, in the type of the weights. Their scales have no effect, because they are not rounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.quantized_weight import Coded, FloatWeight, QuantizedWeight
from inflight.executor.formats.layer_tensors import (
    ACTIVATION_SCALES,
    INDEX_DTYPES,
    SCALE_DTYPES,
    SHAPES_OF_ONE,
    LayerTensors,
    as_bytes,
    unpacked,
)
from inflight.executor.formats.quantization_config import (
    ANY,
    MIN_BLOCK_COLUMNS,
    block_of,
    check_fields,
    required,
    whole_number,
)

WHAT = "compressed-tensors checkpoint"
PACKED, INT, FLOAT, NAIVE, NVFP4, MXFP4, MIXED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
# The types and bits of weights in each format.
KINDS: Mapping[str, tuple[tuple[str, int], ...]] = {
    PACKED: (("int", 4), ("int", 8)),
    INT: (("int", 8),),
    FLOAT: (("float", 8),),
    NAIVE: (("int", 8), ("float", 8)),
    NVFP4: (("float", 4),),
    MXFP4: (("float", 4),),
}
FORMATS = tuple(KINDS)
# Of MXFP4.
NAN_EXPONENT = 255
# Strategies of FP4, and the sizes of its groups.
FP4 = {NVFP4: ("tensor_group", 16), MXFP4: ("group", 32)}
_CONFIG_FIELDS: Mapping[str, Any] = {
    "quant_method": ("compressed-tensors",),
    "format": (*FORMATS, MIXED),
    "quantization_status": ("compressed", "frozen"),
    "config_groups": ANY,
    "ignore": ANY,
    "global_compression_ratio": ANY,
    "version": ANY,
    "sparsity_config": ({"format": "dense"},),
    # The KV cache has a type of its own here, `kv_cache_dtype`.
    "kv_cache_scheme": ANY,
}
_GROUP_FIELDS: Mapping[str, Any] = {"targets": ANY, "weights": ANY, "input_activations": ANY, "format": FORMATS}
_WEIGHT_FIELDS: Mapping[str, Any] = {
    "num_bits": (4, 8),
    "type": ("int", "float"),
    "symmetric": (True, False),
    "strategy": ("tensor", "channel", "group", "block", "tensor_group"),
    "block_structure": ANY,
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
    BLOCK = "block"
    TENSOR_GROUP = "tensor_group"


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
    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The schemes of a checkpoint. The first that matches a layer applies."""

    schemes: tuple[Scheme, ...]

    @property
    def markers(self) -> tuple[str, ...]:
        """The tensors of which a quantized layer has one."""
        return ("weight_scale",)

    @property
    def description(self) -> str:
        """The encoding in words."""
        return "compressed-tensors, " + ", ".join(f"{scheme.form} of {scheme.bits} bits" for scheme in self.schemes)

    def read(self, layer: LayerTensors) -> Coded:
        """Returns the matrix of a layer."""
        scheme = next((scheme for scheme in self.schemes if _targets(scheme, layer.layer)), None)
        if scheme is None:
            raise ModelError(f"{WHAT}: {layer.layer} has a scale, but no group of the configuration names it")
        layer.check_activation_scales()
        if scheme.form in FP4:
            return _read_fp4(scheme, layer)
        if scheme.is_float:
            return _read_fp8(scheme, layer)
        return _read_packed(scheme, layer) if scheme.form == PACKED else _read_int(scheme, layer)


def read_compressed_tensors(config: Mapping[str, Any]) -> CompressedTensors:
    """Returns how a checkpoint with this configuration is encoded."""
    check_fields(WHAT, config, _CONFIG_FIELDS)
    groups = required(WHAT, config, "config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelError(f"{WHAT}: config_groups is not an object with groups")
    return CompressedTensors(
        tuple(_scheme(f"{WHAT}: {name}", group, config.get("format")) for name, group in groups.items())
    )


def _scheme(what: str, group: Any, form: str | None) -> Scheme:
    if not isinstance(group, dict):
        raise ModelError(f"{what} is not an object")
    check_fields(what, group, _GROUP_FIELDS)
    weights, activations, name = required(what, group, "weights"), group.get("input_activations"), what
    what += ".weights"
    if not isinstance(weights, dict):
        raise ModelError(f"{what} is not an object")
    check_fields(what, weights, _WEIGHT_FIELDS)
    bits, kind = whole_number(what, weights, "num_bits"), weights.get("type", "int")
    form = group.get("format") or form
    group_size = weights.get("group_size") or -1
    strategy = weights.get("strategy") or (Strategy.GROUP if group_size > 0 else Strategy.TENSOR)
    if strategy == Strategy.GROUP and (not isinstance(group_size, int) or group_size < 1):
        raise ModelError(f"{what}: group_size {group_size} is not positive")
    if (kind, bits) not in KINDS.get(str(form), ()):
        raise ModelError(f"{what}: {bits} bits of type {kind} in the format {form} are not supported")
    _check_strategy(what, strategy, str(form), kind, group_size)
    _check_activations(name, activations, kind, str(form))
    return Scheme(
        tuple(map(str, group.get("targets") or ())),
        str(form),
        bits,
        kind == "float",
        bool(weights.get("symmetric", True)),
        Strategy(strategy),
        group_size,
        block_of(what, "block_structure", weights.get("block_structure")) if strategy == Strategy.BLOCK else None,
    )


def _check_strategy(what: str, strategy: str, form: str, kind: str, group_size: int) -> None:
    """Raises `ModelError` for scales that the format has not."""
    is_fp8, is_right = kind == "float" and form not in FP4, True
    if form in FP4:
        is_right = (strategy, group_size) == FP4[form]
    elif strategy == Strategy.BLOCK:
        is_right = is_fp8
    elif strategy == Strategy.GROUP and is_fp8:
        is_right = group_size >= MIN_BLOCK_COLUMNS and not group_size & (group_size - 1)
    elif strategy == Strategy.TENSOR_GROUP:
        is_right = False
    if not is_right:
        raise ModelError(f"{what}: strategy {strategy!r} with groups of {group_size} in {form} is not supported")


def _check_activations(what: str, activations: Any, kind: str, form: str) -> None:
    """Raises `ModelError` for activations that are quantized in another type than the weights."""
    if activations is None:
        return
    if form == PACKED or not isinstance(activations, dict) or activations.get("type", "int") != kind:
        raise ModelError(f"{what}: input_activations is not supported (it is {str(activations)[:100]})")


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
    layer.check_names(("weight", "weight_scale"), ("weight_zero_point", *ACTIVATION_SCALES))
    numbers = layer.get("weight", (torch.int8,), (layer.out_features, layer.in_features))
    scale = _scale(scheme, layer)
    zeros = torch.full_like(scale, 128.0, dtype=torch.float32)
    if not scheme.is_symmetric:
        layer.check_names(("weight_zero_point", *layer.tensors))
        zeros = zeros + layer.get("weight_zero_point", (torch.int8,), *_scale_shapes(scheme, layer)).expand_as(scale)
    return layer.weight(numbers.contiguous().view(torch.uint8) ^ 0x80, scale, zeros, 8)


def _read_fp8(scheme: Scheme, layer: LayerTensors) -> FloatWeight:
    layer.check_names(("weight", "weight_scale"), ACTIVATION_SCALES)
    if scheme.block is not None:
        return layer.fp8_in_blocks("weight_scale", scheme.block)
    if scheme.strategy == Strategy.GROUP:
        scale = layer.finite("weight_scale", SCALE_DTYPES, *_scale_shapes(scheme, layer))
        return layer.fp8(scale.float(), group_size=scheme.group_size)
    return layer.fp8_of_rows("weight_scale", *_scale_shapes(scheme, layer))


def _read_fp4(scheme: Scheme, layer: LayerTensors) -> FloatWeight:
    shape = layer.out_features, layer.num_groups(scheme.group_size)
    if scheme.form == MXFP4:
        layer.check_names(("weight_packed", "weight_scale"), ACTIVATION_SCALES)
        exponents = layer.get("weight_scale", (torch.uint8,), shape)
        if bool((exponents == NAN_EXPONENT).any()):
            raise ModelError(f"{layer.layer}.weight_scale has scales that are not finite")
        return layer.fp4("weight_packed", exponents.contiguous().view(torch.float8_e8m0fnu), scheme.group_size)
    layer.check_names(("weight_packed", "weight_scale", "weight_global_scale"), ACTIVATION_SCALES)
    scale = layer.finite("weight_scale", (torch.float8_e4m3fn,), shape)
    divisor = layer.finite("weight_global_scale", (torch.float32,), *SHAPES_OF_ONE)
    if not bool((divisor > 0).all()):
        raise ModelError(f"{layer.layer}.weight_global_scale is not positive")
    return layer.fp4("weight_packed", scale, scheme.group_size, 1 / divisor)


def _scale(scheme: Scheme, layer: LayerTensors) -> Tensor:
    """Returns the scales `[out, groups]`."""
    scale = layer.finite("weight_scale", SCALE_DTYPES, *_scale_shapes(scheme, layer))
    return scale.expand(layer.out_features, -1) if scale.ndim == 2 else scale.expand(layer.out_features, 1)


def _scale_shapes(scheme: Scheme, layer: LayerTensors) -> tuple[tuple[int, ...], ...]:
    if scheme.strategy == Strategy.TENSOR:
        return SHAPES_OF_ONE
    num_groups = layer.num_groups(scheme.group_size) if scheme.strategy == Strategy.GROUP else 1
    return ((layer.out_features, num_groups),)
