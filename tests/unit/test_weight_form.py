"""Choice of the form of quantized weights: from given times and memory, and measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.shards import Shard
from inflight.executor.cpu import weight_form
from inflight.executor.cpu.streams import DEFAULT_STREAM, TRIAL_BYTES, TrialCodes, TrialShape
from inflight.executor.cpu.weight_form import (
    LARGEST_SHARE,
    ExecutorSizes,
    FormChoice,
    Measure,
    QuantizedModel,
    TokenTimes,
    WeightForm,
    choose_form,
    fastest_form,
    lack_of_memory,
    measure_with,
    product_of,
)
from inflight.executor.forward.native import NativeForward
from inflight.executor.native.pool import NativePool
from tests.property.test_native_decoder import filled_case, load, logits_of
from tests.property.test_quantized_decoder import load_quantized
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.native_builds import INSTRUCTION_SETS, library_of
from tests.support.device.torch_threads import torch_threads

pytestmark = pytest.mark.timeout(600)  # the first test of a build may wait for the compiler

GIBIBYTE = 1 << 30
CODES = TrialCodes(4, 32, True)
# A model with 1 GiB of dense weights, whose KV takes 64 KiB for a token.
MODEL = QuantizedModel(product_of(2048, 8192, torch.bfloat16, CODES), 16, GIBIBYTE, 64 << 10, 8192)
SIZES = ExecutorSizes(32, 1024, 0, 0.2, 0)
QUANTIZED, ROUNDED, DENSE = WeightForm
# Microseconds of a token of output and of a prompt, of SmolLM2's gate and up, in the measured forms, and the choice.
MEASURED = {
    "AMX, 1 sequence": ({QUANTIZED: (68.2, 3.65), DENSE: (154.7, 1.69)}, QUANTIZED),
    "AMX, 8": ({QUANTIZED: (9.4, 3.65), DENSE: (17.5, 1.69)}, QUANTIZED),
    "AMX, 32": ({QUANTIZED: (3.73, 3.65), DENSE: (4.72, 1.69)}, DENSE),
    "AMX, 64": ({QUANTIZED: (3.56, 3.65), DENSE: (3.21, 1.69)}, DENSE),
    "AVX512-BF16, 1": ({QUANTIZED: (44.0, 19.7), ROUNDED: (37.3, 12.0), DENSE: (94.8, 15.8)}, ROUNDED),
    "AVX512-BF16, 32": ({QUANTIZED: (19.9, 19.7), ROUNDED: (12.2, 12.0), DENSE: (16.0, 15.8)}, ROUNDED),
    "AVX512-BF16, 32, rows as they are": ({QUANTIZED: (9.96, 9.83), DENSE: (8.1, 7.87)}, QUANTIZED),
    "AVX-512 in float32, 32": ({QUANTIZED: (12.4, 11.7), DENSE: (17.6, 10.9)}, QUANTIZED),
    "AVX2, 32": ({QUANTIZED: (26.9, 26.9), DENSE: (27.9, 19.9)}, QUANTIZED),
}
microseconds = st.floats(0.01, 1e4)
token_times = st.builds(TokenTimes, microseconds, microseconds)
Times = dict[WeightForm, TokenTimes]


def times_of(rounded: float, dense: float, forms: Sequence[WeightForm] = tuple(WeightForm)) -> Times:
    """Times of forms as shares of that of quantized weights."""
    shares = dict(zip(WeightForm, (1.0, rounded, dense), strict=True))
    return {form: TokenTimes(shares[form] * 1e-6, shares[form] * 1e-6) for form in forms}


def in_seconds(measured: dict[WeightForm, tuple[float, float]]) -> Times:
    """Measured times in microseconds."""
    return {form: TokenTimes(*(one * 1e-6 for one in times)) for form, times in measured.items()}


@pytest.mark.parametrize("case", MEASURED)
def test_the_form_is_one_that_was_measured_to_be_clearly_faster(case: str) -> None:
    measured, form = MEASURED[case]
    assert fastest_form(in_seconds(measured), 32).form is form


def test_a_reason_has_the_seats_and_the_times() -> None:
    choice = str(fastest_form(in_seconds(MEASURED["AMX, 32"][0]), 32))
    assert choice.startswith("expanded: with 32 sequences a product takes")
    assert "quantized 3.73 and 3.65 µs (1.00), dense 4.72 and 1.69 µs (0.63)" in choice


@pytest.mark.parametrize(
    ("rounded", "dense", "form"),
    [
        (1.0, 1.0, QUANTIZED),
        (0.9, 0.75, QUANTIZED),
        (0.9, 0.65, DENSE),
        (0.8, 0.65, DENSE),
        (0.5, 0.65, ROUNDED),
        (0.8, 0.75, ROUNDED),
        (0.5, 0.4, DENSE),
    ],
)
def test_a_form_must_be_clearly_faster_than_the_one_before(rounded: float, dense: float, form: WeightForm) -> None:
    assert fastest_form(times_of(rounded, dense), 8).form is form


@given(token_times, token_times, st.floats(0.1, 10))
def test_the_unit_does_not_matter(quantized: TokenTimes, dense: TokenTimes, unit: float) -> None:
    times = {QUANTIZED: quantized, DENSE: dense}
    scaled = {form: TokenTimes(one.decode_s * unit, one.prompt_s * unit) for form, one in times.items()}
    if abs(dense.busy_s / quantized.busy_s - LARGEST_SHARE) > 1e-6:
        assert fastest_form(scaled, 8).form is fastest_form(times, 8).form


@pytest.mark.parametrize(
    ("free_bytes", "changes", "reason"),
    [
        (2 * GIBIBYTE, {}, None),
        (2 * GIBIBYTE - 1, {}, "1,024 MiB, more than half of the 2,047 MiB"),
        (None, {}, "unknown"),
        # 1 GiB of KV
        (2 * GIBIBYTE, {"max_tokens_in_paged_kv_cache": 16 << 10}, None),
        (2 * GIBIBYTE, {"max_tokens_in_paged_kv_cache": 17 << 10}, "the KV cache takes 1,088 MiB, more than the 2,048"),
        (2 * GIBIBYTE, {"kv_cache_host_memory_bytes": GIBIBYTE + 1}, "more than the 2,048 MiB"),
    ],
)
def test_dense_weights_need_memory_beside_the_kv_cache(
    free_bytes: int | None, changes: dict[str, Any], reason: str | None
) -> None:
    found = lack_of_memory(MODEL, replace(SIZES, **changes), free_bytes)
    assert found is None if reason is None else reason in str(found)


# A product, its forms, the seats and the tokens of a step.
Call = tuple[TrialShape, tuple[WeightForm, ...], int, int]
ALL = tuple(WeightForm)


def scripted(calls: list[Call], dense: float, rounded: float = 1.0) -> Measure:
    """A measurement that products take these shares of the time of quantized ones."""

    def measure(product: TrialShape, forms: Sequence[WeightForm], num_seats: int, max_num_tokens: int) -> Times:
        calls.append((product, tuple(forms), num_seats, max_num_tokens))
        return times_of(rounded, dense, forms)

    return measure


def test_without_memory_dense_weights_are_not_measured() -> None:
    calls: list[Call] = []
    choice = choose_form(MODEL, SIZES, GIBIBYTE, scripted(calls, 0.1, 0.5), may_round=True)
    assert (choice.form, [forms for _, forms, *_ in calls]) == (ROUNDED, [(QUANTIZED, ROUNDED)])
    assert "dense weights would take 1,024 MiB" in str(choice)
    assert str(choice).startswith("kept as in the checkpoint and multiply activations of 8 bits: with 32 sequences")


def test_exact_rows_are_not_measured_against_rounded_ones() -> None:
    calls: list[Call] = []
    assert choose_form(MODEL, SIZES, GIBIBYTE, scripted(calls, 0.1, 0.1), may_round=False).form is QUANTIZED
    assert calls == []
    assert choose_form(MODEL, SIZES, 8 * GIBIBYTE, scripted(calls, 0.9, 0.1), may_round=False).form is QUANTIZED
    assert [forms for _, forms, *_ in calls] == [(QUANTIZED, DENSE)]


def test_a_model_in_the_caches_is_not_measured() -> None:
    small = replace(MODEL, num_layers=1, product=product_of(64, 128, torch.bfloat16, CODES))
    assert small.product.num_bytes < TRIAL_BYTES // 2
    calls: list[Call] = []
    choice = choose_form(small, SIZES, 8 * GIBIBYTE, scripted(calls, 0.1), may_round=True)
    assert (choice.form, calls) == (QUANTIZED, [])


@pytest.mark.parametrize(
    ("seats_set", "free_gib", "seats"),
    # A fifth of 16 and 40 GiB has 51 and 128 sequences of 1,024 tokens. A CPU has 8 to 64 seats.
    [(4, 17, 4), (0, 17, 51), (0, 41, 64), (0, 2, 8)],
)
def test_steps_are_measured_with_the_seats_that_an_executor_will_have(
    seats_set: int, free_gib: int, seats: int
) -> None:
    sizes = replace(SIZES, max_num_sequences=seats_set, max_num_tokens=512)
    calls: list[Call] = []
    choice = choose_form(MODEL, sizes, free_gib * GIBIBYTE, scripted(calls, 0.5), may_round=True)
    assert choice.form is DENSE
    assert calls == [(MODEL.product, ALL, seats, 512)]


def test_products_are_measured_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_form, "TRIAL_OPERATIONS", 1 << 22)
    library = library_of(INSTRUCTION_SETS[0])
    measure = measure_with(library, NativePool(library, 2), DEFAULT_STREAM)
    measured = measure(product_of(96, 160, torch.bfloat16, TrialCodes(8, 32, False)), ALL, 3, 40)
    assert list(measured) == list(WeightForm)
    for times in measured.values():
        assert 0 < times.decode_s < 1
        assert 0 < times.prompt_s < 1


# --- the loader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**sizes(hidden_size=128, intermediate_size=192, tie_word_embeddings=True))
    return save_model(config, tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.executor.model.loader.load_network", load_quantized)


@pytest.fixture
def measured_share(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Call]]:
    """Lets products of every model take these shares of the time of quantized ones. Returns the calls."""

    def set_share(dense: float, rounded: float = 1.0) -> list[Call]:
        calls: list[Call] = []
        measure = scripted(calls, dense, rounded)
        monkeypatch.setattr(weight_form, "TRIAL_BYTES", 0)
        monkeypatch.setattr("inflight.executor.model.loader.measure_with", lambda *_: measure)
        return calls

    return set_share


@pytest.mark.usefixtures("quantized")
@pytest.mark.parametrize(
    ("rounded", "dense", "explicit"),
    [
        (1.0, 0.5, "dense"),
        pytest.param(1.0, 0.9, "quantized", marks=pytest.mark.slow),
        pytest.param(0.6, 0.9, "quantized_a8", marks=pytest.mark.slow),
    ],
)
def test_an_executor_has_the_form_that_was_measured_to_be_faster(
    folder: Path,
    measured_share: Callable[..., list[Call]],
    rounded: float,
    dense: float,
    explicit: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls, case = measured_share(dense, rounded), filled_case()
    with torch_threads(2), caplog.at_level("INFO"):
        chosen = load(folder, dtype_name="bfloat16", sizes=SIZES)
        exact = load(folder, dtype_name="bfloat16", weight_dtype="quantized")
        assert torch.equal(logits_of(chosen, case), logits_of(exact, case)) is (explicit == "quantized")
        assert [(num_seats, max_num_tokens) for *_, num_seats, max_num_tokens in calls] == [(32, 1024)]
        assert calls[0][0] == product_of(128, 192, torch.bfloat16, TrialCodes(8, 16, True))
        expected = load(folder, dtype_name="bfloat16", weight_dtype=explicit, sizes=SIZES)
        assert len(calls) == 1
        assert chosen.description.weight_dtype == expected.description.weight_dtype
        assert torch.equal(logits_of(chosen, case), logits_of(expected, case))
    assert chosen.description.weight_dtype == ("bfloat16" if explicit == "dense" else explicit)
    assert isinstance(chosen.forward, NativeForward)
    assert isinstance(expected.forward, NativeForward)
    assert chosen.forward.decoder.num_matrix_bytes == expected.forward.decoder.num_matrix_bytes
    assert f"({dense:.2f})" in caplog.text


@pytest.mark.usefixtures("quantized")
def test_ranks_and_callers_without_an_executor_do_not_measure(
    folder: Path, measured_share: Callable[..., list[Call]]
) -> None:
    calls = measured_share(0.1)
    for options in ({"sizes": SIZES, "shard": Shard(1, 2)}, {}):
        assert load(folder, **options).description.weight_dtype == "quantized"
    assert calls == []


@pytest.mark.usefixtures("quantized")
def test_too_little_memory_leaves_weights_as_they_are(
    folder: Path,
    measured_share: Callable[..., list[Call]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = measured_share(0.1)
    monkeypatch.setattr("inflight.executor.model.loader.num_available_memory_bytes", lambda: 1000)
    with caplog.at_level("INFO"):
        assert load(folder, sizes=SIZES).description.weight_dtype == "quantized"
    assert calls == []
    assert "quantized weights are kept as in the checkpoint: dense weights would take" in caplog.text


@pytest.mark.usefixtures("quantized")
def test_float32_that_is_asked_for_is_exact(folder: Path, measured_share: Callable[..., list[Call]]) -> None:
    calls = measured_share(0.9, 0.1)
    assert load(folder, dtype_name="float32", sizes=SIZES).description.weight_dtype == "quantized"
    assert [forms for _, forms, *_ in calls] == [(QUANTIZED, DENSE)]


def test_a_checkpoint_that_is_not_quantized_has_no_choice(
    folder: Path, measured_share: Callable[..., list[Call]]
) -> None:
    calls = measured_share(0.1)
    assert load(folder, sizes=SIZES).description.weight_dtype == "float32"
    assert calls == []
    for weight_dtype in ("quantized", "quantized_a8"):
        with pytest.raises(ModelError, match=f"weight_dtype {weight_dtype} is for quantized checkpoints"):
            load(folder, weight_dtype=weight_dtype)


def test_a_choice_is_told_in_words() -> None:
    assert str(FormChoice(QUANTIZED, "because")) == "kept as in the checkpoint: because"
