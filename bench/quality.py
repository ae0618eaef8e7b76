"""What each way of computing costs in quality, against transformers' own float32 forward.

    python -m bench.quality [--model FOLDER] [--variants float32,bfloat16] [--prompts 50] [--out bench/reports]

A text (`bench/texts/passages.txt`) is cut into prompts. At every position, given the true tokens before it, each
variant says which token it holds likeliest and how likely it holds the one that follows. That gives perplexity, and how
often the greedy choice is the reference's; where it is not, how close the reference's own first two were. Every variant
is measured on both of its paths: prompts in chunks, and one token a step as in generation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from bench.agreement import Agreement, agreement, cut, perplexity
from common.machine import num_usable_cores
from common.model_source import ModelError, ModelSource, load_tokenizer, resolve_model
from executor.entry import SPIN_COUNT

if TYPE_CHECKING:
    from bench.engine.teacher_forcing import Predictions

TEXT = Path(__file__).parent / "texts" / "passages.txt"
NUM_PROMPTS = 50
# Tokens of a prompt in a step.
PATHS = {"chunks of 64": 64, "one by one": 1}
EXPLANATION = """\
Agreement is the share of positions, each given the true tokens before it, at which the likeliest token is the
reference's. The gaps are the reference's own: by how many logits its first token leads its second at the positions that
differ. The last column says at how many of all positions it leads by no more than the largest of them."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of computing: what `PagedModel.load` is told beside the model."""

    name: str
    load_arguments: Mapping[str, str] = field(default_factory=dict)


VARIANTS = (
    Variant("float32", {"dtype_name": "float32"}),
    Variant("bfloat16", {"dtype_name": "bfloat16"}),
    Variant("int8 weights", {"dtype_name": "bfloat16", "weight_dtype": "int8"}),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One variant on one path."""

    variant: str
    path: str
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The reference's perplexity, and what the variants make of the same text."""

    circumstances: Mapping[str, str]
    reference_perplexity: float
    results: tuple[Result, ...]


def main(argv: Sequence[str]) -> int:
    """Measures and writes quality.json and quality.md; 1 where the model cannot be had."""
    options = _parser().parse_args(argv)
    try:
        report = _measure(resolve_model(options.model), options.text, options.prompts, options.variants)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "quality.json").write_text(to_json(report), encoding="utf-8")
    (options.out / "quality.md").write_text(to_markdown(report), encoding="utf-8")
    print(to_markdown(report))
    print(f"report: {options.out / 'quality.json'}, {options.out / 'quality.md'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality", description="Perplexity and greedy agreement by dtype.", allow_abbrev=False
    )
    names = [variant.name for variant in VARIANTS]
    add = parser.add_argument
    add("--model", default="", help="model folder, GGUF file or hub name; default: SmolLM2-135M-Instruct")
    add("--text", type=Path, default=TEXT, metavar="FILE", help="default: bench/texts/passages.txt")
    add("--prompts", type=int, default=NUM_PROMPTS, metavar="N", help=f"parts of the text; default: {NUM_PROMPTS}")
    add("--variants", type=_variants, default=VARIANTS, metavar="NAME,…", help=f"{', '.join(names)}; default: all")
    add("--out", type=Path, default=Path("bench/reports"), metavar="FOLDER", help="default: bench/reports")
    return parser


def _variants(text: str) -> tuple[Variant, ...]:
    known = {variant.name: variant for variant in VARIANTS}
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return tuple(known[name] for name in names)


def _measure(source: ModelSource, text: Path, num_prompts: int, variants: Sequence[Variant]) -> QualityReport:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    # Imported here: it brings torch, which neither the figures nor the report need.
    from bench.engine.teacher_forcing import transformers_predictions

    token_ids = load_tokenizer(source).encode(text.read_text(encoding="utf-8"))
    prompts = cut(token_ids, num_prompts)
    reference = transformers_predictions(source, prompts)
    results = tuple(result for variant in variants for result in _results(source, variant, prompts, reference))
    circumstances = {
        "model": source.name,
        "text": f"{text.name}, {num_prompts} prompts of {len(prompts[0])} tokens",
        "machine": f"{num_usable_cores()} cores, {platform.machine()}, torch {metadata.version('torch')}",
        "reference": f"transformers {metadata.version('transformers')}, float32, each prompt alone",
    }
    return QualityReport(circumstances, perplexity(reference.log_probabilities), results)


def _results(
    source: ModelSource, variant: Variant, prompts: Sequence[Sequence[int]], reference: Predictions
) -> list[Result]:
    from bench.engine.teacher_forcing import paged_predictions
    from executor.model.model import PagedModel

    model = PagedModel.load(source, **variant.load_arguments)
    results = []
    for path, chunk_tokens in PATHS.items():
        found = paged_predictions(model, prompts, chunk_tokens)
        figures = agreement(reference.top_ids, reference.top_gaps, found.top_ids, found.log_probabilities)
        print(f"{variant.name}, {path}: {figures.share_equal:.2%} equal", file=sys.stderr, flush=True)
        results.append(Result(variant.name, path, figures))
    return results


def to_json(report: QualityReport) -> str:
    """Everything."""
    results = [
        {"variant": result.variant, "path": result.path, **asdict(result.agreement)} for result in report.results
    ]
    return json.dumps({**asdict(report), "results": results}, indent=1) + "\n"


def to_markdown(report: QualityReport) -> str:
    """The report for people."""
    lines = ["# Quality by way of computing", ""]
    lines += [f"- {name}: {value}" for name, value in report.circumstances.items()]
    lines += [
        f"- perplexity of the reference: {report.reference_perplexity:.4f}",
        "",
        *EXPLANATION.splitlines(),
        "",
        "| computed in | prompt | perplexity | change | agreement | different | gap p50 | p99 | largest | as close |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(result, report.reference_perplexity) for result in report.results),
    ]
    return "\n".join(lines) + "\n"


def _row(result: Result, reference_perplexity: float) -> str:
    figures = result.agreement
    change = figures.perplexity / reference_perplexity - 1
    share = "–" if figures.share_of_smaller_gaps is None else f"{figures.share_of_smaller_gaps:.1%}"
    cells = [
        result.variant,
        result.path,
        f"{figures.perplexity:.4f}",
        f"{change:+.3%}",
        f"{figures.share_equal:.2%}",
        f"{figures.num_different} of {figures.num_positions}",
        *("–" if gap is None else f"{gap:.3f}" for gap in (figures.gap_p50, figures.gap_p99, figures.gap_max)),
        share,
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
