"""Hugging Face folders whose weights are not quantized, read by transformers.

transformers leaves out tensors for which the model has no place, and continues with random numbers in place of those
that are missing or of another shape. Here each is an error with the name of a tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel

from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.files import CLASSIFIER_WEIGHTS, may_lack_head, weight_files
from inflight.executor.checkpoint.support import network_class
from inflight.executor.formats.folder import IGNORED_SUFFIXES

# The number in the name of an expert's tensor.
EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
# Types of safetensors that only quantized weights have.
INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})


def load_dense(folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Loads a folder. Raises `ModelError` for tensors that do not fit the configuration."""
    kind, config = network_class(config)
    with _tensors_of(folder) as tensors, _named_conversions():
        if may_lack_head(folder):
            _leave_out_head(config, tensors)
        # By the path of a folder, transformers would also load an adapter that lies there, if PEFT is installed.
        loaded: Any = kind.from_pretrained(
            None,
            state_dict=tensors,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            device_map=None if device.type == "cpu" else {"": device},
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    network: PreTrainedModel = loaded[0]
    _check_report(folder, loaded[1])
    return network


@contextmanager
def _tensors_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Opens the weight files. Tensors are read when they are used."""
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for name in weight_files(folder):
            file = files.enter_context(safe_open(folder / name, framework="pt"))
            tensors |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        for key, tensor in tensors.items():
            if key.endswith(".weight") and tensor.get_dtype() in INTEGERS:
                # transformers would take the numbers as they are.
                raise ModelError(f"{key} is of {tensor.get_dtype()}, and config.json names no quantization")
        _check_experts({key: tuple(tensor.get_shape()) for key, tensor in tensors.items()})
        yield tensors


def _leave_out_head(config: PretrainedConfig, tensors: dict[str, Any]) -> None:
    """Leaves out the layer of a classifier, which is read elsewhere. In place of an output layer that is missing, the
    network gets the embedding: nothing is computed with it."""
    for name in CLASSIFIER_WEIGHTS:
        tensors.pop(name, None)
    if not any(name.endswith("lm_head.weight") for name in tensors):
        config.tie_word_embeddings = True


def _check_experts(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ModelError` if the experts of a layer do not have the same tensors. transformers stacks those of all
    experts in their order, whatever their numbers are, and does not name what cannot be stacked."""
    layers: defaultdict[str, defaultdict[int, dict[str, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in shapes.items():
        if match := EXPERT.search(name):
            layers[name[: match.start()]][int(match[0])][name[match.end() :]] = shape
    for layer, experts in layers.items():
        expected = {leaf: shape for tensors in experts.values() for leaf, shape in tensors.items()}
        for number in range(max(experts) + 1):
            for leaf, shape in expected.items():
                found = experts[number].get(leaf)
                if found is None:
                    raise ModelError(f"{layer}{number}{leaf} is missing")
                if found != shape:
                    raise ModelError(f"{layer}{number}{leaf} has the shape {list(found)}, others {list(shape)}")


@contextmanager
def _named_conversions() -> Iterator[None]:
    """Replaces the error of transformers that refers to a report which is not shown."""
    try:
        yield
    except RuntimeError as error:
        if "CONVERSION" in str(error):
            raise ModelError(
                "tensors of its files, such as those of experts, do not make those of the model"
            ) from error
        raise


def _check_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Raises `ModelError` for tensors that are missing, superfluous or of another shape."""
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"model folder {folder} lacks {len(missing)} weights, such as {missing[0]}")
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ModelError(f"{name} has the shape {list(found)} instead of {list(expected)}")
    if unexpected := sorted(key for key in report["unexpected_keys"] if not key.endswith(IGNORED_SUFFIXES)):
        others = f" and {len(unexpected) - 1} more tensors of its files" if len(unexpected) > 1 else ""
        raise ModelError(f"the model has no place for {unexpected[0]}{others}")
