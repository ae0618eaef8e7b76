"""Metadata of GGUF files as fields of a configuration of transformers.

transformers' own import leaves out what changes the rotary embedding, the scale of attention and other sizes, without
an error. Here every such key is applied as llama.cpp computes with it, or refused by its name. Factors of rotary
frequencies are tensors of the file; a configuration has them as factors of longrope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PretrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from inflight.common.model_files.gguf_architectures import SIZES, architecture_of
from inflight.common.model_files.gguf_header import GgufHeader, GgufTensor, Value
from inflight.common.model_source import ModelError

# Tensors that divide the frequencies of the rotary embedding (Llama 3.1 and later; Phi-3 and Phi-4-mini).
ROPE_DIVISORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = frozenset({ROPE_DIVISORS, SHORT_FACTORS, LONG_FACTORS})
# Keys below the architecture that are fields of a configuration and that transformers does not read for all of them.
FIELDS = {
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Keys that are not applied to some or all architectures, and their values that change nothing.
NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "swiglu_clamp_exp": (0.0,),
}
# Keys that are read here, besides `FIELDS`.
_READ = frozenset(
    {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.value_length",
        "context_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
# Keys of the tokenizer that are read, by `inflight.common.model_source`, `inflight.executor.checkpoint.gguf` or
# transformers.
_TOKENIZER_KEYS = frozenset(
    f"tokenizer.{name}"
    for name in (
        *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.scores", "ggml.token_type", "ggml.merges", "chat_template"),
        *(f"ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")),
        *("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix"),
    )
)
# Keys that say where a file comes from and how it was made.
_DESCRIPTIVE = ("general.", "quantize.", "split.")
# Names of architectures that transformers spells otherwise.
_MAPPINGS = {"gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
# Layers of the models whose scale of attention follows from the width of the model instead of a head's.
_WIDE_SCALE_LAYERS = {"gemma2": 46, "gemma3": 62}
# Architectures whose sliding window transformers applies as it is in the file.
_WINDOWED = frozenset({"gemma2", "gemma3", "phi3"})
_PARTIAL_ROTARY = frozenset({"phi3", "stablelm", "nemotron", "glm4moe", "qwen3next", "qwen35", "qwen35moe"})


def apply_metadata(config: PretrainedConfig, header: GgufHeader) -> None:
    """Changes a configuration, as transformers imports it, to what llama.cpp computes. Raises `ModelError` for a key
    that cannot be applied."""
    keys = _Keys(header)
    fields: Any = config
    fields.tie_word_embeddings = all(tensor.name != "output.weight" for tensor in header.tensors)
    for key, field in FIELDS.items():
        if key not in keys.mapping and (value := keys.get(key)) is not None and hasattr(config, field):
            setattr(config, field, value)
            keys.applied.add(key)
    _set_window(fields, keys)
    if header.architecture in _WIDE_SCALE_LAYERS:
        is_wide = keys.get("block_count") == _WIDE_SCALE_LAYERS[header.architecture]
        fields.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_wide else fields.head_dim
    if getattr(config, "rope_parameters", None):
        _set_rope(fields, keys, header)
    keys.check_rest()


def unused_keys(header: GgufHeader) -> list[str]:
    """Returns the keys that no part of the import reads, without those that only describe the file."""
    keys = _Keys(header)
    used = keys.mapping.keys() | FIELDS.keys() | NEUTRAL.keys() | _READ
    used |= set() if keys.own is None else keys.own.applied.keys()
    return sorted(
        key
        for key in header.metadata
        if key not in _TOKENIZER_KEYS and not key.startswith(_DESCRIPTIVE) and key.removeprefix(keys.prefix) not in used
    )


class _Keys:
    """The metadata below the architecture's name, and which of it was applied."""

    def __init__(self, header: GgufHeader) -> None:
        self.architecture = header.architecture
        self.prefix = f"{header.architecture}."
        self._metadata = header.metadata
        name = _MAPPINGS.get(header.architecture, header.architecture)
        # The fields that transformers sets.
        mapping: Any = GGUF_CONFIG_MAPPING.get(name, {})
        self.own = architecture_of(header)
        if self.own is not None:
            mapping = {**SIZES, **self.own.fields}
        self.mapping: Mapping[str, str] = {key: field for key, field in mapping.items() if field is not None}
        self.applied = set(self.mapping)

    def get(self, key: str) -> Any:
        return self._metadata.get(self.prefix + key)

    def refuse(self, key: str, reason: str = "is not supported") -> ModelError:
        """Returns the error about a key."""
        return ModelError(f"GGUF key {self.prefix}{key} = {self.get(key)} {reason}")

    def check_rest(self) -> None:
        """Raises `ModelError` for a key that was not applied and has a value that changes something."""
        for key, values in ({} if self.own is None else self.own.applied).items():
            if values and self.get(key) not in (None, *values):
                raise self.refuse(key)
            self.applied.add(key)
        for key, neutral in NEUTRAL.items():
            value = self.get(key)
            if key not in self.applied and value is not None and value not in neutral:
                raise self.refuse(key)


