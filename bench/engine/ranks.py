"""The speed of ranks on one machine: `python -m inflight.bench.engine.ranks [--model FOLDER --ranks 3]`.

Loads a model twice, with one rank that has a thread for each rank of the other, and with several ranks of one thread
each, which exchange through shared memory. Both compute the same greedy steps in turn, so that a disturbance affects
both; a ratio is the median of those of the rounds. Prints Markdown. Without `--model` the model has the sizes of
SmolLM2-135M and random weights, but 8 heads and 4 KV heads, which two ranks can divide: SmolLM2 has 9 and 3.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from inflight.bench.engine.model_steps import BLOCK_SIZE
from inflight.bench.engine.native_step import StepShape, batch_of, blocks_of
from inflight.bench.report.table import Table
from inflight.cli.doctor import processor
from inflight.executor.loader import Loaded, load_executor
from inflight.executor.scheduler.sequence import Sampling
from inflight.executor.settings import ExecutorSettings
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling import SampleRow
from inflight.executor.step.sampling_columns import SamplingBatch

SHAPES = (StepShape(1, 1, 300), StepShape(8, 1, 300), StepShape(32, 1, 300), StepShape(2, 256, 256))
SIZES: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def save_random_model(folder: Path) -> Path:
    """Makes a folder with a model of `SIZES`."""
    torch.manual_seed(0)
    network: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    network.to(torch.bfloat16).save_pretrained(str(folder))
    return folder


def compute(one: Loaded, batch: StepBatch) -> None:
    """Computes a greedy step."""
    rows = [SampleRow(Sampling(0.0, 0, 1.0, 0), 0, frozenset())] * batch.logit_rows.shape[0]
    one.model.forward.greedy(batch, one.model.kv, SamplingBatch.of(rows))


def measure(whole: Loaded, divided: Loaded, rounds: int) -> Table:
    """Returns the time of each shape with one rank and with several."""
    rows = []
    for shape in SHAPES:
        batch = batch_of(shape)
        times_s = np.zeros((rounds + 1, 2))
        for measured in times_s:
            for i, one in enumerate((whole, divided)):
                began = time.perf_counter()
                compute(one, batch)
                measured[i] = time.perf_counter() - began
        medians_s = np.median(times_s[1:], axis=0).tolist()
        ratio = float(np.median(times_s[1:, 0] / times_s[1:, 1]))
        rates = [f"{shape.num_sequences * shape.num_new / median_s:,.0f}" for median_s in medians_s]
        rows.append([str(shape), *(f"{median_s * 1e3:.2f}" for median_s in medians_s), *rates, f"{ratio:.2f}"])
    columns = ["ms, one rank", "ms, ranks", "tokens/s, one rank", "tokens/s, ranks", "ratio"]
    return Table(["step", *columns], rows)


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="", help="model folder; default: random weights")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: %(default)s")
    add("--ranks", type=int, default=2, help="default: %(default)s")
    add("--rounds", type=int, default=30, help="times that each shape is measured; default: %(default)s")
    options = parser.parse_args(argv)
    num_blocks = max(shape.num_sequences * blocks_of(shape) for shape in SHAPES)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as groups:
        settings: dict[str, Any] = {
            "insecure": True,
            "device": "cpu",
            "model": options.model or str(save_random_model(Path(folder))),
            "dtype": options.dtype,
            "max_tokens_in_paged_kv_cache": num_blocks * BLOCK_SIZE,
            "tensor_parallel_timeout_s": 60,
        }
        whole = load_executor(ExecutorSettings(**settings, num_threads=options.ranks))
        divided = load_executor(ExecutorSettings(**settings, num_threads=1, tensor_parallel_size=options.ranks))
        assert divided.group is not None
        groups.callback(divided.group.close)
        print(f"- {processor().text}")
        print(f"- {options.dtype}, {options.ranks} ranks of one thread each, and one rank of {options.ranks} threads\n")
        print(measure(whole, divided, options.rounds).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
