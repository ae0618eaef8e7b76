"""Common parts of the benchmarks of a model's steps: their sequences and their flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inflight.common.machine import num_usable_cores
from inflight.common.model_source import ModelSource, resolve_model
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


def model_parser(doc: str | None, dtypes: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """Returns the flags that choose the model and its arithmetic. The first dtype is the default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="", help="model folder, GGUF file or hub name; default: SmolLM2-135M-Instruct")
    add("--dtype", default=dtypes[0], choices=dtypes, help="default: %(default)s")
    add("--weight-dtype", default="auto", choices=["auto", "dense", "int8", "int4"], help="default: auto")
    add("--rounds", type=int, default=rounds, help="times that each shape is measured; default: %(default)s")
    return parser


def cpu_parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """Returns the flags of `model_parser` and the instruction set, for steps on a CPU."""
    parser = model_parser(doc, ["bfloat16", "float32"], rounds)
    parser.add_argument("--cpu-isa", default="auto", help="instruction set; default: the best that there is")
    return parser


def load_native_model(
    options: argparse.Namespace, instructions: str = "auto", weight_dtype: str = ""
) -> PagedModel | None:
    """Loads the model that the flags of `model_parser` name, for every core, with weights of their type or another.

    Prints why if it has no native forward pass.
    """
    arguments = {
        "dtype_name": options.dtype,
        "weight_dtype": weight_dtype or options.weight_dtype,
        "instructions": instructions,
    }
    models = load_native_models([(resolve_model(options.model), arguments)])
    return None if models is None else models[0]


def load_variants(
    options: argparse.Namespace, variants: Sequence[Mapping[str, Any]], num_blocks: int
) -> list[PagedModel] | None:
    """Loads the model that the flags of `cpu_parser` name once for each variant of its arguments, with a KV pool.

    Prints why if it has no native forward pass.
    """
    arguments = {
        "dtype_name": options.dtype,
        "weight_dtype": options.weight_dtype,
        "instructions": options.cpu_isa,
    }
    source = resolve_model(options.model)
    models = load_native_models([(source, {**arguments, **variant}) for variant in variants])
    for model in models or ():
        allocate_kv(model, num_blocks)
    return models


def load_native_models(variants: Sequence[tuple[ModelSource, Mapping[str, Any]]]) -> list[PagedModel] | None:
    """Loads models for every core, each with arguments of `load_model`. Prints why if one has no native forward
    pass."""
    torch.set_num_threads(num_usable_cores())
    models = [load_model(source, **{"backend_name": "cpu", **arguments}) for source, arguments in variants]
    if any(not isinstance(model.forward, NativeForward) for model in models):
        print("this model has no forward pass of our own", file=sys.stderr)
        return None
    return models


def allocate_kv(model: PagedModel, num_blocks: int) -> None:
    """Gives a model its KV, and writes to all of it, so that the system provides the memory."""
    model.allocate_kv(num_blocks, BLOCK_SIZE)
    for kv in model.kv:
        for memory in (kv.keys, kv.values):
            memory.fill_(1 if kv.is_int8 else 0.01)