def _set_window(config: Any, keys: _Keys) -> None:
    window, pattern = keys.get("attention.sliding_window"), keys.get("attention.sliding_window_pattern")
    if keys.architecture in _WINDOWED:
        config.sliding_window = window or None
    elif config.model_type == "mistral":
        # The default of transformers is a window, and the files of llama.cpp have none.
        config.sliding_window = None
    is_applied = keys.architecture in _WINDOWED or "attention.sliding_window" in keys.mapping
    if window and not is_applied and window < (keys.get("context_length") or math.inf):
        raise keys.refuse("attention.sliding_window")
    if pattern is None:
        return
    if keys.architecture not in ("gemma2", "gemma3"):
        raise keys.refuse("attention.sliding_window_pattern")
    num_layers = config.num_hidden_layers
    # A list says of each layer whether it has a window; a number n, that each n-th layer has none.
    windowed = pattern if isinstance(pattern, tuple) else [(i + 1) % pattern != 0 for i in range(num_layers)]
    if len(windowed) != num_layers:
        raise keys.refuse("attention.sliding_window_pattern", f"is not a list of {num_layers} layers")
    config.layer_types = ["sliding_attention" if one else "full_attention" for one in windowed]


def _set_rope(config: Any, keys: _Keys, header: GgufHeader) -> None:
    """Sets the rotary embedding, of the layers without a window if that of others is another one."""
    rope: dict[str, Any] = config.rope_parameters
    if "full_attention" in rope:
        rope["sliding_attention"]["rope_theta"] = keys.get("rope.freq_base_swa") or 10000.0
        rope = rope["full_attention"]
    elif (swa := keys.get("rope.freq_base_swa")) and swa != keys.get("rope.freq_base"):
        raise keys.refuse("rope.freq_base_swa")
    if theta := keys.get("rope.freq_base"):
        rope["rope_theta"] = theta
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (length := keys.get("attention.key_length")) not in (None, head_dim):
        raise keys.refuse("attention.key_length", f"is not supported beside heads of {head_dim}: {length}")
    if keys.get("attention.value_length") not in (None, head_dim):
        raise keys.refuse("attention.value_length", f"differs from the length of keys, {head_dim}")
    rotated = keys.get("rope.dimension_count") or head_dim
    if rotated != head_dim and keys.architecture in _PARTIAL_ROTARY:
        config.partial_rotary_factor = rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim and keys.mapping.get("rope.dimension_count") != "rotary_dim":
        raise keys.refuse("rope.dimension_count", f"is not supported with heads of {head_dim}")
    scaling = _scaling(keys, {tensor.name: tensor for tensor in header.tensors if tensor.name in ROPE_TENSORS})
    rope.update(scaling)
    if "original_max_position_embeddings" in scaling and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = scaling["original_max_position_embeddings"]


def _scaling(keys: _Keys, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Returns the rotary parameters that scale frequencies."""
    # Without a type, the factor is that of linear scaling.
    kind = keys.get("rope.scaling.type") or "linear"
    factor = float(keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0)
    attention_factor = float(keys.get("rope.scaling.attn_factor") or 1.0)
    original = keys.get("rope.scaling.original_context_length") or keys.get("context_length")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.refuse("rope.scaling.type")
    if kind == "none":
        factor = 1.0
    if kind == "longrope" and not tensors:
        raise keys.refuse("rope.scaling.type", "needs the tensors rope_factors_short and rope_factors_long")
    if tensors:
        if kind == "yarn":
            raise keys.refuse("rope.scaling.type", f"is not supported beside the tensor {min(tensors)}")
        # Only linear scaling has a factor beside those of the tensors; that of longrope is for the context's length.
        times = 1.0 if kind == "longrope" else factor
        return {
            "rope_type": "longrope",
            # The attention factor does not follow from this.
            "factor": 1.0,
            "short_factor": _factors(tensors, SHORT_FACTORS, times),
            "long_factor": _factors(tensors, LONG_FACTORS, times),
            "attention_factor": attention_factor,
            "original_max_position_embeddings": original,
        }
    if kind == "yarn" and factor != 1.0:
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": (0.1 * math.log(factor) + 1.0) * attention_factor,
            "beta_fast": float(keys.get("rope.scaling.yarn_beta_fast") or 32.0),
            "beta_slow": float(keys.get("rope.scaling.yarn_beta_slow") or 1.0),
        }
    if attention_factor != 1.0:
        raise keys.refuse("rope.scaling.attn_factor", f"is not supported with rope.scaling.type {kind}")
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _factors(tensors: Mapping[str, GgufTensor], name: str, times: float) -> list[float]:
    """Returns the divisors of frequencies in a tensor, or in the one that is for all lengths of a context."""
    tensor = tensors.get(ROPE_DIVISORS) or tensors.get(name)
    if tensor is None:
        raise ModelError(f"GGUF tensor {name} is missing beside {min(tensors)}")
    if tensor.type_number != 0 or len(tensor.shape) != 1:
        raise ModelError(f"GGUF tensor {tensor.name} is not a vector of float32")
    numbers = np.fromfile(tensor.file, "<f4", tensor.shape[0], offset=tensor.start)
    return [float(number) * times for number in numbers]
