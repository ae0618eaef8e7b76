"""Networks of transformers from a model on disk, in each format.

A quantized checkpoint is read by `inflight.executor.formats`, everything else by transformers. For any device but a
CPU, weights are copied there one after the other, so that host memory never holds the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from inflight.common.machine import return_free_memory
from inflight.common.model_files.gguf_architectures import architecture_of
from inflight.common.model_source import ModelError, ModelSource, model_errors, old_configuration, read_gguf
from inflight.executor.checkpoint.expert_matrices import coded_experts
from inflight.executor.checkpoint.files import check_weights, weight_files
from inflight.executor.checkpoint.gguf import import_configuration, import_gguf
from inflight.executor.checkpoint.gguf_metadata import unused_keys
from inflight.executor.checkpoint.quantized_linear import QuantizedLinear
from inflight.executor.checkpoint.quantized_weight import QuantizedWeight
from inflight.executor.checkpoint.quiet import quiet_transformers
from inflight.executor.checkpoint.support import check_configuration, check_network, ignore_padding
from inflight.executor.device import free_device_bytes
from inflight.executor.formats.dense_folder import load_dense
from inflight.executor.formats.folder import format_of, load_folder, quantization_of
from inflight.executor.formats.gguf_file import load_gguf, unsupported_reason

log = logging.getLogger(__name__)


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
    if reason is not None and architecture_of(header) is not None:
        raise ModelError(f"GGUF file {source.gguf_file} cannot be loaded: {reason}")
    how = "read directly" if reason is None else f"imported as a dense model, because {reason}"
    return f"GGUF, {', '.join(header.type_names)}; {how}"


def _load_gguf(
    source: ModelSource, path: Path, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, Path]:
    header = read_gguf(path)
    folder = import_configuration(source)
    if unused := unused_keys(header):
        log.info("keys of %s that are not used: %s", path.name, ", ".join(unused))
    with quiet_transformers(), model_errors(f"GGUF file {path} cannot be loaded"):
        config = _configuration(folder)
        reason = unsupported_reason(header)
        if reason is None:
            return load_gguf(header, config, dtype, device), folder
        if architecture_of(header) is not None:
            raise ModelError(f"GGUF file {path} cannot be loaded: {reason}")
    log.warning("%s is imported as a dense model, because %s", path.name, reason)
    folder = import_gguf(source)
    return _load_folder(folder, dtype, device), folder


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
            _check_memory(folder, device)
            return load_folder(folder, config, quantization, dtype, device)
        return load_dense(folder, config, dtype, device)


def _check_memory(folder: Path, device: torch.device) -> None:
    """Raises `ModelError` if the files of a quantized checkpoint, which stays as it is, are larger than a GPU's free
    memory."""
    free_bytes = free_device_bytes(device)
    num_bytes = sum((folder / name).stat().st_size for name in weight_files(folder))
    if free_bytes is not None and num_bytes > free_bytes:
        raise ModelError(f"its weights take {num_bytes} bytes, and {free_bytes} are free on {device}")


def _configuration(folder: Path) -> PretrainedConfig:
    config: PretrainedConfig = old_configuration(folder) or AutoConfig.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    check_configuration(config)
    ignore_padding(config)
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
    yield from (named for named in network.named_buffers() if named[0].endswith("correction_bias"))
    for name, module in network.named_modules():
        if isinstance(module, QuantizedLinear) and isinstance(module.weight, QuantizedWeight):
            yield from ((f"{name}.weight", part) for part in (module.weight.scale, module.weight.offset))
    for matrix in coded_experts(network):
        if isinstance(matrix, QuantizedWeight):
            yield from (("a weight of experts", part) for part in (matrix.scale, matrix.offset))
