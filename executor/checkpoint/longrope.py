"""Choice between the two sets of factors of a longrope rotary embedding (Phi-3 and Phi-4-mini with long contexts).

transformers chooses for each forward pass, by the longest sequence in it. Then a token's keys would depend on the other
sequences of its batch, and those of a growing sequence would have to be computed again once it is longer than the
original context. So an executor chooses once, by the longest sequence that it accepts, as vLLM does: short factors up
to the original context, long factors above. The attention factor is the same for both sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inflight.common.model_source import ModelError

LONGROPE = "longrope"
FACTORS = ("short_factor", "long_factor")


def longrope_obstacles(config: PretrainedConfig) -> Iterator[str]:
    """Yields what is wrong with the longrope parameters of a configuration."""
    parameters: Any = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    if any(isinstance(value, dict) and value.get("rope_type") == LONGROPE for value in parameters.values()):
        yield "its longrope parameters differ between layer types"
    if parameters.get("rope_type") != LONGROPE:
        return
    original: Any = parameters.get("original_max_position_embeddings")
    if not isinstance(original, int) or original < 2:
        yield f"original_max_position_embeddings of its longrope parameters is {original!r}, not a number of tokens"
    num_factors = _rotary_dim(config, parameters) // 2
    for name in FACTORS:
        factors: Any = parameters.get(name)
        if not isinstance(factors, list) or not all(isinstance(factor, int | float) for factor in factors):
            yield f"{name} of its longrope parameters is not a list of numbers"
        elif len(factors) != num_factors:
            yield f"{name} of its longrope parameters has {len(factors)} numbers, not {num_factors}"
        elif not all(factor > 0 for factor in factors):
            yield f"{name} of its longrope parameters has a number that is not positive"


def fix_longrope(network: nn.Module, context_length: int) -> str | None:
    """Makes the rotary embeddings of a network use the factors for sequences of up to `context_length` tokens, whatever
    a forward pass contains. Returns the choice in words; None if there is none."""
    choice = None
    for module in network.modules():
        rotary: Any = module
        if getattr(rotary, "rope_type", None) != LONGROPE:
            continue
        config: Any = rotary.config
        original = int(config.rope_parameters["original_max_position_embeddings"])
        frequencies, scaling = ROPE_INIT_FUNCTIONS[LONGROPE](config, rotary.inv_freq.device, seq_len=context_length)
        if len(frequencies) != len(rotary.inv_freq):
            raise ModelError(f"longrope has {len(frequencies)} frequencies, not {len(rotary.inv_freq)}")
        rotary.inv_freq = frequencies
        rotary.attention_scaling = scaling
        # Another type than longrope: transformers must not choose again.
        rotary.rope_type = "default"
        if config.rope_parameters["short_factor"] == config.rope_parameters["long_factor"]:
            continue
        name = FACTORS[context_length > original]
        choice = f"{name} for contexts of {context_length} tokens; the original context is {original}"
    return choice


def _rotary_dim(config: PretrainedConfig, parameters: dict[str, Any]) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))
