"""The prediction for GPUs that are not there: its arithmetic, and that what is committed agrees with the limits."""

from __future__ import annotations

import json

import pytest

from inflight.bench.gpu.engine.launches import Launch
from inflight.bench.gpu.predict import REPORTS
from inflight.bench.gpu.prediction import (
    COPY_SHARE,
    KIND,
    LAUNCH_S,
    MATRIX_SHARE,
    PRODUCT_SHARE,
    PROGRAM_S,
    SEQUENCE_COUNTS,
    STEP_S,
    Card,
    CountedStep,
    page_of,
    predict,
    steps_of,
)
from inflight.bench.gpu.roofline import LLAMA_3_8B, decode_bytes


def test_a_launch_takes_the_larger_of_its_bytes_and_its_operations() -> None:
    card = Card("tiny", bytes_per_s=1e6, matrix_operations_per_s=1e9)
    by_bytes = Launch("product", 1, 900, 100, 10)
    by_operations = Launch("product", 1, 900, 100, 10**9)
    other = Launch("norm", 4, 300, 200, 0)
    time = predict(CountedStep(1, 10, ((by_bytes, 3), (by_operations, 1), (other, 2))), card)
    assert time.products_s == pytest.approx(3 * 1e-3 / PRODUCT_SHARE + 1 / MATRIX_SHARE)
    assert time.attention_s == 0.0
    assert time.others_s == pytest.approx(2 * 5e-4 / COPY_SHARE)
    assert time.starts_s == pytest.approx(6 * LAUNCH_S + 12 * PROGRAM_S + STEP_S)


def test_committed_counts_contain_the_bytes_of_the_limit_and_little_more() -> None:
    values = json.loads((REPORTS / f"{KIND}.json").read_text(encoding="utf-8"))
    steps = steps_of(values)
    assert [(step.is_fp8, step.num_sequences) for step in steps] == [
        (is_fp8, count) for is_fp8 in (False, True) for count in SEQUENCE_COUNTS
    ]
    for step in steps:
        num_bytes = sum(count * (launch.bytes_loaded + launch.bytes_stored) for launch, count in step.launches)
        least = decode_bytes(LLAMA_3_8B, step.num_sequences, step.context, is_fp8=step.is_fp8)
        # Activations, which are not in the limit, stay in bfloat16 and are a larger share of FP8's.
        assert least <= num_bytes <= (1.15 if step.is_fp8 else 1.1) * least
    assert page_of(values).markdown() == (REPORTS / f"{KIND}.md").read_text(encoding="utf-8")
