"""Adapters in the format of Hugging Face PEFT: a folder with `adapter_config.json` and `adapter_model.safetensors`.

Only LoRA of a layer's projections is read. Everything that would change the result in another way is refused by the
name of its field, fields that are not known here included. Fields that matter in training only are ignored, and so is
`fan_in_fan_out`: it describes how the base model stores a weight, and A and B are stored the same way in either case.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from inflight.executor.adapters.errors import AdapterError
from inflight.executor.adapters.weights import (
    AdapterLimits,
    AdapterMatrix,
    AdapterWeights,
    RankLimit,
)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20

# Fields that are read, and those that matter in training only.
READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"})
READ_ALSO = frozenset({"exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights"})
IGNORED = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "parent_library",
        "revision",
        "inference_mode",
        "lora_dropout",
        "fan_in_fan_out",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
    }
)
# With the others, training changes the weights of the base model before it begins.
INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva")
PREFIX = "base_model.model."
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter's two files."""

    config: bytes
    weights: bytes

    @property
    def hash(self) -> str:
        """The content's hash: SHA-256 over the SHA-256 of either file, in hexadecimal digits."""
        digests = (hashlib.sha256(content).digest() for content in (self.config, self.weights))
        return hashlib.sha256(b"".join(digests)).hexdigest()


