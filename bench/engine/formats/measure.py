"""Quality, memory traffic and speed by format of the weights: `python -m bench.engine.formats.measure`.

Encodes one model in several formats, each rounded to nearest without data, and serves each of them. What is encoded
computes the same as the model, but its numbers are none that a format would hold exactly (`encodings.copy_off_grid`).
Perplexity and the share of positions with the same likeliest token are compared with transformers in float32. Speed is
that of steps in turn: processor time per thread, the least of the rounds, in which other processes hardly count.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch

from bench.engine.formats import encodings
from bench.engine.model_steps import allocate_kv, load_native_models, model_parser
from bench.engine.native_step import StepShape, blocks_of
from bench.engine.quality import TEXT, Agreement, agreement, cut, perplexity
from bench.engine.streams import times_of
from bench.engine.teacher_forcing import Predictions, paged_predictions, transformers_predictions
from bench.report.table import Table
from common.machine import num_usable_cores
from common.model_source import ModelSource, load_tokenizer, resolve_model
from executor.checkpoint.gguf import import_gguf
from executor.model.model import PagedModel
from inflight.cli.doctor import processor

PROMPT_TOKENS = 140
CHUNK_TOKENS = 64
SHAPES = (StepShape(1, 1, 300), StepShape(8, 1, 300), StepShape(1, 512, 512))
COLUMNS = ("weights", "perplexity", "change", "agreement", "MB per decode step", "1 decode", "8 decodes", "prompt")
GGUF_TYPES = ("Q8_0", "Q5_0", "Q4_1", "Q4_0")
FOLDERS = {
    "compressed-tensors int8, per channel": encodings.compressed_int8(),
    "compressed-tensors int4, groups of 32": encodings.compressed_int4(32),
    "GPTQ int8, groups of 64": encodings.gptq(8, 64),
    "GPTQ int4, groups of 32": encodings.gptq(4, 32),
    "GPTQ int4, groups of 64": encodings.gptq(4, 64),
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """Weights in a format, in words, and how the executor loads them."""

    name: str
    source: ModelSource
    weight_dtype: str = "auto"


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = model_parser(__doc__, ["bfloat16", "float32"], rounds=9)
    parser.add_argument("--prompts", type=int, default=20, help=f"of {PROMPT_TOKENS} tokens; default: %(default)s")
    options = parser.parse_args(argv)
    torch.set_num_threads(num_usable_cores())
    original = resolve_model(options.model)
    dense = original.folder if original.gguf_file is None else import_gguf(original)
    tokens = load_tokenizer(original).encode(TEXT.read_text(encoding="utf-8"))
    prompts = cut(tokens[: options.prompts * PROMPT_TOKENS], options.prompts)
    with tempfile.TemporaryDirectory() as folder:
        encoded = _encode(original, dense, Path(folder))
        reference = transformers_predictions(encoded[0].source, prompts)
        models = load_native_models(
            [(some.source, {"dtype_name": options.dtype, "weight_dtype": some.weight_dtype}) for some in encoded]
        )
        if models is None:
            return 1
        qualities = [_quality(model, prompts, reference) for model in models]
        num_blocks = max(shape.num_sequences * blocks_of(shape) for shape in SHAPES)
        print(f"- {processor().text}\n- {models[0].dtype_name}; {models[0].backend_reason}")
        print(f"- {original.name}, {options.prompts} prompts of {PROMPT_TOKENS} tokens\n")
        print(_table(encoded, models, qualities, perplexity(reference.log_probabilities), num_blocks, options.rounds))
    return 0


def _encode(original: ModelSource, dense: Path, folder: Path) -> list[Encoded]:
    """Writes the checkpoints. The first is the one that the others are made of."""
    base = folder / "dense"
    encodings.copy_off_grid(dense, base)
    source = resolve_model(str(base))
    encoded = [
        Encoded("dense", source),
        Encoded("`--weight-dtype int8`", source, "int8"),
        Encoded("`--weight-dtype int4`", source, "int4"),
    ]
    if original.gguf_file is not None:
        kind = original.gguf_file.stem.rpartition(".")[2]
        encoded.append(Encoded(f"GGUF {kind}, the file itself", original))
        for name in GGUF_TYPES:
            path = folder / f"{name}.gguf"
            encodings.save_gguf(base, original.gguf_file, path, gguf.GGMLQuantizationType[name])
            encoded.append(Encoded(f"GGUF {name}", resolve_model(str(path))))
    for number, (name, (config, encode)) in enumerate(FOLDERS.items()):
        encodings.save_folder(base, folder / str(number), config, encode)
        encoded.append(Encoded(name, resolve_model(str(folder / str(number)))))
    return encoded


def _quality(model: PagedModel, prompts: Sequence[Sequence[int]], reference: Predictions) -> Agreement:
    found = paged_predictions(model, prompts, CHUNK_TOKENS)
    return agreement(reference.top_ids, reference.top_gaps, found.top_ids, found.log_probabilities)


def _table(
    encoded: Sequence[Encoded],
    models: Sequence[PagedModel],
    qualities: Sequence[Agreement],
    reference_perplexity: float,
    num_blocks: int,
    rounds: int,
) -> str:
    natives = [model.native for model in models if model.native is not None]
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
