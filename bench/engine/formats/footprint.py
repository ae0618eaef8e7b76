"""Memory and speed of a large model in 4 bits: `python -m inflight.bench.engine.formats.footprint`.

Writes a checkpoint of a known shape with random numbers in GPTQ's layout, because memory and time do not depend on the
numbers. A process of its own loads it, so the peak of its memory is that of loading and of steps. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from inflight.bench.engine.formats.process_memory import memory_bytes
from inflight.bench.engine.model_steps import allocate_kv, load_native_models
from inflight.bench.engine.native_step import StepShape, blocks_of
from inflight.bench.engine.streams import times_of
from inflight.bench.report.table import Table
from inflight.cli.doctor import processor
from inflight.common.model_source import resolve_model
from inflight.executor.forward.native import NativeForward

SHAPES = (StepShape(1, 1, 300), StepShape(8, 1, 300), StepShape(1, 512, 512))
GROUP_SIZE = 128
COMMON: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
# Sizes of published models, by name.
SIZES: Mapping[str, Mapping[str, int]] = {
    "Llama-3.2-1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
    },
    "Llama-3.2-3B": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
}


def main(argv: Sequence[str]) -> int:
    """Writes, measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="times that each step is measured; default: %(default)s")
    options = parser.parse_args(argv)
    print(f"- {processor().text}\n")
    columns = ("model", "file GB", "load s", "peak GB", "GB after loading", "GB per decode step")
    rows = []
    for name in options.sizes:
        print(f"{name}: writing", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            num_bytes = write_checkpoint(Path(folder), SIZES[name])
            print(f"{name}: loading {num_bytes / 1e9:.1f} GB", file=sys.stderr, flush=True)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                measured = pool.apply(_measure, (folder, options.rounds))
        rows.append([name, f"{num_bytes / 1e9:.2f}", *measured])
    print(Table([*columns, *(f"{shape}, tokens/s" for shape in SHAPES)], rows).markdown())
    return 0


def write_checkpoint(folder: Path, sizes: Mapping[str, int]) -> int:
    """Writes a model of random numbers with layers of 4 bits, a file for each layer. Returns the bytes of the files."""
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "checkpoint_format": "gptq_v2"}
    quantization |= {"desc_act": False, "sym": True}
    (folder / "config.json").write_text(json.dumps({**COMMON, **sizes, "quantization_config": quantization}))
    generator = torch.Generator().manual_seed(0)
    hidden = sizes["hidden_size"]
    files: dict[str, str] = {}
    outer = {
        "model.embed_tokens.weight": torch.randn(COMMON["vocab_size"], hidden, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    parts = [outer, *(_layer(number, sizes, generator) for number in range(sizes["num_hidden_layers"]))]
    total = 0
    for number, part in enumerate(parts):
        file = f"model-{number:05}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        files |= dict.fromkeys(part, file)
        total += (folder / file).stat().st_size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return total


def _layer(number: int, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * dim, COMMON["num_key_value_heads"] * dim
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    prefix = f"model.layers.{number}."
    tensors = {
        f"{prefix}{name}.{part}": tensor
        for name, shape in matrices.items()
        for part, tensor in _matrix(*shape, generator)
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{prefix}{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}


def _matrix(num_outputs: int, num_inputs: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yields a matrix of 4 bits in GPTQ's layout. Its zeros are the middle of the codes."""
    num_groups = num_inputs // GROUP_SIZE
    limits = torch.iinfo(torch.int32)
    shape = (num_inputs // 8, num_outputs)
    yield "qweight", torch.randint(limits.min, limits.max, shape, generator=generator, dtype=torch.int32)
    yield "qzeros", torch.full((num_groups, num_outputs // 8), 0x8888_8888 - (1 << 32), dtype=torch.int32)
    yield "scales", torch.full((num_groups, num_outputs), 0.2 / num_inputs**0.5, dtype=torch.float16)


def _measure(folder: str, rounds: int) -> list[str]:
    """Loads the model and computes steps. Returns the columns of its row."""
    source, began = resolve_model(folder), time.perf_counter()
    models = load_native_models([(source, {"dtype_name": "bfloat16"})])
    seconds = time.perf_counter() - began
    if models is None or not isinstance(models[0].forward, NativeForward):
        raise RuntimeError("the model has no native forward pass")
    peak, resident = memory_bytes("VmHWM"), memory_bytes("VmRSS")
    allocate_kv(models[0], max(shape.num_sequences * blocks_of(shape) for shape in SHAPES))
    rates = []
    for shape in SHAPES:
        _, wall_ms = times_of(models, [models[0].forward.decoder], shape, rounds)
        rates.append(f"{shape.num_sequences * shape.num_new / wall_ms[0] * 1e3:,.1f}")
    gigabytes = [f"{number / 1e9:.2f}" for number in (peak, resident, models[0].forward.decoder.num_matrix_bytes)]
    return [f"{seconds:.1f}", *gigabytes, *rates]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
