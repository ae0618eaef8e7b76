"""Sequences and a model for benchmarks of its steps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from inflight.common.machine import num_usable_cores
from inflight.common.model_source import resolve_model
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.sequence import Sampling, Stopping
from inflight.executor.scheduler.sequence import Sequence as TokenSequence

BLOCK_SIZE = 16


def greedy_sequence(token_ids: Sequence[int], block_table: list[int]) -> TokenSequence:
    """Returns a sequence whose prompt is all of these tokens."""
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    prompt, stopping = list(token_ids), Stopping(1, 0, frozenset())
    return TokenSequence("bench", 1, prompt, len(prompt), greedy, stopping, 0, None, block_table=block_table)


def made_up_ids(num_tokens: int) -> list[int]:
    """Token ids that every vocabulary has."""
    return [1 + i % 97 for i in range(num_tokens)]


def cpu_parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """Returns the flags that choose the model, its arithmetic and the instruction set."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="", help="model folder, GGUF file or hub name; default: SmolLM2-135M-Instruct")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: %(default)s")
    add(
        "--weight-dtype",
        default="auto",
        choices=["auto", "quantized", "quantized_a8", "dense", "int8", "int4"],
        help="default: auto",
    )
    add("--rounds", type=int, default=rounds, help="times that each shape is measured; default: %(default)s")
    add("--cpu-isa", default="auto", help="instruction set; default: the best that there is")
    return parser


def load_native_model(options: argparse.Namespace, weight_dtype: str) -> PagedModel | None:
    """Loads the model that the flags of `cpu_parser` name, for every core. Prints why if it has no native forward
    pass."""
    torch.set_num_threads(num_usable_cores())
    model = load_model(
        resolve_model(options.model),
        dtype_name=options.dtype,
        weight_dtype=weight_dtype,
        instructions=options.cpu_isa,
        backend_name="cpu",
    )
    if not isinstance(model.forward, NativeForward):
        print("this model has no forward pass of our own", file=sys.stderr)
        return None
    return model
