"""Prediction of the time of a decode step on GPUs that were not available: counted launches and bytes, assumed rates.

What each launch loads, stores and multiplies is counted on the code (`inflight.bench.gpu.engine.traffic`). How fast a
GPU does that is not known without one: every rate here is an assumption, and the first run of `make bench-gpu` confirms
or refutes the result. Pure.

    a launch takes     the larger of bytes / bandwidth and operations / matrix rate, a constant to start and drain, and
                       another for each program of a Triton kernel
    the limit          weights and contexts once at the bandwidth of a copy, as in the report of a run
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from inflight.bench.gpu.engine.launches import FP8_PRODUCT, Launch
from inflight.bench.gpu.report import DECODE_GOAL
from inflight.bench.gpu.roofline import LLAMA_3_8B, Limits
from inflight.bench.report.page import Page, Part
from inflight.bench.report.table import Table

KIND = "gpu-prediction"
CONTEXT = 1000
SEQUENCE_COUNTS = (1, 32, 128)

# Shares of the bandwidth on the card's data sheet: of a large copy, and of kernels that stream weights or KV.
COPY_SHARE = 0.92
PRODUCT_SHARE = 0.85
ATTENTION_SHARE = 0.75
SHARES = {"products": PRODUCT_SHARE, "attention": ATTENTION_SHARE, "others": COPY_SHARE}
# Share of the data sheet's rate of dense matrix products in bfloat16, and in FP8 of twice that.
MATRIX_SHARE = 0.7
FP8_RATE = 2.0
# From the end of a kernel of a graph to the next one's first bytes from memory, and its last wave.
LAUNCH_S = 2e-6
# Start of a program, those of empty splits included.
PROGRAM_S = 1e-9
# Upload of the inputs and the start of the replay; the host's own work is hidden behind the previous step.
STEP_S = 20e-6


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU by its data sheet."""

    name: str
    bytes_per_s: float
    matrix_operations_per_s: float


# Both in the SXM form.
CARDS = (Card("H100", 3.35e12, 989e12), Card("H200", 4.8e12, 989e12))


@dataclass(frozen=True, slots=True)
class CountedStep:
    """The launches of a step of decodes, each with how often it occurs. With `is_fp8` the weights of layers, keys and
    values are in FP8, else in bfloat16."""

    num_sequences: int
    context: int
    launches: tuple[tuple[Launch, int], ...]
    is_fp8: bool = False

    @property
    def form(self) -> str:
        """The type of weights and KV."""
        return "FP8" if self.is_fp8 else "bfloat16"


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """Where the time of a step goes, in seconds."""

    products_s: float
    attention_s: float
    others_s: float
    starts_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.products_s + self.attention_s + self.others_s + self.starts_s


def predict(step: CountedStep, card: Card) -> PredictedStep:
    """Returns the time of a step on a card."""
    sums = dict.fromkeys(SHARES, 0.0)
    starts_s = STEP_S
    for launch, count in step.launches:
        group = _group(launch)
        memory_s = (launch.bytes_loaded + launch.bytes_stored) / (card.bytes_per_s * SHARES[group])
        matrix_rate = card.matrix_operations_per_s * (FP8_RATE if launch.kernel == FP8_PRODUCT else 1.0)
        matrix_s = launch.operations / (matrix_rate * MATRIX_SHARE)
        sums[group] += count * max(memory_s, matrix_s)
        starts_s += count * (LAUNCH_S + launch.num_programs * PROGRAM_S)
    return PredictedStep(sums["products"], sums["attention"], sums["others"], starts_s)


def limits_of(card: Card) -> Limits:
    """Returns what a run on the card is expected to measure as its limits."""
    return Limits(card.bytes_per_s * COPY_SHARE, card.matrix_operations_per_s * MATRIX_SHARE)


def values_of(steps: Iterable[CountedStep]) -> dict[str, Any]:
    """Everything that was counted, as plain values."""
    return {"report": KIND, "model": LLAMA_3_8B.name, "steps": [asdict(step) for step in steps]}


def steps_of(values: Mapping[str, Any]) -> list[CountedStep]:
    """Returns the steps of a report."""
    return TypeAdapter(list[CountedStep]).validate_python(values["steps"])


