"""llama.cpp as a process of its own environment: quantizes GGUF files, and computes the logits of prompts.

    python -m inflight.bench.engine.formats.llama_cpp_driver quantize FILE TARGET TYPE
    python -m inflight.bench.engine.formats.llama_cpp_driver logits FILE PROMPTS.json TARGET.npy

The environment has llama-cpp-python and none of the project's packages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from inflight.common.machine import num_usable_cores

FLOAT32 = 0


def quantize(path: str, target: str, kind: str) -> None:
    """Writes a file in which llama.cpp chooses the type of each matrix by the name of a mix, such as `Q4_K_M`."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = num_usable_cores()
    if llama_cpp.llama_model_quantize(path.encode(), target.encode(), params):
        raise RuntimeError(f"llama.cpp cannot quantize {path} to {kind}")


def save_logits(path: str, prompts_path: str, target: str) -> None:
    """Writes logits `[positions, vocabulary]` float32 of the prompts one after the other. The last token of each has
    none, since none follows it."""
    prompts: list[list[int]] = json.loads(Path(prompts_path).read_text(encoding="utf-8"))
    longest = max(map(len, prompts))
    model: Any = llama_cpp.Llama(
        path,
        n_ctx=longest,
        n_batch=longest,
        n_ubatch=longest,
        n_threads=num_usable_cores(),
        n_threads_batch=num_usable_cores(),
        logits_all=True,
        type_k=FLOAT32,
        type_v=FLOAT32,
        verbose=False,
    )
    parts = []
    for prompt in prompts:
        model.reset()
        model.eval(prompt)
        parts.append(np.array(model.scores[: len(prompt) - 1], np.float32))
    np.save(target, np.concatenate(parts))


def main(arguments: Sequence[str]) -> None:
    """Runs one of the two commands."""
    command, *rest = arguments
    {"quantize": quantize, "logits": save_logits}[command](*rest)


if __name__ == "__main__":
    main(sys.argv[1:])
