"""AutoRound checkpoints, which have the layout of GPTQ or AWQ under a label of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inflight.common.model_source import ModelError
from inflight.executor.formats.awq import Awq, read_awq
from inflight.executor.formats.gptq import Gptq, read_gptq
from inflight.executor.formats.quantization_config import ANY, check_fields

WHAT = "AutoRound checkpoint"
# What AutoRound writes if it is not told otherwise.
DEFAULT_PACKING = "auto_round:auto_gptq"
_READERS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Gptq | Awq]]] = {
    DEFAULT_PACKING: ("gptq", read_gptq),
    "auto_round:auto_awq": ("awq", read_awq),
}
# Fields of this label alone. The others are those of the layout, whose reader checks them.
_OWN_FIELDS: Mapping[str, Any] = {
    "quant_method": ("auto-round",),
    "packing_format": tuple(_READERS),
    "backend": ("auto", *_READERS),
    "extra_config": ANY,
    "regex_config": ANY,
}
# Layers of that many bits are not quantized.
DENSE_BITS = 16


def read_auto_round(config: Mapping[str, Any]) -> Gptq | Awq:
    """Returns how a checkpoint with this configuration is encoded."""
    check_fields(WHAT, {name: config.get(name) for name in _OWN_FIELDS}, _OWN_FIELDS)
    for field in ("extra_config", "regex_config"):
        for layer, changes in (config.get(field) or {}).items():
            if not isinstance(changes, dict) or changes.get("bits", 0) < DENSE_BITS:
                raise ModelError(f"{WHAT}: {field} has other settings for {layer}, which are not supported")
    method, read = _READERS[config.get("packing_format") or DEFAULT_PACKING]
    return read({name: value for name, value in config.items() if name not in _OWN_FIELDS} | {"quant_method": method})
