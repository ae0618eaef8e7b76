"""Logits of GGUF files compared with two references: llama.cpp, and transformers with the numbers of `gguf`.

llama.cpp rounds the inputs of quantized matrices to 8 bits, so its logits are close to ours and not equal. transformers
computes in float32 with the matrices that the package `gguf` dequantizes, and our forward pass in float32 is compared
with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from inflight.bench.engine.formats import llama_cpp
from inflight.bench.engine.quality import agreement_with, perplexity
from inflight.bench.engine.teacher_forcing import paged_logits, predictions
from inflight.bench.report.table import Table
from inflight.common.model_source import resolve_model
from inflight.executor.model.loader import load_model

COLUMNS = (
    "file",
    "types of its matrices",
    "MB of matrices",
    "perplexity, llama.cpp",
    "perplexity, float32",
    "agreement with llama.cpp",
    "logits: median difference from llama.cpp",
    "largest",
    "largest from transformers",
)


def comparison(files: Mapping[str, Path], prompts: Sequence[Sequence[int]], chunk_tokens: int, folder: Path) -> Table:
    """Returns a row for each file."""
    following = [token_id for prompt in prompts for token_id in prompt[1:]]
    rows = []
    for name, path in files.items():
        theirs = torch.from_numpy(llama_cpp.logits(path, prompts, folder))
        source = resolve_model(str(path))
        ours = paged_logits(load_model(source, dtype_name="float32", backend_name="cpu"), prompts, chunk_tokens).float()
        dense = _dequantized_logits(path, prompts)
        reference, found = predictions(theirs, following), predictions(ours, following)
        figures = agreement_with(reference, found)
        differences = (ours - theirs).abs()
        kinds, num_bytes = _matrices(path)
        rows.append(
            [
                name,
                kinds,
                f"{num_bytes / 1e6:.1f}",
                f"{perplexity(reference.log_probabilities):.3f}",
                f"{figures.perplexity:.3f}",
                f"{figures.share_equal:.1%}",
                f"{differences.median():.1e}",
                f"{differences.max():.1e}",
                f"{(ours - dense).abs().max():.1e}",
            ]
        )
    return Table(COLUMNS, rows)


def _dequantized_logits(path: Path, prompts: Sequence[Sequence[int]]) -> Tensor:
    network: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        parts = [network(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1] for prompt in prompts]
    return torch.cat(parts)


def _matrices(path: Path) -> tuple[str, int]:
    """Returns the types of a file's matrices with their numbers, and the bytes of all."""
    matrices = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) == 2]
    kinds, counts = np.unique([tensor.tensor_type.name for tensor in matrices], return_counts=True)
    in_words = ", ".join(f"{count} {kind}" for kind, count in zip(kinds, counts, strict=True))
    return in_words, sum(int(tensor.n_bytes) for tensor in matrices)
