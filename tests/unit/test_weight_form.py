"""Choice of the form of quantized weights: from given times and memory, and measured on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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
# Microseconds of a token of output and of a prompt, quantized and dense, of SmolLM2's gate and up.
MEASURED = {
    "AMX, 1 sequence": ((68.2, 3.65), (154.7, 1.69), False),
    "AMX, 8": ((9.4, 3.65), (17.5, 1.69), False),
    "AMX, 32": ((3.73, 3.65), (4.72, 1.69), True),
    "AMX, 64": ((3.56, 3.65), (3.21, 1.69), True),
    "AVX512-BF16, 32": ((18.6, 18.95), (18.4, 17.0), False),
    "AVX-512 in float32, 32": ((12.4, 11.7), (17.6, 10.9), False),
    "AVX2, 32": ((26.9, 26.9), (27.9, 19.9), False),
}
microseconds = st.floats(0.01, 1e4)
token_times = st.builds(TokenTimes, microseconds, microseconds)


@pytest.mark.parametrize("case", MEASURED)
def test_dense_weights_are_chosen_where_they_were_measured_to_be_clearly_faster(case: str) -> None:
    quantized, dense, is_dense = MEASURED[case]
    assert fastest_form(TokenTimes(*quantized), TokenTimes(*dense), 32).is_dense is is_dense


def test_a_reason_has_the_seats_and_the_times() -> None:
    quantized, dense = (TokenTimes(decode * 1e-6, prompt * 1e-6) for decode, prompt in MEASURED["AMX, 32"][:2])
    choice = str(fastest_form(quantized, dense, 32))
    assert choice.startswith("expanded: with 32 sequences a product of dense weights takes 0.63 of the time")
    assert "4.72 and 3.73 µs" in choice
    assert "1.69 and 3.65 µs" in choice


@given(token_times)
def test_a_tie_and_a_small_gain_leave_weights_as_they_are(times: TokenTimes) -> None:
    little_faster = TokenTimes(times.decode_s * 0.75, times.prompt_s * 0.75)
    assert not fastest_form(times, times, 8).is_dense
    assert not fastest_form(times, little_faster, 8).is_dense
    assert fastest_form(times, TokenTimes(times.decode_s * 0.65, times.prompt_s * 0.65), 8).is_dense


@given(token_times, token_times, st.floats(0.1, 10), st.floats(0.1, 1))
def test_the_unit_does_not_matter_and_faster_dense_products_do_not_speak_against_them(
    quantized: TokenTimes, dense: TokenTimes, unit: float, gain: float
) -> None:
    is_dense = fastest_form(quantized, dense, 8).is_dense
    scaled, scaled_dense = (TokenTimes(times.decode_s * unit, times.prompt_s * unit) for times in (quantized, dense))
    if abs(dense.busy_s / quantized.busy_s - LARGEST_SHARE) > 1e-6:
        assert fastest_form(scaled, scaled_dense, 8).is_dense is is_dense
    faster = TokenTimes(dense.decode_s * gain, dense.prompt_s * gain)
    assert fastest_form(quantized, faster, 8).is_dense >= is_dense


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
    free_bytes: int | None, changes: dict[str, int], reason: str | None
) -> None:
    found = lack_of_memory(MODEL, replace(SIZES, **changes), free_bytes)
    assert found is None if reason is None else reason in str(found)


def scripted(calls: list[tuple[TrialShape, int, int]], share: float) -> Measure:
    """A measurement that dense products take this share of the time of quantized ones."""

    def measure(product: TrialShape, num_seats: int, max_num_tokens: int) -> tuple[TokenTimes, TokenTimes]:
        calls.append((product, num_seats, max_num_tokens))
        return TokenTimes(1e-6, 1e-6), TokenTimes(share * 1e-6, share * 1e-6)

    return measure


def test_without_memory_nothing_is_measured() -> None:
    calls: list[tuple[TrialShape, int, int]] = []
    choice = choose_form(MODEL, SIZES, GIBIBYTE, scripted(calls, 0.1))
    assert (choice.is_dense, calls) == (False, [])
    assert "dense weights would take 1,024 MiB" in str(choice)


def test_a_model_in_the_caches_is_not_measured() -> None:
    small = replace(MODEL, num_layers=1, product=product_of(64, 128, torch.bfloat16, CODES))
    assert small.product.num_bytes < TRIAL_BYTES // 2
    calls: list[tuple[TrialShape, int, int]] = []
    choice = choose_form(small, SIZES, 8 * GIBIBYTE, scripted(calls, 0.1))
    assert (choice.is_dense, calls) == (False, [])


@pytest.mark.parametrize(
    ("seats_set", "free_gib", "seats"),
    # A fifth of 16 and 40 GiB has 51 and 128 sequences of 1,024 tokens. A CPU has 8 to 64 seats.
    [(4, 17, 4), (0, 17, 51), (0, 41, 64), (0, 2, 8)],
)
def test_steps_are_measured_with_the_seats_that_an_executor_will_have(
    seats_set: int, free_gib: int, seats: int
) -> None:
    sizes = replace(SIZES, max_num_sequences=seats_set, max_num_tokens=512)
    calls: list[tuple[TrialShape, int, int]] = []
    choice = choose_form(MODEL, sizes, free_gib * GIBIBYTE, scripted(calls, 0.5))
    assert choice.is_dense
    assert calls == [(MODEL.product, seats, 512)]


def test_products_are_measured_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_form, "TRIAL_OPERATIONS", 1 << 22)
    library = library_of(INSTRUCTION_SETS[0])
    measure = measure_with(library, NativePool(library, 2), DEFAULT_STREAM)
    for times in measure(product_of(96, 160, torch.bfloat16, TrialCodes(8, 32, False)), 3, 40):
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
def measured_share(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[tuple[TrialShape, int, int]]]:
    """Lets dense products of every model take a share of the time of quantized ones. Returns the calls."""

    def set_share(share: float) -> list[tuple[TrialShape, int, int]]:
        calls: list[tuple[TrialShape, int, int]] = []
        monkeypatch.setattr(weight_form, "TRIAL_BYTES", 0)
        monkeypatch.setattr("inflight.executor.model.loader.measure_with", lambda *_: scripted(calls, share))
        return calls

    return set_share


@pytest.mark.usefixtures("quantized")
@pytest.mark.parametrize(("share", "explicit"), [(0.5, "dense"), (0.9, "quantized")])
def test_an_executor_has_the_form_that_was_measured_to_be_faster(
    folder: Path,
    measured_share: Callable[[float], list[tuple[TrialShape, int, int]]],
    share: float,
    explicit: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls, case = measured_share(share), filled_case()
    with torch_threads(2), caplog.at_level("INFO"):
        chosen = load(folder, dtype_name="bfloat16", sizes=SIZES)
        assert [(num_seats, max_num_tokens) for _, num_seats, max_num_tokens in calls] == [(32, 1024)]
        assert calls[0][0] == product_of(128, 192, torch.bfloat16, TrialCodes(8, 16, True))
        expected = load(folder, dtype_name="bfloat16", weight_dtype=explicit, sizes=SIZES)
        assert len(calls) == 1
        assert chosen.description.weight_dtype == expected.description.weight_dtype
        assert torch.equal(logits_of(chosen, case), logits_of(expected, case))
    assert chosen.description.weight_dtype == ("bfloat16" if explicit == "dense" else "quantized")
    assert isinstance(chosen.forward, NativeForward)
    assert isinstance(expected.forward, NativeForward)
    assert chosen.forward.decoder.num_matrix_bytes == expected.forward.decoder.num_matrix_bytes
    assert f"{share:.2f} of the time" in caplog.text


@pytest.mark.usefixtures("quantized")
def test_ranks_and_callers_without_an_executor_do_not_measure(
    folder: Path, measured_share: Callable[[float], list[tuple[TrialShape, int, int]]]
) -> None:
    calls = measured_share(0.1)
    for options in ({"sizes": SIZES, "shard": Shard(1, 2)}, {}):
        assert load(folder, **options).description.weight_dtype == "quantized"
    assert calls == []


@pytest.mark.usefixtures("quantized")
def test_too_little_memory_leaves_weights_as_they_are(
    folder: Path,
    measured_share: Callable[[float], list[tuple[TrialShape, int, int]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = measured_share(0.1)
    monkeypatch.setattr("inflight.executor.model.loader.num_available_memory_bytes", lambda: 1000)
    with caplog.at_level("INFO"):
        assert load(folder, sizes=SIZES).description.weight_dtype == "quantized"
    assert calls == []
    assert "quantized weights are kept as in the checkpoint: dense weights would take" in caplog.text


def test_a_checkpoint_that_is_not_quantized_has_no_choice(
    folder: Path, measured_share: Callable[[float], list[tuple[TrialShape, int, int]]]
) -> None:
    calls = measured_share(0.1)
    assert load(folder, sizes=SIZES).description.weight_dtype == "float32"
    assert calls == []
    with pytest.raises(ModelError, match="weight_dtype quantized is for quantized checkpoints"):
        load(folder, weight_dtype="quantized")


def test_a_choice_is_told_in_words() -> None:
    assert str(FormChoice(False, "because")) == "kept as in the checkpoint: because"
