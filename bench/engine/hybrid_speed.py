"""Speed of models with recurrent layers on a CPU, against transformers: `python -m inflight.bench.engine.hybrid_speed`.

Makes models of published shapes with random weights, and computes the same prompts and as many tokens with each engine:
inflight step by step, a prompt in chunks, and transformers by `generate`. The engines take turns, so that a disturbance
affects both. Prints the medians as Markdown. Speed does not depend on the numbers of the weights, and the tokens of
random weights mean nothing. `--shape NAME` measures one shape, `--sequences 1,8` batches of so many prompts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Lfm2Config, PretrainedConfig, Qwen3_5TextConfig

from inflight.bench.engine.model_steps import BLOCK_SIZE, greedy_sequence, made_up_ids
from inflight.bench.report.table import Table
from inflight.cli.doctor import processor
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import resolve_model
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.step.batch import StepBatch, pack

CHUNK_TOKENS = 512


def lfm2_350m() -> PretrainedConfig:
    """LFM2-350M: 10 short convolutions and 6 layers of attention."""
    attention = (2, 5, 8, 10, 12, 14)
    return Lfm2Config(
        hidden_size=1024,
        intermediate_size=6656,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        layer_types=["full_attention" if layer in attention else "conv" for layer in range(16)],
    )


def qwen3_5_08b() -> PretrainedConfig:
    """Qwen3.5-0.8B: 18 gated delta nets and 6 layers of attention."""
    return Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    )


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {"lfm2-350m": lfm2_350m, "qwen3.5-0.8b": qwen3_5_08b}


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of `num_prompt_tokens` that are computed together, and the tokens that each yields then."""

    num_sequences: int
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks of a sequence."""
        return -(-(self.num_prompt_tokens + self.num_output_tokens) // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Seconds:
    """The time up to the first token of all prompts, and of each step behind it."""

    prefill: float
    decode: float


def run_ours(model: PagedModel, case: Case) -> Seconds:
    """Computes a case step by step."""
    numbers = range(case.num_sequences)
    tables = [list(range(1 + i, 1 + case.num_blocks * len(numbers), len(numbers))) for i in numbers]
    sequences = [greedy_sequence(made_up_ids(case.num_prompt_tokens), table) for table in tables]
    for slot, sequence in enumerate(sequences):
        sequence.state_slot = slot
    began = time.perf_counter()
    for sequence in sequences:
        for start in range(0, case.num_prompt_tokens, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, case.num_prompt_tokens - start)
            ids = _greedy(model, pack(StepPlan.of([PlanRow(sequence, start, count, True)]), BLOCK_SIZE))
        sequence.token_ids.append(ids[0])
    first = time.perf_counter()
    for _ in range(case.num_output_tokens - 1):
        rows = [PlanRow(sequence, len(sequence.token_ids) - 1, 1, True) for sequence in sequences]
        ids = _greedy(model, pack(StepPlan.of(rows), BLOCK_SIZE))
        for sequence, token_id in zip(sequences, ids, strict=True):
            sequence.token_ids.append(token_id)
    ended = time.perf_counter()
    return Seconds(first - began, (ended - first) / max(1, case.num_output_tokens - 1))


def _greedy(model: PagedModel, batch: StepBatch) -> list[int]:
    assert isinstance(model.forward, NativeForward)
    ids: list[int] = model.forward.decoder.greedy(batch, model.kv).tolist()
    return ids


def run_theirs(network: Any, case: Case) -> Seconds:
    """Computes a case by `generate`, once with one token and once with all."""
    prompts = torch.tensor([made_up_ids(case.num_prompt_tokens)] * case.num_sequences)
    seconds = []
    for count in (1, case.num_output_tokens):
        began = time.perf_counter()
        network.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )
        seconds.append(time.perf_counter() - began)
    return Seconds(seconds[0], (seconds[1] - seconds[0]) / max(1, case.num_output_tokens - 1))


def measure(config: PretrainedConfig, cases: Sequence[Case], dtype_name: str, rounds: int) -> list[list[str]]:
    """Makes a model, and returns a row of the table for each case. The first round is not counted."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    with tempfile.TemporaryDirectory() as folder:
        made: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        made.save_pretrained(folder)
        del made
        model = load_model(resolve_model(str(Path(folder))), dtype_name=dtype_name, device_name="cpu")
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    assert model.forward.states is not None
    num_sequences = max(case.num_sequences for case in cases)
    model.forward.states.reserve(StateSizes(num_sequences, 0, 0))
    model.allocate_kv(1 + max(case.num_sequences * case.num_blocks for case in cases), BLOCK_SIZE)
    times: list[list[tuple[Seconds, Seconds]]] = [[] for _ in cases]
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for case, measured in zip(cases, times, strict=True):
                measured.append((run_ours(model, case), run_theirs(network, case)))
    return [_row(case, measured[1:]) for case, measured in zip(cases, times, strict=True)]


def _row(case: Case, measured: Sequence[tuple[Seconds, Seconds]]) -> list[str]:
    row = [str(case.num_sequences), str(case.num_prompt_tokens)]
    for name, num_tokens in (("prefill", case.num_prompt_tokens), ("decode", 1)):
        ours, theirs = (
            case.num_sequences * num_tokens / statistics.median(getattr(one, name) for one in of_engine)
            for of_engine in zip(*measured, strict=True)
        )
        row += [f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"]
    return row


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), help="default: all")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: %(default)s")
    add("--prompt-tokens", type=int, default=512, help="default: %(default)s")
    add("--output-tokens", type=int, default=64, help="at least 2; default: %(default)s")
    add("--sequences", default="1,8", help="sizes of batches; default: %(default)s")
    add("--rounds", type=int, default=5, help="default: %(default)s")
    options = parser.parse_args(argv)
    torch.set_num_threads(num_usable_cores())
    counts = [int(count) for count in options.sequences.split(",")]
    cases = [Case(count, options.prompt_tokens, max(2, options.output_tokens)) for count in counts]
    print(
        f"- {processor().text}\n- {options.dtype}, {options.output_tokens} tokens of output, {options.rounds} rounds\n"
    )
    for name in [options.shape] if options.shape else sorted(SHAPES):
        columns = ["sequences", "prompt"]
        for part in ("prefill", "decode"):
            columns += [f"{part} tokens/s", "of transformers", "ratio"]
        rows = measure(SHAPES[name](), cases, options.dtype, options.rounds)
        print(f"## {name}\n\n{Table(columns, rows).markdown()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
