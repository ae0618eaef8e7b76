"""FP8 checkpoints under the label `fp8`, of DeepSeek, Qwen, MiniMax and Mistral, and of AutoFP8.

A linear layer has

    weight              float8_e4m3fn [out, in]
    weight_scale_inv    [ceil(out / rows), ceil(in / columns)] with `weight_block_size`, else one number, which AutoFP8
                        calls weight_scale
    input_scale or activation_scale     one number, if `activation_scheme` is static

The weight is `number * scale`, in spite of the name. Activations are not rounded to FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.executor.checkpoint.quantized_weight import FloatWeight
from inflight.executor.formats.layer_tensors import ACTIVATION_SCALES, SHAPES_OF_ONE, LayerTensors
from inflight.executor.formats.quantization_config import ANY, block_of, check_fields

WHAT = "FP8 checkpoint"
SCALES = ("weight_scale_inv", "weight_scale")
_FIELDS: Mapping[str, Any] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic", "static"),
    "weight_block_size": ANY,
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    "dequantize": (True, False),
    # Names of layers that are dense in the files.
    "modules_to_not_convert": ANY,
    "ignored_layers": ANY,
}


@dataclass(frozen=True, slots=True)
class Fp8:
    """How the layers of a checkpoint are encoded. Without blocks a matrix has one scale."""

    block: tuple[int, int] | None

    @property
    def markers(self) -> tuple[str, ...]:
        """The tensors of which a quantized layer has one."""
        return SCALES

    @property
    def description(self) -> str:
        """The encoding in words."""
        return "FP8, " + ("a scale per matrix" if self.block is None else "blocks of {}×{}".format(*self.block))

    def read(self, layer: LayerTensors) -> FloatWeight:
        """Returns the matrix of a layer."""
        scale = next(name for name in SCALES if name in layer.tensors)
        layer.check_names(("weight", scale), ACTIVATION_SCALES)
        layer.check_activation_scales()
        if self.block is None:
            return layer.fp8_of_rows(scale, *SHAPES_OF_ONE)
        return layer.fp8_in_blocks(scale, self.block)


def read_fp8(config: Mapping[str, Any]) -> Fp8:
    """Returns how a checkpoint with this configuration is encoded."""
    check_fields(WHAT, config, _FIELDS)
    block = config.get("weight_block_size")
    return Fp8(None if block is None else block_of(WHAT, "weight_block_size", block))
