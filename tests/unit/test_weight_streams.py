"""Choice of how weights are read, from given times, and measured on this machine."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from inflight.executor.cpu.streams import (
    DEFAULT_STREAM,
    NEVER,
    STREAMS,
    TRIAL_ROWS,
    ProductTrial,
    TrialShape,
    WeightStream,
    fastest_stream,
)
from inflight.executor.native.pool import NativePool
from tests.support.device.native_builds import BEST_FIRST, library_of

EVEN = dict.fromkeys(product(TRIAL_ROWS, (True, False), (True, False)), 1.0)


def test_among_equals_the_default_is_chosen() -> None:
    assert fastest_stream(EVEN) == DEFAULT_STREAM == STREAMS[0]


@pytest.mark.parametrize(
    ("faster", "expected"),
    [
        ([(rows, False, False) for rows in TRIAL_ROWS], WeightStream(False, NEVER)),
        ([(rows, False, True) for rows in TRIAL_ROWS], WeightStream(False, 1)),
        ([(1, True, False), (8, True, True), (32, True, True)], WeightStream(True, 5)),
        ([(1, False, False), (8, False, True), (32, False, True)], WeightStream(False, 5)),
        # Prefetching in large steps alone is no choice: the two large ones decide together.
        ([(8, True, False), (1, True, False)], WeightStream(True, NEVER)),
    ],
)
def test_stream_with_the_least_time_is_chosen(faster: list[tuple[int, bool, bool]], expected: WeightStream) -> None:
    assert fastest_stream(EVEN | dict.fromkeys(faster, 0.5)) == expected


def test_every_number_of_rows_weighs_the_same() -> None:
    # 32 rows take ten times as long as 1, and half of that is worth as much as half of the time of 1.
    seconds = {case: time * (10 if case[0] == 32 else 1) for case, time in EVEN.items()}
    for_one_row = seconds | {(1, False, False): 0.4, (1, False, True): 0.4}
    assert not fastest_stream(for_one_row | {(32, True, True): 9.0, (32, True, False): 9.0}).is_interleaved


@pytest.mark.parametrize("instructions", BEST_FIRST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_int8_weights", [False, True])
def test_trial_times_every_stream(instructions: str, dtype: torch.dtype, has_int8_weights: bool) -> None:
    library = library_of(instructions)
    trial = ProductTrial(library, NativePool(library, 2), TrialShape(96, 80, 2, dtype, has_int8_weights), 1 << 16, 40)
    assert all(trial.seconds(rows, stream) > 0 for rows in (1, 40) for stream in STREAMS)
    trial.close()
