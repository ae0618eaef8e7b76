"""The loss of quality by dtype, against transformers' own float32 forward pass.

    python -m inflight.bench.engine.quality [--model FOLDER] [--variants float32,bfloat16] [--prompts 50] [--out FOLDER]

With `--reference FOLDER` the reference is another checkpoint, such as the one that a quantized checkpoint was made of.

A text (`bench/texts/passages.txt`) is cut into prompts. At every position, given the true tokens before it, each
variant predicts the next token. That gives perplexity, and how often the greedy choice is the reference's. Where it is
not, the report shows how close the reference's own first two were. Every variant is measured on both of its paths:
prompts in chunks, and one token a step as in generation.

The same is measured with long contexts, in chunks: prompts of 2,048 tokens, and needles. A needle is a sentence with a
number of eight digits somewhere in the text, which the end of the prompt asks for. It is found if each of the last
eight tokens, digits in the vocabulary of SmolLM2, is the likeliest, so that greedy generation yields the number.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.bench.measures.run import percentile
from inflight.bench.report.page import Page, Part, write_report
from inflight.bench.report.table import Table, shown
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import ModelError, ModelSource, load_tokenizer, resolve_model
from inflight.executor.entry import SPIN_COUNT
from inflight.executor.model.loader import load_model

if TYPE_CHECKING:
    from inflight.bench.engine.teacher_forcing import Predictions
    from inflight.executor.model.model import PagedModel

TEXT = Path(__file__).parents[1] / "texts" / "passages.txt"
NUM_PROMPTS = 50
# Tokens of a prompt in a step.
PATHS = {"chunks of 64": 64, "one by one": 1}
CONTEXT_TOKENS = 2048
# Where a needle is in its context, in 16ths.
DEPTHS = range(1, 16, 2)
NEEDLE = " The number of the lighthouse is {}."
QUESTION = "\n\nAs was said above, the number of the lighthouse is {}"
NUM_DIGITS = 8
LONG_EXPLANATION = f"""\
The same over prompts of {CONTEXT_TOKENS} tokens of the text, in chunks. Needles are numbers of {NUM_DIGITS} digits at
{len(DEPTHS)} depths of such a context: found if every digit is the likeliest token."""
EXPLANATION = """\
The change of perplexity is from the reference's on the same text. ± is its standard error, from the differences of the
log probabilities at each position, which vary far less than the log probabilities. Agreement is the share of positions,
each given the true tokens before it, at which the likeliest token is the reference's. The gaps are the reference's own:
by how many logits its first token leads its second at the positions that differ. The last column says at how many of
all positions it leads by no more than the largest of them."""
KIND = "quality"
COLUMNS = (
    "computed in", "prompt", "perplexity", "change", "±", "agreement", "different",
    "gap p50", "p99", "largest", "as close",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over all positions of a text, each given the true tokens before it.

    `change_error` is the standard error of the relative change of the reference's perplexity; None for one position.
    `num_different` positions have another likeliest token than the reference. `gap_…` are the reference's own leads, in
    logits, of its first over its second token at those positions: small ones are near ties. `share_of_smaller_gaps` is
    the share of all positions where the reference leads by no more than `gap_max`. None where nothing differs.
    """

    num_positions: int
    perplexity: float
    change_error: float | None
    num_different: int
    gap_p50: float | None
    gap_p99: float | None
    gap_max: float | None
    share_of_smaller_gaps: float | None

    @property
    def share_equal(self) -> float:
        return 1 - self.num_different / self.num_positions


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of computing: what `load_model` is told beside the model."""

    name: str
    load_arguments: Mapping[str, Any]


# Of a quantized checkpoint alone.
QUANTIZED_ROWS = Variant("8-bit rows", {"dtype_name": "bfloat16", "weight_dtype": "quantized_a8"})
DEFAULTS = (
    Variant("float32", {"dtype_name": "float32"}),
    Variant("bfloat16", {"dtype_name": "bfloat16"}),
    Variant("int8 weights", {"dtype_name": "bfloat16", "weight_dtype": "int8"}),
    Variant("int8 KV", {"dtype_name": "bfloat16", "kv_cache_dtype": "int8"}),
)
VARIANTS = (*DEFAULTS, QUANTIZED_ROWS)


@dataclass(frozen=True, slots=True)
class Result:
    """One variant on one path."""

    variant: str
    path: str
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class LongResult:
    """One variant with long contexts, or the reference."""

    variant: str
    agreement: Agreement
    num_found: int
    num_needles: int


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The reference's perplexity, and what the variants make of the same text. The first of the long results is the
    reference's."""

    circumstances: Mapping[str, str]
    reference_perplexity: float
    results: tuple[Result, ...]
    long_results: tuple[LongResult, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Measures and writes the report; 1 if the model cannot be loaded."""
    options = _parser().parse_args(argv)
    try:
        source = resolve_model(options.model)
        reference = resolve_model(options.reference) if options.reference else source
        report = _measure(source, reference, options.text, options.prompts, options.variants)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    page = page_of(report)
    paths = write_report(options.out, "quality", values_of(report), page)
    print(page.markdown())
    print("report: " + ", ".join(str(path) for path in paths))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inflight.bench.engine.quality",
        description="Perplexity and greedy agreement by dtype.",
        allow_abbrev=False,
    )
    names = [variant.name for variant in VARIANTS]
    default = f"all but {QUANTIZED_ROWS.name}"
    add = parser.add_argument
    add("--model", default="", help="model folder, GGUF file or hub name; default: SmolLM2-135M-Instruct")
    add("--reference", default="", metavar="MODEL", help="a model with the same tokenizer; default: --model itself")
    add("--text", type=Path, default=TEXT, metavar="FILE", help="default: bench/texts/passages.txt")
    add("--prompts", type=int, default=NUM_PROMPTS, metavar="N", help=f"parts of the text; default: {NUM_PROMPTS}")
    add(
        "--variants", type=_variants, default=DEFAULTS, metavar="NAME,…", help=f"{', '.join(names)}; default: {default}"
    )
    add("--out", type=Path, default=Path("bench/reports"), metavar="FOLDER", help="default: bench/reports")
    return parser


def _variants(text: str) -> tuple[Variant, ...]:
    known = {variant.name: variant for variant in VARIANTS}
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return tuple(known[name] for name in names)


def _measure(
    source: ModelSource, reference_source: ModelSource, text: Path, num_prompts: int, variants: Sequence[Variant]
) -> QualityReport:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    # Imported here: it brings torch, which neither the figures nor the report need.
    from inflight.bench.engine.teacher_forcing import transformers_predictions

    tokenizer = load_tokenizer(source)
    token_ids = tokenizer.encode(text.read_text(encoding="utf-8"))
    prompts = cut(token_ids, num_prompts)
    reference = transformers_predictions(reference_source, prompts)
    results = tuple(result for variant in variants for result in _results(source, variant, prompts, reference))
    long_results = _long_results(source, reference_source, variants, *_long_prompts(tokenizer.encode, token_ids))
    circumstances = {
        "model": source.name,
        "text": f"{text.name}, {num_prompts} prompts of {len(prompts[0])} tokens",
        "machine": f"{num_usable_cores()} cores, {platform.machine()}, torch {metadata.version('torch')}",
        "reference": f"{reference_source.name}, transformers {metadata.version('transformers')}, float32, each alone",
    }
    return QualityReport(circumstances, perplexity(reference.log_probabilities), results, long_results)


def _results(
    source: ModelSource, variant: Variant, prompts: Sequence[Sequence[int]], reference: Predictions
) -> list[Result]:
    from inflight.bench.engine.teacher_forcing import paged_predictions

    model = _load(source, variant)
    results = []
    for path, chunk_tokens in PATHS.items():
        found = paged_predictions(model, prompts, chunk_tokens)
        figures = agreement(reference, found)
        _tell(f"{variant.name}, {path}", figures)
        results.append(Result(variant.name, path, figures))
    return results


def _tell(name: str, figures: Agreement) -> None:
    print(f"{name}: {figures.share_equal:.2%} equal, perplexity {figures.perplexity:.4f}", file=sys.stderr, flush=True)


def _load(source: ModelSource, variant: Variant) -> PagedModel:
    return load_model(source, **variant.load_arguments)


def _long_prompts(
    encode: Callable[[str], list[int]], token_ids: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the text in long prompts, and a prompt with a needle for each depth; none if the text is too short."""
    num_prompts = len(token_ids) // CONTEXT_TOKENS
    if num_prompts == 0:
        return [], []
    needles = []
    for depth in DEPTHS:
        number = str(12_345_678 + 4_837_193 * depth)
        needle, question = encode(NEEDLE.format(number)), encode(QUESTION.format(number))
        num_before = CONTEXT_TOKENS * depth // 16
        num_after = CONTEXT_TOKENS - len(needle) - len(question) - num_before
        needles.append([*token_ids[:num_before], *needle, *token_ids[num_before : num_before + num_after], *question])
    return cut(token_ids[: num_prompts * CONTEXT_TOKENS], num_prompts), needles


def _long_results(
    source: ModelSource,
    reference_source: ModelSource,
    variants: Sequence[Variant],
    prompts: list[list[int]],
    needles: list[list[int]],
) -> tuple[LongResult, ...]:
    from inflight.bench.engine.teacher_forcing import paged_predictions, transformers_predictions

    if not prompts:
        return ()
    num_positions = len(prompts) * (CONTEXT_TOKENS - 1)
    reference = transformers_predictions(reference_source, [*prompts, *needles])
    results = []
    for variant in (None, *variants):
        name, found = "reference", reference
        if variant is not None:
            model = _load(source, variant)
            name, found = variant.name, paged_predictions(model, [*prompts, *needles], PATHS["chunks of 64"])
        figures = agreement(reference.first(num_positions), found.first(num_positions))
        num_found = num_needles_found(needles, found.top_ids[num_positions:])
        _tell(f"{name}, {CONTEXT_TOKENS} tokens", figures)
        results.append(LongResult(name, figures, num_found, len(needles)))
    return tuple(results)


def num_needles_found(needles: Sequence[Sequence[int]], top_ids: Sequence[int]) -> int:
    """Counts the prompts whose last tokens, those of the number, are all the likeliest. `top_ids` are the predictions
    for every token of each prompt but the first."""
    ends = itertools.accumulate(len(needle) - 1 for needle in needles)
    return sum(
        list(top_ids[end - NUM_DIGITS : end]) == list(needle[-NUM_DIGITS:])
        for needle, end in zip(needles, ends, strict=True)
    )


def values_of(report: QualityReport) -> dict[str, Any]:
    """Returns the report as plain values."""
    values = {"report": KIND, **asdict(report)}
    for results in (values["results"], values["long_results"]):
        for result in results:
            result |= result.pop("agreement")
    return values


def page_of(report: QualityReport) -> Page:
    """Returns the report's page."""
    reference = report.reference_perplexity
    circumstances = {**report.circumstances, "perplexity of the reference": f"{reference:.4f}"}
    rows = [_row(result.variant, result.path, result.agreement, reference) for result in report.results]
    parts = [Part("Agreement", note=EXPLANATION, table=Table(COLUMNS, rows))]
    if report.long_results:
        reference = report.long_results[0].agreement.perplexity
        rows = [
            [
                *_row(result.variant, "chunks of 64", result.agreement, reference),
                f"{result.num_found} of {result.num_needles}",
            ]
            for result in report.long_results
        ]
        parts.append(Part("Long contexts", note=LONG_EXPLANATION, table=Table([*COLUMNS, "needles"], rows)))
    return Page("Quality by dtype", circumstances, parts)


def _row(variant: str, path: str, found: Agreement, reference_perplexity: float) -> list[str]:
    return [
        variant,
        path,
        f"{found.perplexity:.4f}",
        f"{found.perplexity / reference_perplexity - 1:+.3%}",
        shown(found.change_error, ".3%"),
        f"{found.share_equal:.2%}",
        f"{found.num_different} of {found.num_positions}",
        *(shown(gap, ".3f") for gap in (found.gap_p50, found.gap_p99, found.gap_max)),
        shown(found.share_of_smaller_gaps, ".1%"),
    ]


def perplexity(log_probabilities: Sequence[float]) -> float:
    """e to the mean negative log probability of the tokens that do follow."""
    return math.exp(-math.fsum(log_probabilities) / len(log_probabilities))


def agreement(reference: Predictions, found: Predictions) -> Agreement:
    """Compares the predictions of a model with those of a reference, position by position."""
    same = zip(reference.top_ids, found.top_ids, strict=True)
    gaps = [gap for gap, (wanted, got) in zip(reference.top_gaps, same, strict=True) if wanted != got]
    largest = max(gaps, default=None)
    smaller = None if largest is None else sum(gap <= largest for gap in reference.top_gaps) / len(reference.top_gaps)
    return Agreement(
        num_positions=len(found.top_ids),
        perplexity=perplexity(found.log_probabilities),
        change_error=_change_error(reference.log_probabilities, found.log_probabilities),
        num_different=len(gaps),
        gap_p50=percentile(gaps, 0.5),
        gap_p99=percentile(gaps, 0.99),
        gap_max=largest,
        share_of_smaller_gaps=smaller,
    )


def _change_error(reference_log_probabilities: Sequence[float], log_probabilities: Sequence[float]) -> float | None:
    """Returns the standard error of `perplexity / reference perplexity - 1`, to first order in the change."""
    differences = [
        reference - found for reference, found in zip(reference_log_probabilities, log_probabilities, strict=True)
    ]
    if len(differences) < 2:
        return None
    return statistics.stdev(differences) / math.sqrt(len(differences))


def cut(token_ids: Sequence[int], num_prompts: int) -> list[list[int]]:
    """Returns the text as prompts of one length, without overlap; what is left over at the end is dropped."""
    length = len(token_ids) // num_prompts
    assert length >= 2, "a prompt needs a token and one that follows it"
    return [list(token_ids[i * length : (i + 1) * length]) for i in range(num_prompts)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
