"""Imports from a GGUF file to the disk cache, each done once: its configuration, and for a file that cannot be read
directly (`inflight.executor.formats.gguf_file`) the whole model, as a Hugging Face folder.

Weights are stored as float32. A dequantised weight is a product and sum of half-precision numbers (Q4_1: `d * q + m`),
so neither float16 nor bfloat16 holds it exactly: of SmolLM2's 272 tensors 211 change in float16. From float32 every
dtype can be made by one rounding, and a float32 run is exactly the dequantised model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_gguf_pytorch_utils as legacy_loader
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PretrainedConfig
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
from transformers.integrations.gguf.reader import read_gguf_metadata

from inflight.common.disk_cache import build_once
from inflight.common.model_files.gguf_architectures import Architecture, architecture_of, configuration_of
from inflight.common.model_files.gguf_header import GgufHeader, join_parts, parts_of
from inflight.common.model_source import ModelError, ModelSource, import_tokenizer, model_errors, read_gguf
from inflight.executor.checkpoint.gguf_metadata import ROPE_TENSORS, apply_metadata
from inflight.executor.checkpoint.quiet import quiet_transformers
from inflight.executor.checkpoint.support import ignore_padding

# llama.cpp ends generation at any of these (end of sequence, of turn, of a tool call).
EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
}
# Sampling that a model's authors recommend, by `general.basename`, for chat models whose file has no sampling fields.
RECOMMENDED_SAMPLING: dict[str, dict[str, Any]] = {
    # The model card of HuggingFaceTB/SmolLM2-135M-Instruct ("How to use") generates with these values.
    "smollm2": {"do_sample": True, "temperature": 0.2, "top_p": 0.9},
}


def import_gguf(source: ModelSource) -> Path:
    """Returns the complete Hugging Face folder of a GGUF model, converting the file if necessary."""
    assert source.gguf_file is not None
    tokenizer_folder = import_tokenizer(source)
    with model_errors(f"GGUF file {source.gguf_file} cannot be imported"):
        return build_once(source.import_folder / "model", lambda folder: _write_model(source, tokenizer_folder, folder))


def import_configuration(source: ModelSource) -> Path:
    """Returns the folder with the configuration of a GGUF model and its defaults of generation, without weights."""
    assert source.gguf_file is not None
    import_tokenizer(source)
    with model_errors(f"GGUF file {source.gguf_file} cannot be imported"):
        return build_once(source.import_folder / "config", lambda folder: _write_configuration(source, folder))


def _write_configuration(source: ModelSource, folder: Path) -> None:
    assert source.gguf_file is not None
    header = read_gguf(source.gguf_file)
    architecture = architecture_of(header)
    with quiet_transformers():
        if architecture is None:
            config = AutoConfig.from_pretrained(
                str(source.folder), gguf_file=source.gguf_file.name, trust_remote_code=False
            )
        else:
            config = AutoConfig.for_model(**_fields_of(header, architecture))
    apply_metadata(config, header)
    ignore_padding(config)
    config.save_pretrained(str(folder))
    _write_generation_config(source.gguf_file, folder)


def _fields_of(header: GgufHeader, architecture: Architecture) -> dict[str, Any]:
    try:
        return configuration_of(header, architecture)
    except KeyError as error:
        raise ModelError(f"the file has no {error.args[0]}") from None


def _write_model(source: ModelSource, tokenizer_folder: Path, folder: Path) -> None:
    assert source.gguf_file is not None
    with quiet_transformers(), _quiet_dequantization(), _whole_file(source.gguf_file, folder) as file:
        config = AutoConfig.from_pretrained(str(import_configuration(source)))
        _check_tensors(config, read_gguf(source.gguf_file))
        # By default transformers keeps GGUF blocks packed and multiplies with its own kernels; the native forward
        # passes need plain `nn.Linear`s.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            config=config,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
            output_loading_info=True,
        )
        if missing := sorted(loaded[1]["missing_keys"]):
            raise ModelError(f"GGUF file {source.gguf_file} lacks {len(missing)} weights, such as {missing[0]}")
        loaded[0].save_pretrained(str(folder))
    _write_generation_config(source.gguf_file, folder)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    for path in folder.iterdir():
        # safetensors makes files readable by their owner only; an image is built and run by different users.
        path.chmod(0o644)


def _check_tensors(config: PretrainedConfig, header: GgufHeader) -> None:
    """Raises `ModelError` for a tensor without a place in the network. transformers would leave it out."""
    if header.architecture in GGUF_ARCHS:
        return  # refused by its configuration; these have no table of names
    with init_empty_weights(include_buffers=False):
        network = AutoModelForCausalLM.from_config(config)
    processor: Any = legacy_loader.TENSOR_PROCESSORS.get(header.architecture, legacy_loader.TensorProcessor)
    # GPT-2's processor puts this one in its place itself.
    placed = {*legacy_loader.get_gguf_hf_weights_map(network, processor(config=config.to_dict())), "output.weight"}
    for tensor in header.tensors:
        if tensor.name not in placed and tensor.name not in ROPE_TENSORS:
            raise ModelError(
                f"GGUF tensor {tensor.name} has no place in a model of the architecture {header.architecture}"
            )


@contextmanager
def _whole_file(path: Path, folder: Path) -> Iterator[Path]:
    """Gives a file with all tensors, which transformers needs. That of several parts is removed at the end."""
    if len(parts_of(path)) == 1:
        yield path
        return
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole.gguf"
    try:
        join_parts(read_gguf(path), whole)
        yield whole
    finally:
        whole.unlink(missing_ok=True)


def _write_generation_config(gguf_file: Path, folder: Path) -> None:
    metadata, _ = read_gguf_metadata(str(gguf_file))
    (folder / "generation_config.json").write_text(json.dumps(_generation_config(metadata), indent=2))


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    eos_token_ids = [int(metadata[key]) for key in EOS_KEYS if key in metadata]
    sampling = {name: metadata[key] for name, key in SAMPLING_KEYS.items() if key in metadata}
    return {"eos_token_id": list(dict.fromkeys(eos_token_ids)), **(sampling or _recommended_sampling(metadata))}


def _recommended_sampling(metadata: dict[str, Any]) -> dict[str, Any]:
    is_chat_model = "tokenizer.chat_template" in metadata
    return RECOMMENDED_SAMPLING.get(str(metadata.get("general.basename", "")).lower(), {}) if is_chat_model else {}


@contextmanager
def _quiet_dequantization() -> Iterator[None]:
    """Hides the progress bar of the older GGUF loader, which no switch of transformers turns off."""
    shown = vars(legacy_loader)["tqdm"]
    vars(legacy_loader)["tqdm"] = lambda iterable, **_: iterable
    try:
        yield
    finally:
        vars(legacy_loader)["tqdm"] = shown
