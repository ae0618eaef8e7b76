"""The default model in `transformers`: the oracle for the whole stack."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.gguf import import_gguf


def load_reference() -> PreTrainedModel:
    """The default model in float32, with the attention of `transformers`."""
    source = resolve_model("")
    model = AutoModelForCausalLM.from_pretrained(import_gguf(source), dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model
