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

from inflight.common.machine import num_available_memory_bytes, return_free_memory
from inflight.common.model_files.gguf_architectures import architecture_of
from inflight.common.model_source import ModelError, ModelSource, model_errors, old_configuration, read_gguf
from inflight.executor.checkpoint.expert_matrices import coded_experts
from inflight.executor.checkpoint.files import check_weights, num_weights, weight_files
from inflight.executor.checkpoint.gguf import import_configuration, import_gguf
from inflight.executor.checkpoint.gguf_metadata import unused_keys
from inflight.executor.checkpoint.quantized_linear import QuantizedLinear
from inflight.executor.checkpoint.quantized_weight import QuantizedWeight
from inflight.executor.checkpoint.quiet import quiet_transformers
from inflight.executor.checkpoint.support import check_configuration, check_network, ignore_padding
from inflight.executor.device import free_device_bytes, is_gpu
from inflight.executor.formats.dense_folder import load_dense
from inflight.executor.formats.folder import format_of, load_folder, quantization_of
from inflight.executor.formats.gguf_file import load_gguf, unsupported_reason

log = logging.getLogger(__name__)

# Numbers of quantized checkpoints, and about what their scales add to each.
QUANTIZED_BITS, SCALE_BITS = (8, 4), 0.25
# Of the free memory. The rest is for the KV cache and for steps.
FITTING_SHARE = 0.9
RANKS = (2, 4, 8)


def load_network(
    source: ModelSource, dtype: torch.dtype, device: torch.device, kept_share: float = 1.0
) -> tuple[PreTrainedModel, Path]:
    """Returns the network, and the folder with its configuration.

    `kept_share` is the part of the weights' bytes that stays on a CPU: less if this is one of several ranks, or rounds
    them. Files are mapped, and may be larger than the memory.

    Raises:
        ModelError: it cannot be loaded, with the reason.
    """
    if source.gguf_file is not None:
        network, folder = _load_gguf(source, source.gguf_file, dtype, device, kept_share)
    else:
        network, folder = _load_folder(source.folder, dtype, device, kept_share), source.folder
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
    source: ModelSource, path: Path, dtype: torch.dtype, device: torch.device, kept_share: float
) -> tuple[PreTrainedModel, Path]:
    header = read_gguf(path)
    folder = import_configuration(source)
    if unused := unused_keys(header):
        log.info("keys of %s that are not used: %s", path.name, ", ".join(unused))
    with quiet_transformers(), model_errors(f"GGUF file {path} cannot be loaded"):
        config = _configuration(folder)
        reason = unsupported_reason(header)
        if reason is None:
            _check_memory(sum(tensor.num_bytes for tensor in header.tensors), kept_share, device)
            return load_gguf(header, config, dtype, device), folder
        if architecture_of(header) is not None:
            raise ModelError(f"GGUF file {path} cannot be loaded: {reason}")
    log.warning("%s is imported as a dense model, because %s", path.name, reason)
    folder = import_gguf(source)
    return _load_folder(folder, dtype, device, kept_share), folder


def _load_folder(folder: Path, dtype: torch.dtype, device: torch.device, kept_share: float) -> PreTrainedModel:
    with quiet_transformers(), model_errors(f"model folder {folder} cannot be loaded"):
        quantization = quantization_of(folder)
        config = _configuration(folder)
        if config.get_text_config(decoder=True) is not config:
            log.warning(
                "%s is served for text only; its weights for images or sound take memory and are not used", folder
            )
        check_weights(folder)
        if (folder / "adapter_config.json").is_file():
            log.warning("%s: adapter_config.json has no effect; --adapter-folder serves adapters", folder)
        if quantization:
            num_bytes = sum((folder / name).stat().st_size for name in weight_files(folder))
            _check_memory(num_bytes, kept_share, device)
            return load_folder(folder, config, quantization, dtype, device)
        _check_memory(num_weights(folder) * dtype.itemsize, kept_share, device, 8 * dtype.itemsize)
        return load_dense(folder, config, dtype, device)


def _check_memory(num_bytes: int, kept_share: float, device: torch.device, bits: int | None = None) -> None:
    """Raises `ModelError` if the share of the weights that is kept is larger than the memory that is free, before they
    are read. Numbers of `bits` would be smaller in a quantized checkpoint; of one they stay as they are."""
    free_bytes = free_device_bytes(device)
    if free_bytes is None:
        free_bytes = num_available_memory_bytes()
    kept_bytes = num_bytes * kept_share
    if free_bytes is None or kept_bytes <= free_bytes:
        return
    fitting = [] if bits is None else _fitting_sizes(num_bytes, free_bytes, bits, device)
    hint = f"; what fits: {', '.join(fitting)}" if fitting else ""
    raise ModelError(f"its weights take {kept_bytes:.0f} bytes, and {free_bytes} are free on {device}{hint}")


def _fitting_sizes(num_bytes: int, free_bytes: int, bits: int, device: torch.device) -> list[str]:
    """Returns forms in which weights would fit, and their bytes, in words."""
    sizes = {f"with {fewer} bits": num_bytes * (fewer + SCALE_BITS) / bits for fewer in QUANTIZED_BITS}
    if is_gpu(device):
        sizes |= {f"with tensor_parallel_size={count}, on each GPU": num_bytes / count for count in RANKS}
    return [f"{how} {size:.0f} bytes" for how, size in sizes.items() if size <= FITTING_SHARE * free_bytes]


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
