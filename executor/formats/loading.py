"""Networks of transformers from a model on disk, in each format.

A quantized checkpoint is read by `executor.formats`, everything else by transformers. For any device but a CPU, weights
are copied there one after the other, so that host memory never holds the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from common.machine import return_free_memory
from common.model_source import ModelError, ModelSource, model_errors, read_gguf
from executor.checkpoint.files import check_weights, weight_files
from executor.checkpoint.gguf import import_configuration, import_gguf
from executor.checkpoint.quantized_linear import QuantizedLinear
from executor.checkpoint.quiet import quiet_transformers
from executor.checkpoint.support import check_configuration, check_network, network_class
from executor.formats.folder import IGNORED_SUFFIXES, format_of, load_folder, quantization_of
from executor.formats.gguf_file import load_gguf, unsupported_reason

log = logging.getLogger(__name__)

# Types of safetensors that only quantized weights have.
INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})


def load_network(source: ModelSource, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, Path]:
    """Returns the network, and the folder with its configuration. Raises `ModelError` with the reason if it cannot be
    loaded."""
    if source.gguf_file is not None:
        network, folder = _load_gguf(source, source.gguf_file, dtype, device)
    else:
        network, folder = _load_folder(source.folder, dtype, device), source.folder
    check_network(network)
    _check_numbers(network)
    network.eval().requires_grad_(False).to(device)
    return_free_memory()
    return network, folder


def describe_weights(source: ModelSource) -> str:
    """Returns the format of the weights in words. Raises `ModelError` if it is not supported."""
    if source.gguf_file is None:
        quantization = quantization_of(source.folder)
        return "safetensors, not quantized" if quantization is None else format_of(quantization).description
    header = read_gguf(source.gguf_file)
    reason = unsupported_reason(header)
    how = "read directly" if reason is None else f"imported as a dense model, because {reason}"
    return f"GGUF, {', '.join(header.type_names)}; {how}"


def _load_gguf(
    source: ModelSource, path: Path, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, Path]:
    header = read_gguf(path)
    if reason := unsupported_reason(header):
        log.warning("%s is imported as a dense model, because %s", path.name, reason)
        folder = import_gguf(source)
        return _load_folder(folder, dtype, device), folder
    folder = import_configuration(source)
    with quiet_transformers(), model_errors(f"GGUF file {path} cannot be loaded"):
        return load_gguf(path, header, _configuration(folder), dtype, device), folder


def _load_folder(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    with quiet_transformers(), model_errors(f"model folder {folder} cannot be loaded"):
        config = _configuration(folder)
        if config.get_text_config(decoder=True) is not config:
            log.warning(
                "%s is served for text only; its weights for images or sound take memory and are not used", folder
            )
        check_weights(folder)
        if (folder / "adapter_config.json").is_file():
            log.warning("%s: adapter_config.json has no effect; --adapter-folder serves adapters", folder)
        if quantization := quantization_of(folder):
            return load_folder(folder, config, quantization, dtype, device)
        return _load_dense(folder, config, dtype, device)


def _load_dense(folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    kind, config = network_class(config)
    with _tensors_of(folder) as tensors:
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
        yield tensors


def _check_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Raises `ModelError` for tensors that are missing, superfluous or of another shape. transformers would continue
    with random numbers, or without them."""
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"model folder {folder} lacks {len(missing)} weights, such as {missing[0]}")
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ModelError(f"{name} has the shape {list(found)} instead of {list(expected)}")
    if unexpected := sorted(key for key in report["unexpected_keys"] if not key.endswith(IGNORED_SUFFIXES)):
        others = f" and {len(unexpected) - 1} more tensors of its files" if len(unexpected) > 1 else ""
        raise ModelError(f"the model has no place for {unexpected[0]}{others}")


def _configuration(folder: Path) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    check_configuration(config)
    return config


def _check_numbers(network: PreTrainedModel) -> None:
    """Raises `ModelError` for a weight that is not a number, or infinite."""
    for name, tensor in _numbers(network):
        if tensor.is_floating_point() and not tensor.is_meta and tensor.numel():
            # Does not copy the tensor, and passes NaN on.
            least, greatest = tensor.aminmax()
            if not (torch.isfinite(least) and torch.isfinite(greatest)):
                raise ModelError(f"{name} has numbers that are not finite (NaN or infinite)")


def _numbers(network: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from network.named_parameters()
    for name, module in network.named_modules():
        if isinstance(module, QuantizedLinear):
            yield from ((f"{name}.weight", part) for part in (module.weight.scale, module.weight.offset))
