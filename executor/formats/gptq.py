"""GPTQ checkpoints (AutoGPTQ, GPTQModel) of 4 and 8 bits.

A linear layer has, with words of int32 that hold 32 / bits codes, the lowest bits first:

    qweight  int32 [in * bits / 32, out]        codes; a word holds consecutive inputs
    qzeros   int32 [groups, out * bits / 32]    zeros; a word holds consecutive outputs
    scales   [groups, out]
    g_idx    int32 [in]                         the group of each input; not in order with act-order

The weight is `scale * (code - zero)`. The first version of the format stores zeros less one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from inflight.executor.checkpoint.quantized_weight import QuantizedWeight
from inflight.executor.formats.layer_tensors import INDEX_DTYPES, SCALE_DTYPES, LayerTensors, as_bytes, unpacked
from inflight.executor.formats.quantization_config import (
    ANY,
    AUTO_ROUND_FIELDS,
    check_fields,
    group_size_of,
    groups_in_words,
    whole_number,
)

WHAT = "GPTQ checkpoint"
BITS = (4, 8)
FORMATS = ("gptq", "gptq_v2")
# Fields that say how the quantization was made, or how another program should run it.
_WITHOUT_EFFECT = (
    "act_group_aware",
    "backend",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "desc_act",
    "disable_exllama",
    "exllama_config",
    "failsafe",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_not_convert",
    "mse",
    "offload_to_disk",
    "pack_impl",
    "pad_token_id",
    "quantizer",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "version",
)
_FIELDS: Mapping[str, Any] = {
    **AUTO_ROUND_FIELDS,
    **dict.fromkeys(_WITHOUT_EFFECT, ANY),
    "quant_method": ("gptq",),
    "method": ("gptq",),
    "bits": BITS,
    "group_size": ANY,
    "checkpoint_format": FORMATS,
    "format": FORMATS,
    "is_marlin_format": (False,),
    "pack_dtype": ("int32",),
    "rotation": (False,),
    "is_mx_optimized": (False,),
}


@dataclass(frozen=True, slots=True)
class Gptq:
    """How the layers of a checkpoint are encoded. A group size of -1 is the whole row."""

    bits: int
    group_size: int
    stores_zeros_less_one: bool

    @property
    def markers(self) -> tuple[str, ...]:
        """The tensors of which a quantized layer has one."""
        return ("qweight",)

    @property
    def description(self) -> str:
        """The encoding in words."""
        return f"GPTQ, {self.bits} bits, {groups_in_words(self.group_size)}"

    def read(self, layer: LayerTensors) -> QuantizedWeight:
        """Returns the matrix of a layer."""
        layer.check_names(("qweight", "qzeros", "scales"), ("g_idx",))
        num_out, num_in, bits = layer.out_features, layer.in_features, self.bits
        num_groups = layer.num_groups(self.group_size)
        words = layer.get("qweight", (torch.int32,), (num_in * bits // 32, num_out))
        zeros = unpacked(layer.get("qzeros", (torch.int32,), (num_groups, num_out * bits // 32)), bits)
        scale = layer.finite("scales", SCALE_DTYPES, (num_groups, num_out))
        groups = layer.get("g_idx", INDEX_DTYPES, (num_in,)) if "g_idx" in layer.tensors else None
        if self.stores_zeros_less_one:
            # Zero 0 is stored as the largest code.
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return layer.weight(as_bytes(words.t()), scale.t(), zeros.t(), bits, groups)


def read_gptq(config: Mapping[str, Any]) -> Gptq:
    """Returns how a checkpoint with this configuration is encoded."""
    check_fields(WHAT, {name: value for name, value in config.items() if not _only_excludes(name, value)}, _FIELDS)
    bits, group_size = whole_number(WHAT, config, "bits"), group_size_of(WHAT, config)
    stored = config.get("checkpoint_format") or config.get("format") or FORMATS[0]
    return Gptq(bits, group_size, stores_zeros_less_one=stored == FORMATS[0])


def _only_excludes(name: str, value: Any) -> bool:
    """Returns whether a field is `dynamic` with rules that only leave layers out (`-:regex`). Those are dense in the
    files; rules of the other kinds change how a layer is encoded."""
    return name == "dynamic" and isinstance(value, dict) and all(str(rule).startswith("-:") for rule in value)