def page_of(values: Mapping[str, Any]) -> Page:
    """Returns the page of the predictions."""
    steps = steps_of(values)
    note = (
        f"{values['model']}, contexts of {CONTEXT} tokens, blocks of 16, greedy, CUDA graphs; in bfloat16, and with "
        "`--weight-dtype fp8 --kv-cache-dtype fp8`. **Nothing here was measured.** Launches and bytes are counted on "
        "the code; the rates are the assumptions below."
    )
    parts = [
        Part(
            "Decode step, predicted",
            f"Goal: {DECODE_GOAL:.0%} of the limit at 32 to 128 sequences.",
            table=_times(steps),
        ),
        Part(
            "Launches and bytes of a step, counted",
            "A sector of 32 bytes counts once per launch. Weights and KV are the products' and attention's loads.",
            table=_traffic(steps),
        ),
        *(
            Part(f"Launches at {step.num_sequences} sequences, {step.form}", table=_kernels(step))
            for step in steps
            if step.num_sequences > 1
        ),
    ]
    return Page("Prediction for Llama-3-8B on H100 and H200", _assumptions(), parts, note)


def _group(launch: Launch) -> str:
    if launch.operations:
        return "products"
    return "attention" if launch.kernel == "attend_kernel" else "others"


def _assumptions() -> dict[str, str]:
    cards = ", ".join(f"{card.name} {card.bytes_per_s / 1e12:.2f} TB/s" for card in CARDS)
    return {
        "data sheets": f"{cards}, {CARDS[0].matrix_operations_per_s / 1e12:.0f} TFLOP/s",
        "assumed shares of the bandwidth": f"copy {COPY_SHARE:.0%} (the limit), products {PRODUCT_SHARE:.0%}, "
        f"attention {ATTENTION_SHARE:.0%}, other kernels {COPY_SHARE:.0%}",
        "assumed share of the matrix rate": f"{MATRIX_SHARE:.0%}, in FP8 of {FP8_RATE:g} times the rate",
        "assumed constants": f"{LAUNCH_S * 1e6:.0f} µs a launch in a graph, "
        f"{PROGRAM_S * 1e9:.0f} ns a program of a Triton kernel, {STEP_S * 1e6:.0f} µs a step; no host time "
        "between steps; a product is one launch",
        "left out": "what a cache keeps from one launch to the next, and what it loses within one",
    }


def _times(steps: Sequence[CountedStep]) -> Table:
    header = [
        "GPU",
        "weights, KV",
        "sequences",
        "products ms",
        "attention ms",
        "others ms",
        "starts ms",
        "step ms",
        "limit ms",
    ]
    rows = []
    for card in CARDS:
        for step in steps:
            time = predict(step, card)
            limit_s = limits_of(card).decode_s(LLAMA_3_8B, step.num_sequences, step.context, is_fp8=step.is_fp8)
            parts = (time.products_s, time.attention_s, time.others_s, time.starts_s, time.total_s, limit_s)
            rows.append(
                [
                    *(card.name, step.form, str(step.num_sequences)),
                    *(f"{seconds * 1e3:.2f}" for seconds in parts),
                    f"{limit_s / time.total_s:.0%}",
                    f"{step.num_sequences / time.total_s:,.0f}",
                ]
            )
    return Table([*header, "of limit", "tokens/s"], rows)


def _traffic(steps: Sequence[CountedStep]) -> Table:
    rows = []
    for step in steps:
        groups = dict.fromkeys(SHARES, 0)
        for launch, count in step.launches:
            groups[_group(launch)] += count * (launch.bytes_loaded + launch.bytes_stored)
        num_launches = sum(count for _, count in step.launches)
        sizes = (f"{size / 1e9:.3f}" for size in groups.values())
        rows.append([step.form, str(step.num_sequences), str(num_launches), *sizes])
    return Table(["weights, KV", "sequences", "launches", "products GB", "attention GB", "others GB"], rows)


def _kernels(step: CountedStep) -> Table:
    rows = [
        [
            launch.kernel,
            str(count),
            str(launch.num_programs) if launch.num_programs > 1 else "",
            f"{launch.bytes_loaded / 1e6:.3f}",
            f"{launch.bytes_stored / 1e6:.3f}",
        ]
        for launch, count in step.launches
    ]
    return Table(["kernel", "launches", "programs", "MB loaded", "MB stored"], rows)
