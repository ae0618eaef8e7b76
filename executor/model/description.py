"""Properties of a loaded model, from its configuration and from how it was loaded."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from inflight.common.machine import num_available_memory_bytes
from inflight.common.model_files.context_length import context_length_of
from inflight.common.model_source import ModelError, ModelSource
from inflight.common.version import installed_version
from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.checkpoint.files import GenerationDefaults, read_generation_defaults
from inflight.executor.parallel.member import Hello


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Properties of a model. Defaults of sampling are None where its generation config has none.

    `weight_dtype` is the type of the layers' weights: that of the model, `quantized` as in the checkpoint,
    `quantized_a8`, `int8`, `int4` or `fp8`. `backend_reason` says why its attention backend was chosen.
    `same_on_all_ranks` are properties, by name, in which the ranks of an executor must agree; there are none without
    other ranks.
    """

    revision: str
    vocabulary_size: int
    context_length: int
    defaults: GenerationDefaults
    dtype: str
    weight_dtype: str
    kv_cache_dtype: str
    backend_reason: str
    same_on_all_ranks: Mapping[str, str]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an output."""
        return self.defaults.eos_token_ids

    def hello(self, rank: int) -> Hello:
        """Returns what a rank with this model tells the others of itself."""
        same = {
            "version": installed_version(),
            "dtype": self.dtype,
            "weight dtype": self.weight_dtype,
            "KV cache dtype": self.kv_cache_dtype,
            **self.same_on_all_ranks,
        }
        return Hello(rank, same, socket.gethostname(), num_available_memory_bytes() or 0)


def describe(
    source: ModelSource,
    network: PreTrainedModel,
    layout: KvLayout,
    defaults: GenerationDefaults,
    weight_dtype: str,
    backend_reason: str,
    same_on_all_ranks: Mapping[str, str],
) -> ModelDescription:
    """Returns the properties of a model whose weights have been loaded as `weight_dtype` says."""
    dtype = str(layout.dtype).removeprefix("torch.")
    return ModelDescription(
        revision=source.revision,
        vocabulary_size=read_vocabulary_size(network),
        context_length=read_context_length(network),
        defaults=defaults,
        dtype=dtype,
        weight_dtype=dtype if weight_dtype in ("auto", "dense") else weight_dtype,
        kv_cache_dtype=layout.dtype_name,
        backend_reason=backend_reason,
        same_on_all_ranks=same_on_all_ranks,
    )


def read_context_length(network: PreTrainedModel) -> int:
    """Returns the context length that the configuration gives."""
    context_length = context_length_of(network.config.get_text_config(decoder=True).to_dict())
    if context_length is None:
        raise ModelError("its configuration has no context length")
    return context_length


def read_defaults(folder: Path, vocabulary_size: int, end_ids: tuple[int, ...]) -> GenerationDefaults:
    """Returns the defaults of sampling of the files in the model's folder."""
    defaults = read_generation_defaults(folder, end_ids)
    highest = max((max(ids) for ids in defaults.bad_word_ids), default=0)
    if highest >= vocabulary_size:
        raise ModelError(f"generation_config.json: bad_words_ids has token id {highest} of {vocabulary_size}")
    return defaults


def read_vocabulary_size(network: PreTrainedModel) -> int:
    """Returns the number of ids that the model can both read and write."""
    modules: Any = (network.get_input_embeddings(), network.get_output_embeddings())
    return min(int(module.weight.shape[0]) for module in modules)
