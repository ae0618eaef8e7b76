"""Choice of the form of quantized weights, as in the checkpoint or expanded to the dtype, and of the rows that they
multiply, as they are or rounded to 8 bits, by measuring on this machine.

Quantized weights are read faster, and dense ones are multiplied faster by some processors and for many rows. Rounded
rows have a scale for each 32 numbers, as in llama.cpp; the loss is within the noise of perplexity
(docs/design/cpu-kernels.md). The forms round differently, so executors of one model must have the same one. Measured
shares varied by up to nine points, and the bounds of `fastest_form` are far from the ratios of the measured processors,
so that equal machines choose equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from inflight.common.kv_size import most_seats, num_seats
from inflight.executor.checkpoint.decoder_weights import DecoderWeights
from inflight.executor.cpu.coded_weights import encode, is_supported
from inflight.executor.cpu.streams import TRIAL_BYTES, ProductTrial, TrialCodes, TrialShape, WeightStream
from inflight.executor.native.library import NativeLibrary
from inflight.executor.native.pool import NativePool

# Prompts of conversations and documents are several times as long as the answers.
PROMPT_TOKENS_PER_OUTPUT_TOKEN = 4
# Of the time of quantized weights, what dense ones may take to be chosen. They take about three times the memory, and
# a lone sequence is up to twice as slow. Measured for 4 bits in groups of 32 and 64 seats:
# 0.84 with AMX, 0.77 with AVX2 in float32, 0.80 to 0.91 with AVX512-BF16, 0.99 with AVX-512 in float32.
LARGEST_SHARE = 0.7
# Of the time of the form chosen so far, what quantized weights with rounded rows may take to be chosen. Measured for 4
# bits in groups of 32 and 32 seats: 0.61 of quantized ones with AVX512-VNNI.
LARGEST_SHARE_OF_ROUNDED = 0.85
# Of dense weights in the free memory. The KV cache is a share of what is left, so it keeps at least half of its size.
LARGEST_SHARE_OF_MEMORY = 0.5

MOST_PROMPT_ROWS = 256
ROUNDS = 3
# After it there is no further round.
MOST_SECONDS = 0.6
# Of a product of all matrices, on the slowest processors a fifth of a second.
TRIAL_OPERATIONS = 2 << 30
# Wider matrices are cut, but not below the columns that occupy each thread.
TRIAL_WEIGHTS, TRIAL_COLUMNS_PER_THREAD = 2 << 20, 128
# Rows of a matrix whose codes stand for all.
SOME_ROWS = 32
MEBIBYTE = 1 << 20


class WeightForm(StrEnum):
    """A form of the matrices of a quantized checkpoint, by the name of its `weight_dtype`."""

    QUANTIZED = "quantized"
    ROUNDED_ROWS = "quantized_a8"
    DENSE = "dense"


_IN_WORDS = {
    WeightForm.QUANTIZED: "kept as in the checkpoint",
    WeightForm.ROUNDED_ROWS: "kept as in the checkpoint and multiply activations of 8 bits",
    WeightForm.DENSE: "expanded",
}


@dataclass(frozen=True, slots=True)
class ExecutorSizes:
    """Settings of an executor that decide its steps and its KV cache, with their names. 0: from the free memory."""

    max_num_sequences: int
    max_num_tokens: int
    max_tokens_in_paged_kv_cache: int
    kv_cache_free_host_mem_fraction: float
    kv_cache_host_memory_bytes: int


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """What of a model decides the form of its weights. `product` is the largest one of a layer with its codes,
    `dense_bytes` is the memory of all quantized matrices if they are expanded, and with `can_round_rows` there are
    products with rows rounded to 8 bits."""

    product: TrialShape
    num_layers: int
    dense_bytes: int
    kv_bytes_per_token: int
    context_length: int
    can_round_rows: bool = True


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Processor seconds of a product for a token: of each sequence that decodes while every seat is taken, and in a
    chunk of a prompt."""

    decode_s: float
    prompt_s: float

    @property
    def busy_s(self) -> float:
        """The time for a token of output with the prompt tokens that come with it."""
        return self.decode_s + PROMPT_TOKENS_PER_OUTPUT_TOKEN * self.prompt_s


@dataclass(frozen=True, slots=True)
class FormChoice:
    """The form of quantized weights, and why, in words."""

    form: WeightForm
    reason: str

    def __str__(self) -> str:
        return f"{_IN_WORDS[self.form]}: {self.reason}"


