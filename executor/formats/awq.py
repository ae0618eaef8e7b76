"""AWQ checkpoints (AutoAWQ's "GEMM" layout) of 4 bits.

A linear layer has, with words of int32 that hold eight codes:

    qweight  int32 [in, out / 8]        codes; a word holds eight outputs in the order of OUTPUTS
    qzeros   int32 [groups, out / 8]    zeros, in the same order
    scales   [groups, out]

The weight is `scale * (code - zero)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.executor.checkpoint.quantized_weight import QuantizedWeight, pack_halves
from inflight.executor.formats.layer_tensors import SCALE_DTYPES, LayerTensors, unpacked
from inflight.executor.formats.quantization_config import (
    ANY,
    AUTO_ROUND_FIELDS,
    check_fields,
    group_size_of,
    groups_in_words,
    whole_number,
)

WHAT = "AWQ checkpoint"
BITS = 4
# Where in a word the code of each of eight outputs is.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Fields that say how another program should run the model.
_WITHOUT_EFFECT = (
    "backend",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "modules_to_not_convert",
)
_FIELDS: Mapping[str, Any] = {
    **AUTO_ROUND_FIELDS,
    **dict.fromkeys(_WITHOUT_EFFECT, ANY),
    "quant_method": ("awq",),
    "bits": (BITS,),
    "group_size": ANY,
    "version": ("gemm", "GEMM"),
    "format": ("gemm",),
    # AutoRound stores the zeros of symmetric weights, too.
    "zero_point": (True, False),
}


@dataclass(frozen=True, slots=True)
class Awq:
    """How the layers of a checkpoint are encoded. A group size of -1 is the whole row."""

    group_size: int

    @property
    def markers(self) -> tuple[str, ...]:
        """The tensors of which a quantized layer has one."""
        return ("qweight",)

    @property
    def description(self) -> str:
        """The encoding in words."""
        return f"AWQ, {BITS} bits, {groups_in_words(self.group_size)}"

    def read(self, layer: LayerTensors) -> QuantizedWeight:
        """Returns the matrix of a layer."""
        layer.check_names(("qweight", "qzeros", "scales"))
        num_out, num_in = layer.out_features, layer.in_features
        num_groups = layer.num_groups(self.group_size)
        codes = _in_order(layer.get("qweight", (torch.int32,), (num_in, num_out // 8)))
        zeros = _in_order(layer.get("qzeros", (torch.int32,), (num_groups, num_out // 8)))
        scale = layer.finite("scales", SCALE_DTYPES, (num_groups, num_out))
        return layer.weight(pack_halves(codes.t()), scale.t(), zeros.t(), BITS)


def read_awq(config: Mapping[str, Any]) -> Awq:
    """Returns how a checkpoint with this configuration is encoded."""
    check_fields(WHAT, config, _FIELDS)
    whole_number(WHAT, config, "bits")
    return Awq(group_size_of(WHAT, config))


def _in_order(words: Tensor) -> Tensor:
    """Returns the codes `[rows, out]` of words `[rows, out / 8]`."""
    eights: Tensor = unpacked(words, BITS).unflatten(-1, (-1, 8))
    return eights[..., list(PLACES)].flatten(-2)
