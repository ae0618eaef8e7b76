"""Checkpoints of NVIDIA's ModelOpt in FP8 and NVFP4, which may have layers of both.

A linear layer has

    FP8       weight float8_e4m3fn [out, in], weight_scale: one number, [out] of rows, or of blocks of 128×128
    NVFP4     weight uint8 [out, in / 2], weight_scale float8_e4m3fn [out, in / 16], weight_scale_2: one number

The weight is `number * scale`, for NVFP4 `number * (scale * scale_2)`. The scales of activations, `input_scale`, have
no effect, because activations are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from inflight.executor.checkpoint.quantized_weight import FloatWeight
from inflight.executor.formats.layer_tensors import ACTIVATION_SCALES, SHAPES_OF_ONE, LayerTensors
from inflight.executor.formats.quantization_config import ANY, check_fields, required

WHAT = "ModelOpt checkpoint"
FP4_GROUP_SIZE = 16
BLOCKED, OF_ROWS = "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"
BLOCK = (128, 128)
_FIELDS: Mapping[str, Any] = {
    "quant_method": ("modelopt", "modelopt_fp4"),
    "quant_algo": ("FP8", BLOCKED, OF_ROWS, "NVFP4", "MIXED_PRECISION"),
    # The KV cache has a type of its own here, `kv_cache_dtype`.
    "kv_cache_quant_algo": ("FP8",),
    "kv_cache_scheme": ANY,
    "group_size": (FP4_GROUP_SIZE,),
    # Names of layers that are dense in the files, and the same in two more forms.
    "exclude_modules": ANY,
    "ignore": ANY,
    "config_groups": ANY,
    "quantized_layers": ANY,
    "producer": ANY,
}


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """How the layers of a checkpoint are encoded; those in NVFP4 are told by their tensors."""

    algorithm: str

    @property
    def markers(self) -> tuple[str, ...]:
        """The tensors of which a quantized layer has one."""
        return ("weight_scale",)

    @property
    def description(self) -> str:
        """The encoding in words."""
        return f"ModelOpt, {self.algorithm}"

    def read(self, layer: LayerTensors) -> FloatWeight:
        """Returns the matrix of a layer."""
        layer.check_activation_scales()
        if "weight_scale_2" in layer.tensors:
            layer.check_names(("weight", "weight_scale", "weight_scale_2"), ACTIVATION_SCALES)
            shape = layer.out_features, layer.num_groups(FP4_GROUP_SIZE)
            scale = layer.finite("weight_scale", (torch.float8_e4m3fn,), shape)
            factor = layer.finite("weight_scale_2", (torch.float32,), *SHAPES_OF_ONE)
            return layer.fp4("weight", scale, FP4_GROUP_SIZE, factor)
        layer.check_names(("weight", "weight_scale"), ACTIVATION_SCALES)
        if self.algorithm == BLOCKED:
            return layer.fp8_in_blocks("weight_scale", BLOCK)
        of_rows = ((layer.out_features,), (layer.out_features, 1)) if self.algorithm == OF_ROWS else SHAPES_OF_ONE
        return layer.fp8_of_rows("weight_scale", *of_rows)


def read_modelopt(config: Mapping[str, Any]) -> ModelOpt:
    """Returns how a checkpoint with this configuration is encoded."""
    check_fields(WHAT, config, _FIELDS)
    return ModelOpt(str(required(WHAT, config, "quant_algo")))