def product_of(hidden_size: int, intermediate_size: int, dtype: torch.dtype, codes: TrialCodes) -> TrialShape:
    """Returns the largest product of a layer, gate and up."""
    return TrialShape(2 * intermediate_size, hidden_size, 2, dtype, False, codes)


def read_quantized(
    weights: DecoderWeights, dtype: torch.dtype, kv_bytes_per_token: int, context_length: int
) -> QuantizedModel | None:
    """Returns what decides the form of a model's weights; None if gate and up are not quantized, or belong to experts,
    which stay as they are: a step reads those that few of its tokens use."""
    fed = [layer for layer in weights.layers if layer.gate_up_parts]
    gate = fed[len(fed) // 2].gate_up_parts[0]
    if weights.shape.num_experts or isinstance(gate, Tensor) or not is_supported(gate):
        return None
    coded = encode(gate.rows(0, SOME_ROWS), dtype)
    codes = TrialCodes(coded.bits, coded.group_size, coded.shifts is not None, is_float=coded.is_float)
    of_layers = ((*one.qkv_matrices, one.output, *one.gate_up_parts, one.down) for one in weights.layers)
    matrices = [matrix for of_layer in (*of_layers, (weights.head,)) for matrix in of_layer]
    num_numbers = sum(matrix.shape.numel() for matrix in matrices if not isinstance(matrix, Tensor))
    return QuantizedModel(
        product_of(weights.shape.hidden_size, weights.shape.intermediate_size, dtype, codes),
        weights.shape.num_layers,
        num_numbers * dtype.itemsize,
        kv_bytes_per_token,
        context_length,
        coded.can_round_rows,
    )


# Times of the forms, for a product, a number of seats, and tokens of a step.
Measure = Callable[[TrialShape, Sequence[WeightForm], int, int], Mapping[WeightForm, TokenTimes]]


def choose_form(
    model: QuantizedModel, sizes: ExecutorSizes, free_bytes: int | None, measure: Measure, *, may_round: bool
) -> FormChoice:
    """Returns the form for an executor with so much free memory. `may_round`: rows may be rounded. It measures if there
    is a choice, and if reading and multiplying the weights takes a time worth measuring."""
    lack, may_round = lack_of_memory(model, sizes, free_bytes), may_round and model.can_round_rows
    forms = [form for form in WeightForm if may_round or form is not WeightForm.ROUNDED_ROWS]
    if lack is not None:
        forms.remove(WeightForm.DENSE)
        if not may_round:
            return FormChoice(WeightForm.QUANTIZED, lack)
    if trial_shape(model.product, WeightForm.DENSE).num_bytes * model.num_layers < TRIAL_BYTES // 2:
        return FormChoice(WeightForm.QUANTIZED, "the model is too small for a measurement")
    seats = _seats(model, sizes, (free_bytes or 0) - (model.dense_bytes if lack is None else 0))
    choice = fastest_form(measure(model.product, forms, seats, sizes.max_num_tokens), seats)
    return choice if lack is None else replace(choice, reason=f"{choice.reason}; {lack}")


def fastest_form(times: Mapping[WeightForm, TokenTimes], num_seats: int) -> FormChoice:
    """Returns the form whose products are faster while every seat is taken, where a token of output comes with
    `PROMPT_TOKENS_PER_OUTPUT_TOKEN` tokens of prompts. It must be clearly faster: the time of dense
    weights must be at most `LARGEST_SHARE` of that of quantized ones, and that with rounded rows at most
    `LARGEST_SHARE_OF_ROUNDED` of that of the form that would be chosen without them."""
    of_quantized = times[WeightForm.QUANTIZED].busy_s
    chosen = WeightForm.QUANTIZED
    for form, share in ((WeightForm.DENSE, LARGEST_SHARE), (WeightForm.ROUNDED_ROWS, LARGEST_SHARE_OF_ROUNDED)):
        if form in times and times[form].busy_s <= share * times[chosen].busy_s:
            chosen = form
    measured = ", ".join(
        f"{form.value} {one.decode_s * 1e6:.2f} and {one.prompt_s * 1e6:.2f} µs ({one.busy_s / of_quantized:.2f})"
        for form, one in times.items()
    )
    reason = (
        f"with {num_seats} sequences a product takes for a token of output and for each of "
        f"{PROMPT_TOKENS_PER_OUTPUT_TOKEN} of a prompt: {measured}; dense is chosen up to "
        f"{LARGEST_SHARE:.2f} of quantized, and {WeightForm.ROUNDED_ROWS.value} up to {LARGEST_SHARE_OF_ROUNDED:.2f} "
        "of that choice"
    )
    return FormChoice(chosen, reason)


def lack_of_memory(model: QuantizedModel, sizes: ExecutorSizes, free_bytes: int | None) -> str | None:
    """Returns why dense weights do not fit beside a KV cache; None if they do."""
    if free_bytes is None:
        return "the free memory is unknown"
    needed, free = (f"{count // MEBIBYTE:,} MiB" for count in (model.dense_bytes, free_bytes))
    if model.dense_bytes > LARGEST_SHARE_OF_MEMORY * free_bytes:
        return f"dense weights would take {needed}, more than half of the {free} that are free"
    kv_bytes = sizes.max_tokens_in_paged_kv_cache * model.kv_bytes_per_token + sizes.kv_cache_host_memory_bytes
    if model.dense_bytes + kv_bytes > free_bytes:
        kv = f"{kv_bytes // MEBIBYTE:,} MiB"
        return f"dense weights would take {needed} and the KV cache takes {kv}, more than the {free} that are free"
    return None


def measure_with(library: NativeLibrary, pool: NativePool, stream: WeightStream) -> Measure:
    """Returns a measurement on these threads. No round begins after `MOST_SECONDS`."""

    def measure(
        product: TrialShape, forms: Sequence[WeightForm], num_seats: int, max_num_tokens: int
    ) -> Mapping[WeightForm, TokenTimes]:
        rows = num_seats, min(max_num_tokens, MOST_PROMPT_ROWS)
        shapes = [trial_shape(product, form) for form in forms]
        trials = [[_trial(library, pool, shape, num_rows) for num_rows in rows] for shape in shapes]
        least, began = [[float("inf")] * len(rows) for _ in forms], time.monotonic()
        for _ in range(ROUNDS):
            for place, num_rows in enumerate(rows):
                for of_form, seconds in zip(trials, least, strict=True):
                    trial = of_form[place]
                    took = trial.seconds(num_rows, stream) / (trial.num_matrices * num_rows)
                    seconds[place] = min(took, seconds[place])
            if time.monotonic() - began > MOST_SECONDS:
                break
        for trial in (trial for of_form in trials for trial in of_form):
            trial.close()
        return {form: TokenTimes(*seconds) for form, seconds in zip(forms, least, strict=True)}

    return measure


def trial_shape(product: TrialShape, form: WeightForm) -> TrialShape:
    """Returns a product of quantized weights with its weights in a form."""
    if form is WeightForm.DENSE or product.codes is None:
        return replace(product, codes=None)
    return replace(product, codes=replace(product.codes, has_rounded_rows=form is WeightForm.ROUNDED_ROWS))


def _trial(library: NativeLibrary, pool: NativePool, shape: TrialShape, num_rows: int) -> ProductTrial:
    """Makes as many matrices for each form: few enough for a fast measurement, and for few rows more than caches
    hold."""
    least = TRIAL_COLUMNS_PER_THREAD * pool.num_threads
    columns = min(shape.columns, max(least, TRIAL_WEIGHTS // shape.depth // least * least))
    shape = replace(shape, columns=columns)
    num_weights = min(TRIAL_BYTES // shape.dtype.itemsize, TRIAL_OPERATIONS // (2 * num_rows))
    num_matrices = max(2, -(-num_weights // (columns * shape.depth)))
    return ProductTrial(library, pool, shape, num_matrices * shape.num_bytes, num_rows)


def _seats(model: QuantizedModel, sizes: ExecutorSizes, free_bytes: int) -> int:
    """Returns the seats that are set, or those that the memory beside the weights is likely to give."""
    if sizes.max_num_sequences:
        return sizes.max_num_sequences
    kv_bytes = sizes.kv_cache_free_host_mem_fraction * max(0, free_bytes)
    num_tokens = sizes.max_tokens_in_paged_kv_cache or int(kv_bytes) // model.kv_bytes_per_token
    return num_seats(num_tokens, 1, model.context_length, most_seats(0, sizes.max_num_tokens))