def read_files(folder: Path) -> AdapterFiles:
    """Reads the files of an adapter. Raises `AdapterError`."""
    try:
        if (folder / CONFIG_FILE).stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterError(f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES} bytes")
        return AdapterFiles((folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes())
    except OSError as error:
        raise AdapterError(f"its files cannot be read: {error}") from error


def parse(files: AdapterFiles, limits: AdapterLimits | RankLimit) -> AdapterWeights:
    """Returns the weights; with a limit of the rank alone, only what the configuration says. Raises `AdapterError` if
    they cannot be used with the model."""
    config = _Config(_json_object(files.config))
    if isinstance(limits, RankLimit):
        if config.largest_rank > limits.max_rank:
            raise AdapterError(f"rank {config.largest_rank} is above max_adapter_rank={limits.max_rank}")
        return AdapterWeights((), config.largest_rank)
    tensors = _tensors(files.weights)
    modules = dict(limits.modules())
    config.check_targets(modules, limits.shape.num_layers)
    targets = {name for name in modules if config.targets(name)}
    if not targets:
        raise AdapterError("target_modules names no projection of the model")
    unknown = sorted(set(tensors) - {f"{PREFIX}{name}.lora_{side}.weight" for name in targets for side in "AB"})
    if unknown:
        raise AdapterError(
            f"{WEIGHTS_FILE} has {unknown[0]}, which is not of a projection of attention or of a feed-forward layer "
            "that target_modules names"
        )

    def matrix(name: str | None) -> AdapterMatrix | None:
        return _matrix(config, tensors, name, modules[name], limits.max_rank) if name in targets else None

    layers = range(limits.shape.num_layers)
    return AdapterWeights(tuple(tuple(map(matrix, limits.names(layer))) for layer in layers))


class _Config:
    """The fields that say which weights change, and how much."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        _check_fields(fields)
        self.rank = self._integer("r", fields.get("r", 8))
        self._ranks, self._alphas = (self._pattern(name) for name in ("rank_pattern", "alpha_pattern"))
        self._alpha = self._number("lora_alpha", fields.get("lora_alpha", 8))

    def targets(self, module: str) -> bool:
        """Returns whether the adapter changes a module, by the rules of PEFT."""
        excluded = self._fields.get("exclude_modules")
        if excluded and self._is_named("exclude_modules", excluded, module):
            return False
        return self._is_named("target_modules", self._fields["target_modules"], module) and self._has_layer(module)

    def check_targets(self, modules: Iterable[str], num_layers: int) -> None:
        """Raises if the fields name weights that an adapter may not change here."""
        for other in ("lm_head", "model.embed_tokens"):
            if self._fields["target_modules"] != "all-linear" and self.targets(other):
                raise AdapterError(f"target_modules names {other}, and only projections of layers can be changed")
        names = self._fields["target_modules"]
        if isinstance(names, list):
            for name in names:
                if not any(_ends_with(module, name) for module in modules):
                    raise AdapterError(
                        f"target_modules names {name!r}, which is no projection of attention or of a feed-forward layer"
                    )
        layers = self._layers()
        if layers is not None and max(layers, default=0) >= num_layers:
            raise AdapterError(f"layers_to_transform has layer {max(layers)}, and the model has {num_layers}")

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self._ranks, module, self.rank))

    @property
    def largest_rank(self) -> int:
        """The largest rank that it names."""
        return int(max(self.rank, *self._ranks.values(), 0))

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = float(_by_pattern(self._alphas, module, self._alpha))
        return alpha / math.sqrt(rank) if self._fields.get("use_rslora") else alpha / rank

    def _is_named(self, field: str, names: Any, module: str) -> bool:
        if names == "all-linear" and field == "target_modules":
            return True
        if isinstance(names, str):
            try:
                return re.fullmatch(names, module) is not None
            except re.error as error:
                raise AdapterError(f"{field} is not a regular expression: {error}") from error
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return any(_ends_with(module, name) for name in names)
        raise AdapterError(f"{field} must be a list of names or a regular expression")

    def _layers(self) -> list[int] | None:
        layers = self._fields.get("layers_to_transform")
        if layers is None:
            return None
        layers = layers if isinstance(layers, list) else [layers]
        return [self._integer("layers_to_transform", layer, least=0) for layer in layers]

    def _has_layer(self, module: str) -> bool:
        layers = self._layers()
        found = re.match(r"model\.layers\.(\d+)\.", module)
        return layers is None or found is None or int(found[1]) in layers

    def _pattern(self, field: str) -> dict[str, float]:
        patterns = self._fields.get(field) or {}
        if not isinstance(patterns, dict):
            raise AdapterError(f"{field} must be an object of names and numbers")
        check = self._integer if field == "rank_pattern" else self._number
        for pattern, value in patterns.items():
            check(field, value)
            try:
                re.compile(pattern)
            except re.error as error:
                raise AdapterError(f"{field}: {pattern!r} is not a regular expression: {error}") from error
        return patterns

    @staticmethod
    def _integer(field: str, value: Any, least: int = 1) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise AdapterError(f"{field} must be an integer of at least {least}, not {value!r}")
        return value

    @staticmethod
    def _number(field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise AdapterError(f"{field} must be a finite number, not {value!r}")
        return value


def _check_fields(fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type is {fields.get('peft_type')!r}, and only LORA is supported")
    if fields.get("bias", "none") != "none":
        raise AdapterError(f"bias is {fields['bias']!r}, and only 'none' is supported")
    if fields.get("init_lora_weights") not in INITIALIZATIONS:
        raise AdapterError(f"init_lora_weights {fields['init_lora_weights']!r} changes the base model")
    if not fields.get("target_modules"):
        raise AdapterError("target_modules is missing")
    # "layers" is the name in every model that is served here.
    if fields.get("layers_pattern") not in (None, [], "layers", ["layers"]):
        raise AdapterError(f"layers_pattern {fields['layers_pattern']!r} is not supported")
    for name, value in fields.items():
        if value and name not in READ | READ_ALSO | IGNORED:
            raise AdapterError(f"{name} is set, which is not supported")


def _by_pattern(values: Mapping[str, float], module: str, default: float) -> float:
    """Returns the value of the first pattern that matches the end of the module's name."""
    return next((value for name, value in values.items() if re.match(rf"(.*\.)?({name})$", module)), default)


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise AdapterError(f"{CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise AdapterError(f"{CONFIG_FILE} is not a JSON object")
    return value


def _tensors(content: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} is not a whole safetensors file: {error}") from error


def _matrix(
    config: _Config, tensors: Mapping[str, Tensor], module: str, size: tuple[int, int], max_rank: int
) -> AdapterMatrix:
    rank, (outputs, inputs) = config.rank_of(module), size
    if rank > max_rank:
        raise AdapterError(f"rank {rank} of {module} is above max_adapter_rank={max_rank}")
    a, b = (
        _tensor(tensors, f"{PREFIX}{module}.lora_{side}.weight", shape)
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank)))
    )
    return AdapterMatrix(a, b, config.scale_of(module))


def _tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise AdapterError(f"{WEIGHTS_FILE} lacks {name}")
    if tuple(tensor.shape) != shape:
        raise AdapterError(f"{name} has shape {list(tensor.shape)}, and the model needs {list(shape)}")
    if tensor.dtype not in DTYPES:
        raise AdapterError(f"{name} has type {tensor.dtype}")
    if not bool(torch.isfinite(tensor).all()):
        raise AdapterError(f"{name} has numbers that are not finite")
    return tensor
