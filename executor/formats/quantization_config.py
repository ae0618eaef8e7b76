"""Fields of a checkpoint's quantization configuration, each of which is known or refused by name.

A field that is not known may change what the numbers mean, so ignoring it could give wrong answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from inflight.common.model_source import ModelError

# Columns of a block that shares a scale: the products multiply as many at once.
MIN_BLOCK_COLUMNS = 16
# Accepts every value of a field.
ANY = None
# Fields of AutoRound, which stores checkpoints under its own label and under those of GPTQ and AWQ.
AUTO_ROUND_FIELDS: Mapping[str, Collection[Any] | None] = {
    **dict.fromkeys(
        (
            "act_data_type",
            "act_dynamic",
            "act_group_size",
            "act_sym",
            "amp",
            "autoround_version",
            "batch_size",
            "block_name_to_quantize",
            "dataset",
            "enable_minmax_tuning",
            "enable_norm_bias_tuning",
            "enable_quanted_input",
            "gradient_accumulate_steps",
            "iters",
            "low_gpu_mem_usage",
            "lr",
            "minmax_lr",
            "nsamples",
            "provider",
            "quant_block_list",
            "scale_dtype",
            "seqlen",
            "supported_types",
            "sym",
            "to_quant_block_names",
        ),
        ANY,
    ),
    # With 16 or more bits activations are not quantized.
    "act_bits": (16, 32),
    "data_type": ("int",),
}
# Values of fields that are not set.
_UNSET: tuple[Any, ...] = (None, {}, [], "")


def check_fields(what: str, fields: Mapping[str, Any], known: Mapping[str, Collection[Any] | None]) -> None:
    """Raises `ModelError` for a field that is not in `known`, or whose value is not among the accepted ones there. A
    field without content, or a flag that is not set, is never unknown."""
    for name, value in fields.items():
        if value in _UNSET:
            continue
        if name not in known:
            if value is False:
                continue
            raise ModelError(f"{what}: {name} is not supported (it is {_shown(value)})")
        accepted = known[name]
        if accepted is not ANY and value not in accepted:
            raise ModelError(f"{what}: {name} {_shown(value)} is not supported; only {_listed(accepted)}")


def required(what: str, fields: Mapping[str, Any], name: str) -> Any:
    """Returns a field that must be there."""
    if fields.get(name) is None:
        raise ModelError(f"{what}: {name} is missing")
    return fields[name]


def whole_number(what: str, fields: Mapping[str, Any], name: str) -> int:
    """Returns a field that must be a whole number."""
    value = required(what, fields, name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{what}: {name} {_shown(value)} is not a whole number")
    return value


def group_size_of(what: str, fields: Mapping[str, Any]) -> int:
    """Returns the field `group_size`: columns, or -1 for the whole row."""
    group_size = whole_number(what, fields, "group_size")
    if group_size < 1 and group_size != -1:
        raise ModelError(f"{what}: group_size {group_size} is neither -1 nor positive")
    return group_size


def block_of(what: str, name: str, size: Any) -> tuple[int, int]:
    """Returns the field `name`: rows and columns of a block that shares a scale."""
    is_pair = isinstance(size, list | tuple) and len(size) == 2 and all(type(number) is int for number in size)
    if not is_pair or size[0] < 1 or size[1] < MIN_BLOCK_COLUMNS or size[1] & (size[1] - 1):
        raise ModelError(
            f"{what}: {name} {_shown(size)} is not supported; only rows and columns, the latter a power of two from "
            f"{MIN_BLOCK_COLUMNS} on"
        )
    return size[0], size[1]


def groups_in_words(group_size: int) -> str:
    """Returns a group size as text."""
    return "a scale per row" if group_size == -1 else f"groups of {group_size}"


def _listed(accepted: Collection[Any]) -> str:
    return " or ".join(_shown(value) for value in accepted)


def _shown(value: Any) -> str:
    return repr(value)[:100]
