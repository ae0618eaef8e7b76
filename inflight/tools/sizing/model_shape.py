"""The properties of a model that decide its memory, read from its configuration without weights or torch.

The number of weights is exact where the files of the weights are there (their headers are read), and else follows from
the configuration as for a decoder of the Llama kind, which is within a few percent for those that executors run.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.gguf_header import GgufHeader
from common.model_source import HUB_NAME, ModelError, read_gguf, read_json, resolve_model

_MAX_HEADER_BYTES = 100_000_000
# Tensors of quantized checkpoints: those whose words hold several weights, and those beside the weights.
_PACKED = (".qweight", ".weight_packed")
_SCALES = (".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model. `counted` says whether its weights were counted, or computed from the configuration. `num_window_layers`
    attend to the last `sliding_window` tokens, as far as it is known, the others to the whole context."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_length: int | None
    num_parameters: int
    counted: bool
    num_window_layers: int = 0
    sliding_window: int = 0


def read_model_shape(model: str) -> ModelShape:
    """Reads the shape of a model: a folder, a config.json, a GGUF file, a hub name; `""` is the default model.

    Raises:
        ModelError: there is no such model, or its configuration does not say enough.
    """
    source = resolve_model("") if not model else None
    path = Path(model).expanduser() if source is None else source.gguf_file or source.folder
    if path.is_file() and path.suffix == ".gguf":
        return _of_gguf(path, read_gguf(path))
    if path.is_dir():
        gguf_files = sorted(path.glob("*.gguf"))
        if not (path / "config.json").is_file() and len(gguf_files) == 1:
            return _of_gguf(gguf_files[0], read_gguf(gguf_files[0]))
        return _of_folder(path.resolve().name, path / "config.json")
    if path.is_file():
        return _of_folder(path.resolve().parent.name, path)
    if model.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(model):
        raise ModelError(f"model {model!r}: there is no such folder or file")
    return _of_folder(model, _hub_folder(model) / "config.json")


def _hub_folder(name: str) -> Path:
    """Downloads the configuration alone: weights are large, and are counted only if they are on disk already."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json"]))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"model {name!r} is not here, and the Hugging Face hub does not give it: {reason}") from None


def _of_folder(name: str, config_file: Path) -> ModelShape:
    if not config_file.is_file():
        raise ModelError(f"{config_file.parent} is not a model folder: it has no config.json")
    config = read_json(config_file)
    config = {**config, **config.get("text_config", {})}
    if config.get("kv_lora_rank"):
        raise ModelError(f"model {name!r} uses multi-head latent attention, which executors do not run")
    num_heads = _number(config, "num_attention_heads", "n_head")
    hidden_size = _number(config, "hidden_size", "n_embd")
    counted = _count_weights(config_file.parent, _codes_per_word(config))
    num_layers = _number(config, "num_hidden_layers", "n_layer")
    sliding_window = int(config.get("sliding_window") or 0)
    shape = ModelShape(
        name=name,
        num_layers=num_layers,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        context_length=_optional(config, "max_position_embeddings", "n_positions"),
        num_parameters=counted or 0,
        counted=counted is not None,
        num_window_layers=_window_layers(config, num_layers) if sliding_window else 0,
        sliding_window=sliding_window,
    )
    if counted is not None:
        return shape
    return _with_parameters(shape, _computed_parameters(config, shape, hidden_size, num_heads))


def _of_gguf(path: Path, header: GgufHeader) -> ModelShape:
    kind = header.metadata.get("general.architecture")
    config = {name.removeprefix(f"{kind}."): value for name, value in header.metadata.items()}
    num_heads = _number(config, "attention.head_count")
    return ModelShape(
        name=path.stem,
        num_layers=_number(config, "block_count"),
        num_kv_heads=int(config.get("attention.head_count_kv") or num_heads),
        head_dim=int(config.get("attention.key_length") or _number(config, "embedding_length") // num_heads),
        context_length=_optional(config, "context_length"),
        num_parameters=header.num_parameters,
        counted=True,
    )


def _with_parameters(shape: ModelShape, num_parameters: int) -> ModelShape:
    return replace(shape, num_parameters=num_parameters)


def _window_layers(config: dict[str, Any], num_layers: int) -> int:
    """Returns the layers with a sliding window. Where the configuration has no list, those of transformers."""
    if layer_types := config.get("layer_types"):
        return sum(layer_type == "sliding_attention" for layer_type in layer_types[:num_layers])
    kind = config.get("model_type")
    if kind in ("mistral", "mixtral", "phi3"):
        return num_layers
    if kind == "gemma2":
        return (num_layers + 1) // 2
    if kind == "gemma3_text":
        return num_layers - num_layers // int(config.get("sliding_window_pattern") or 6)
    return 0


def _computed_parameters(config: dict[str, Any], shape: ModelShape, hidden_size: int, num_heads: int) -> int:
    """Returns the parameters: embeddings, and for each layer attention, a gated feed-forward (of each expert) and two
    norms."""
    num_experts = int(config.get("num_local_experts") or config.get("num_experts") or 1)
    inner = config.get("moe_intermediate_size") if num_experts > 1 else None
    inner_size = int(inner or _number(config, "intermediate_size", "n_inner"))
    attention = hidden_size * shape.head_dim * 2 * (num_heads + shape.num_kv_heads)
    feed_forward = num_experts * 3 * hidden_size * inner_size + (hidden_size * num_experts if num_experts > 1 else 0)
    embeddings = _number(config, "vocab_size") * hidden_size * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + hidden_size + shape.num_layers * (attention + feed_forward + 2 * hidden_size)


def _codes_per_word(config: dict[str, Any]) -> int:
    """Returns how many weights of a quantized checkpoint are in a word of 32 bits."""
    quantization = config.get("quantization_config") or {}
    groups = [*(quantization.get("config_groups") or {}).values()]
    bits = groups[0]["weights"].get("num_bits", 8) if groups else quantization.get("bits", 8)
    return 32 // max(1, int(bits))


def _count_weights(folder: Path, codes_per_word: int) -> int | None:
    """Returns the parameters by the headers of the safetensors files; None if one or all are missing."""
    index = read_json(folder / "model.safetensors.index.json")
    names = sorted(set(index.get("weight_map", {}).values())) or [path.name for path in folder.glob("*.safetensors")]
    if not names or not all((folder / name).is_file() for name in names):
        return None
    return sum(_count_file(folder / name, codes_per_word) for name in names)


def _count_file(path: Path, codes_per_word: int) -> int:
    """Reads a safetensors header: its length (8 bytes, little endian), the header (JSON); tensors follow."""
    try:
        with path.open("rb") as file:
            num_bytes = struct.unpack("<Q", file.read(8))[0]
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(num_bytes)
            header = json.loads(file.read(num_bytes))
        return sum(
            math.prod(tensor["shape"]) * (codes_per_word if name.endswith(_PACKED) else 1)
            for name, tensor in header.items()
            if name != "__metadata__" and not name.endswith(_SCALES)
        )
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        raise ModelError(f"weight file {path} has a damaged header") from None


def _number(config: dict[str, Any], *names: str) -> int:
    found = _optional(config, *names)
    if found is None:
        raise ModelError(f"the configuration does not say {names[0]}")
    return found


def _optional(config: dict[str, Any], *names: str) -> int | None:
    return next((int(config[name]) for name in names if config.get(name)), None)
