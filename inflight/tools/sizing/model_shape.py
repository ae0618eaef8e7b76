"""The properties of a model that decide its memory, read from its configuration without weights or torch.

The number of weights is exact where the files of the weights are there (their headers are read), and else follows from
the configuration as for a decoder of the Llama kind, which is within a few percent for those that executors run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.common.kv_size import kv_heads_of_rank, numbers_of_ranks
from inflight.common.model_files.context_length import context_length_of
from inflight.common.model_files.gguf_architectures import architecture_of, configuration_of
from inflight.common.model_files.gguf_header import GgufHeader, parts_of
from inflight.common.model_files.layer_sizes import LayerSizes
from inflight.common.model_files.recurrent import (
    GATED_DELTA_NETS,
    RecurrentShape,
    lfm2_inner_size,
    recurrent_shape,
)
from inflight.common.model_source import HUB_NAME, ModelError, folder_name, read_gguf, read_json, resolve_model
from inflight.tools.sizing.weights import (
    Role,
    WeightCount,
    Weights,
    computed_weights,
    weights_of_folder,
    weights_of_gguf,
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model. `counted` says whether its weights were counted, or computed from the configuration; `weights` has the
    copy of a tied embedding as well. `sizes` are those of a layer, which adapters have. `num_window_layers` attend to
    the last `sliding_window` tokens, as far as it is known, the others to the whole context. `recurrent` are the layers
    that are not attention."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_length: int | None
    num_parameters: int
    counted: bool
    weights: Weights = ()
    sizes: LayerSizes | None = None
    num_window_layers: int = 0
    sliding_window: int = 0
    recurrent: RecurrentShape | None = None

    @property
    def num_kv_layers(self) -> int:
        """Layers with keys and values."""
        if self.recurrent is None:
            return self.num_layers
        return self.num_layers - self.recurrent.num_layers - self.recurrent.num_feed_forward

    @property
    def has_experts(self) -> bool:
        """Whether its feed-forward layers are experts."""
        return any(weight.role is Role.EXPERT and weight.number for weight in self.weights)

    def numbers_of_ranks(self) -> list[int]:
        """Returns how many ranks can divide the heads between them."""
        num_heads = self.num_kv_heads if self.sizes is None else self.sizes.attention // self.head_dim
        numbers = numbers_of_ranks(num_heads, self.num_kv_heads)
        return [one for one in numbers if self.recurrent is None or not self.recurrent.mixer.indivisible_reason(one)]

    def kv_heads_of_rank(self, num_ranks: int) -> int:
        """Returns the KV heads that each rank has."""
        return kv_heads_of_rank(self.num_kv_heads, num_ranks)


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
        is_one = bool(gguf_files) and set(gguf_files) <= set(parts_of(gguf_files[0]))
        if is_one and not (path / "config.json").is_file():
            return _of_gguf(gguf_files[0], read_gguf(gguf_files[0]))
        return _of_folder(folder_name(path), path / "config.json")
    if path.is_file():
        return _of_folder(folder_name(path.parent), path)
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
    return _of_config(name, config, weights_of_folder(config_file.parent, config))


def _of_config(name: str, config: dict[str, Any], counted: Weights | None) -> ModelShape:
    """Returns the shape by the fields of a configuration; `counted` are the weights of files."""
    if config.get("kv_lora_rank"):
        raise ModelError(f"model {name!r} uses multi-head latent attention, which executors do not run")
    num_heads = _number(config, "num_attention_heads", "n_head")
    hidden_size = _number(config, "hidden_size", "n_embd")
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    num_layers = len(config.get("layers_block_type") or ()) or _number(config, "num_hidden_layers", "n_layer")
    num_experts = int(config.get("num_local_experts") or config.get("num_experts") or 1)
    inner = config.get("moe_intermediate_size") if num_experts > 1 else None
    inner_size = int(inner or _optional(config, "intermediate_size", "n_inner") or 4 * hidden_size)
    recurrent = recurrent_shape(config, num_layers)
    if config.get("model_type") == "lfm2":
        inner_size = lfm2_inner_size(config)
    has_gates = config.get("model_type") in GATED_DELTA_NETS
    mixer = 0 if recurrent is None else recurrent.mixer.depth
    sizes = LayerSizes(hidden_size, num_heads * head_dim, num_kv_heads * head_dim, inner_size, has_gates, mixer)
    weights = counted or computed_weights(config, num_layers, num_experts, _number(config, "vocab_size"), sizes)
    if recurrent is not None and not counted:
        weights = (*weights, WeightCount(Role.MATRIX, recurrent.extra_weights))
    is_tied = bool(config.get("tie_word_embeddings"))
    sliding_window = int(config.get("sliding_window") or 0)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=context_length_of(config),
        num_parameters=_num_parameters(weights, is_tied),
        counted=counted is not None,
        weights=weights,
        sizes=sizes,
        num_window_layers=_window_layers(config, num_layers) if sliding_window else 0,
        sliding_window=sliding_window,
        recurrent=recurrent,
    )


def _of_gguf(path: Path, header: GgufHeader) -> ModelShape:
    kind = header.metadata.get("general.architecture")
    config: dict[str, Any] = {
        name.removeprefix(f"{kind}."): value for name, value in header.metadata.items() if not isinstance(value, tuple)
    }
    rope_scaling = {
        "type": config.get("rope.scaling.type", "linear"),
        "factor": config.get("rope.scaling.factor"),
        "original_max_position_embeddings": config.get("rope.scaling.original_context_length"),
    }
    if (architecture := architecture_of(header)) is not None:
        try:
            fields = configuration_of(header, architecture)
        except KeyError as error:
            raise ModelError(f"GGUF file {path} has no {error.args[0]}") from None
        is_tied = all(tensor.name != "output.weight" for tensor in header.tensors)
        fields |= {"rope_parameters": rope_scaling, "tie_word_embeddings": is_tied}
        return _of_config(path.stem, fields, weights_of_gguf(header))
    num_heads, hidden_size = _number(config, "attention.head_count"), _number(config, "embedding_length")
    num_kv_heads = int(config.get("attention.head_count_kv") or num_heads)
    head_dim = int(config.get("attention.key_length") or hidden_size // num_heads)
    inner_size = _number(config, "feed_forward_length")
    return ModelShape(
        name=path.stem,
        num_layers=_number(config, "block_count"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=context_length_of(
            {
                "model_type": kind,
                "max_position_embeddings": config.get("context_length"),
                "rope_scaling": rope_scaling,
            }
        ),
        num_parameters=header.num_parameters,
        counted=True,
        weights=weights_of_gguf(header),
        sizes=LayerSizes(hidden_size, num_heads * head_dim, num_kv_heads * head_dim, inner_size),
    )


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


def _num_parameters(weights: Weights, is_tied: bool) -> int:
    """Returns the number of weights, those that are tied once."""
    return sum(weight.number for weight in weights if not (is_tied and weight.role is Role.HEAD))


def _number(config: dict[str, Any], *names: str) -> int:
    found = _optional(config, *names)
    if found is None:
        raise ModelError(f"the configuration does not say {names[0]}")
    return found


def _optional(config: dict[str, Any], *names: str) -> int | None:
    return next((int(config[name]) for name in names if config.get(name)), None)
