"""Quality, memory traffic and speed by format of the weights: `python -m inflight.bench.engine.formats.measure`.

Encodes one model in several formats, each rounded to nearest without data, and serves each of them. What is encoded
computes the same as the model, but its numbers are none that a format would hold exactly (`encodings.copy_off_grid`).
Perplexity and the share of positions with the same likeliest token are compared with transformers in float32. Speed is
that of steps in turn: processor time per thread, the least of the rounds, in which other processes hardly count.

Superblocks of 256 numbers (Q4_K, Q6_K) and groups of 128 need rows that consist of them. `--hidden-size 768` serves
SmolLM2 with zeros beside its 576 numbers. Where llama.cpp is installed (`make bench-peers PEERS=llama-cpp`), its files
are measured too, and a second table compares its logits with ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch

from inflight.bench.engine.formats import encodings, llama_cpp
from inflight.bench.engine.formats.gguf_reference import comparison
from inflight.bench.engine.formats.padding import copy_padded
from inflight.bench.engine.formats.superblocks import SUPERBLOCK
from inflight.bench.engine.model_steps import allocate_kv, load_native_models, model_parser
from inflight.bench.engine.native_step import StepShape, blocks_of
from inflight.bench.engine.quality import TEXT, Agreement, agreement_with, cut, perplexity
from inflight.bench.engine.streams import times_of
from inflight.bench.engine.teacher_forcing import Predictions, paged_predictions, transformers_predictions
from inflight.bench.report.table import Table
from inflight.cli.doctor import processor
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import ModelSource, load_tokenizer, resolve_model
from inflight.executor.checkpoint.gguf import import_gguf
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.model import PagedModel

PROMPT_TOKENS = 140
CHUNK_TOKENS = 64
SHAPES = (StepShape(1, 1, 300), StepShape(8, 1, 300), StepShape(1, 512, 512))
COLUMNS = ("weights", "perplexity", "change", "agreement", "MB per decode step", "1 decode", "8 decodes", "prompt")
GGUF_TYPES = ("Q8_0", "Q5_0", "Q4_1", "Q4_0")
# With the output layer in Q6_K, as llama.cpp has it.
SUPERBLOCK_TYPES = ("Q6_K", "Q4_K")
# Mixes of types as llama.cpp writes them.
LLAMA_CPP_MIXES = ("Q8_0", "Q6_K", "Q4_K_M")
FLOAT32, Q6_K, Q8_0 = (gguf.GGMLQuantizationType[kind] for kind in ("F32", "Q6_K", "Q8_0"))
FOLDERS = {
    "compressed-tensors int8, per channel": encodings.compressed_int8(),
    "compressed-tensors int4, groups of 32": encodings.compressed_int4(32),
    "GPTQ int8, groups of 64": encodings.gptq(8, 64),
    "GPTQ int4, groups of 32": encodings.gptq(4, 32),
    "GPTQ int4, groups of 64": encodings.gptq(4, 64),
}
FOLDERS_OF_128 = {
    "compressed-tensors int4, groups of 128": encodings.compressed_int4(128),
    "GPTQ int4, groups of 128": encodings.gptq(4, 128),
    "AWQ int4, groups of 128": encodings.awq(128),
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """Weights in a format, in words, and how the executor loads them."""

    name: str
    source: ModelSource
    weight_dtype: str = "auto"


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    options = _options(argv)
    torch.set_num_threads(num_usable_cores())
    original = resolve_model(options.model)
    dense = original.folder if original.gguf_file is None else import_gguf(original)
    tokens = load_tokenizer(original).encode(TEXT.read_text(encoding="utf-8"))
    prompts = cut(tokens[: options.prompts * PROMPT_TOKENS], options.prompts)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "dense"
        encodings.copy_off_grid(dense, base)
        if options.hidden_size is not None:
            copy_padded(base, Path(folder) / "padded", options.hidden_size)
            base = Path(folder) / "padded"
        by_llama_cpp = _quantize_by_llama_cpp(original, base, Path(folder))
        encoded = _encode(original, base, by_llama_cpp, Path(folder), options.formats)
        reference = transformers_predictions(encoded[0].source, prompts)
        models = load_native_models(
            [(some.source, {"dtype_name": options.dtype, "weight_dtype": some.weight_dtype}) for some in encoded]
        )
        if models is None:
            return 1
        qualities = [_quality(model, prompts, reference) for model in models]
        num_blocks = max(shape.num_sequences * blocks_of(shape) for shape in SHAPES)
        print(f"- {processor().text}\n- {models[0].description.dtype}; {models[0].description.backend_reason}")
        print(f"- {original.name}, {options.prompts} prompts of {PROMPT_TOKENS} tokens\n")
        print(_table(encoded, models, qualities, perplexity(reference.log_probabilities), num_blocks, options.rounds))
        if by_llama_cpp:
            print(f"\n- {llama_cpp.version()}\n")
            print(comparison(by_llama_cpp, prompts, CHUNK_TOKENS, Path(folder)).markdown())
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = model_parser(__doc__, ["bfloat16", "float32"], rounds=9)
    add = parser.add_argument
    add("--prompts", type=int, default=20, help=f"of {PROMPT_TOKENS} tokens; default: %(default)s")
    add("--hidden-size", type=int, help="size to which zeros pad the model; default: its own")
    add("--formats", nargs="+", default=[""], help="parts of the names of formats to measure; default: all")
    return parser.parse_args(argv)


def _quantize_by_llama_cpp(original: ModelSource, base: Path, folder: Path) -> dict[str, Path]:
    """Returns the files that llama.cpp has written, by name, after the one in float32 that they are made of. There are
    none if rows do not consist of superblocks, or llama.cpp or the vocabulary of a GGUF file is missing."""
    if original.gguf_file is None or _hidden_size(base) % SUPERBLOCK or not llama_cpp.is_installed():
        print("without files of llama.cpp", file=sys.stderr)
        return {}
    whole = folder / "F32.gguf"
    encodings.save_gguf(base, original.gguf_file, whole, FLOAT32, FLOAT32)
    files = {"GGUF F32": whole}
    for mix in LLAMA_CPP_MIXES:
        path = folder / f"llama.cpp-{mix}.gguf"
        llama_cpp.quantize(whole, path, mix)
        files[f"GGUF {mix}, by llama.cpp"] = path
    return files


def _hidden_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["hidden_size"])


def _encode(
    original: ModelSource, base: Path, by_llama_cpp: Mapping[str, Path], folder: Path, names: Sequence[str]
) -> list[Encoded]:
    """Writes the checkpoints whose names contain one of these parts. The first is the one that the others are made
    of."""

    def is_wanted(name: str) -> bool:
        return any(part in name for part in names)

    source, hidden_size = resolve_model(str(base)), _hidden_size(base)
    encoded = [Encoded("dense", source)]
    encoded += [
        Encoded(name, source, kind) for kind in ("int8", "int4") if is_wanted(name := f"`--weight-dtype {kind}`")
    ]
    if original.gguf_file is not None:
        kind = original.gguf_file.stem.rpartition(".")[2]
        if is_wanted(name := f"GGUF {kind}, the file itself"):
            encoded.append(Encoded(name, original))
        output_kinds = dict.fromkeys(GGUF_TYPES, Q8_0)
        if hidden_size % SUPERBLOCK == 0:
            output_kinds |= dict.fromkeys(SUPERBLOCK_TYPES, Q6_K)
        for kind, output_kind in output_kinds.items():
            if is_wanted(name := f"GGUF {kind}"):
                path = folder / f"{kind}.gguf"
                encodings.save_gguf(base, original.gguf_file, path, gguf.GGMLQuantizationType[kind], output_kind)
                encoded.append(Encoded(name, resolve_model(str(path))))
    encoded += [Encoded(name, resolve_model(str(path))) for name, path in by_llama_cpp.items() if is_wanted(name)]
    folders = FOLDERS if hidden_size % 128 else FOLDERS | FOLDERS_OF_128
    for number, (name, (config, encode)) in enumerate(folders.items()):
        if is_wanted(name):
            encodings.save_folder(base, folder / str(number), config, encode)
            encoded.append(Encoded(name, resolve_model(str(folder / str(number)))))
    return encoded


def _quality(model: PagedModel, prompts: Sequence[Sequence[int]], reference: Predictions) -> Agreement:
    found = paged_predictions(model, prompts, CHUNK_TOKENS)
    return agreement_with(reference, found)


def _table(
    encoded: Sequence[Encoded],
    models: Sequence[PagedModel],
    qualities: Sequence[Agreement],
    reference_perplexity: float,
    num_blocks: int,
    rounds: int,
) -> str:
    natives = [model.forward.decoder for model in models if isinstance(model.forward, NativeForward)]
    for model in models:
        allocate_kv(model, num_blocks)
    least_ms = [times_of(models, natives, shape, rounds)[0] for shape in SHAPES]
    rows = []
    for number, (form, native, quality) in enumerate(zip(encoded, natives, qualities, strict=True)):
        rates = [
            shape.num_sequences * shape.num_new / ms[number] * 1e3 for shape, ms in zip(SHAPES, least_ms, strict=True)
        ]
        rows.append(
            [
                form.name,
                f"{quality.perplexity:.3f}",
                f"{quality.perplexity / reference_perplexity - 1:+.2%}",
                f"{quality.share_equal:.1%}",
                f"{native.num_matrix_bytes / 1e6:.1f}",
                *(f"{rate:,.0f}" for rate in rates),
            ]
        )
    return Table(COLUMNS, rows).markdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
