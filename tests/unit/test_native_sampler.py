"""The C++ sampler: published random numbers, noise, the softmax's distribution, and rows without usable logits."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_uint32, c_uint64

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inflight.executor.cpu.sampler import NativeSampler, choose_sampler
from inflight.executor.engine.runner import NO_TOKEN
from inflight.executor.native.build import BuildFailure
from inflight.executor.native.library import NativeLibrary
from inflight.executor.scheduler.sequence import ALL_EXCLUDED, Sampling
from inflight.executor.step.sampling import SampleRow, gumbel_noise, sample
from inflight.executor.step.sampling_columns import SamplingBatch
from tests.support.device.native_builds import INSTRUCTION_SETS, library_of
from tests.support.device.sampling_oracle import PHILOX_ANSWERS

# The first test of a build may have to wait for the compiler.
pytestmark = pytest.mark.timeout(600)

GROUP = 64


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return library_of(request.param)


@pytest.fixture(scope="module")
def native(library: NativeLibrary) -> NativeSampler:
    return NativeSampler(library)


def drawn(native: NativeSampler, logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    return native.sample(logits, SamplingBatch.of(rows))


def row(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    output_index: int = 0,
    banned_ids: frozenset[int] = frozenset(),
) -> SampleRow:
    return SampleRow(Sampling(temperature, top_k, top_p, seed), output_index, banned_ids)


ALL_WAYS = [row(temperature=0), row(), row(top_k=3), row(top_p=0.5), row(top_k=3, top_p=0.5)]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_ANSWERS)
def test_philox_gives_the_published_numbers(
    library: NativeLibrary, counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    found = (c_uint32 * 4)()
    library.calls.inflight_philox((c_uint32 * 4)(*counter), c_uint64(key[0] | key[1] << 32), found)
    assert tuple(found) == words


def group_noise(
    library: NativeLibrary, group: int, seed: int, output_index: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Noise of 64 ids, and what it is thought to be at most."""
    words, noise, bounds = np.zeros(GROUP, np.uint32), np.zeros(GROUP, np.float32), np.zeros(GROUP, np.float32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (words, noise, bounds)]
    library.calls.inflight_group_noise(c_int64(group), c_uint64(seed), c_int64(output_index), *pointers)
    return noise, bounds


@pytest.mark.parametrize(("seed", "output_index"), [(0, 0), (2**64 - 1, 2**31), (12345678901234567890, 7)])
def test_noise_is_the_torch_samplers_to_two_units_in_the_last_place(
    library: NativeLibrary, seed: int, output_index: int
) -> None:
    for group in (0, 1, 700, 4000):
        ids = torch.arange(group * GROUP, (group + 1) * GROUP)
        expected = gumbel_noise([row(seed=seed, output_index=output_index)], ids[None])[0].numpy()
        noise, _ = group_noise(library, group, seed, output_index)
        # The outer logarithm is off by a unit; the inner one, off by a unit of its own, moves it by 2^-23.
        tolerance = np.spacing(np.abs(expected)) + np.float32(2.0**-23)
        assert (np.abs(noise - expected) <= tolerance).all()


def test_no_noise_exceeds_its_bound(library: NativeLibrary) -> None:
    for group in range(1500):
        noise, bounds = group_noise(library, group, seed=5, output_index=0)
        assert (noise <= bounds).all()
        assert (bounds[noise > 3] - noise[noise > 3] < 0.1).all()


def test_random_words_are_the_torch_samplers_over_a_whole_vocabulary(native: NativeSampler) -> None:
    # Given rows in which noise alone decides, and a vocabulary that is no multiple of anything
    logits = torch.zeros(200, 4999)
    rows = [row(seed=i * 2**56, output_index=i) for i in range(200)]
    assert torch.equal(drawn(native, logits, rows), sample(logits, rows))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 8], ids=["free", "top_k"])
def test_draws_follow_the_softmax(native: NativeSampler, temperature: float, top_k: int) -> None:
    # Given 12 tokens, one of them with a small probability, and 20,000 draws at different output indices
    logits = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, -0.5, 0.2, 0.7, -1.0, 1.2, 0.9, -2.0])
    num_draws = 20_000
    rows = [row(temperature=temperature, top_k=top_k, seed=99, output_index=i) for i in range(num_draws)]

    token_ids = drawn(native, logits.expand(num_draws, -1), rows)

    kept = logits.topk(top_k or 12).indices
    counts = torch.bincount(token_ids, minlength=12)
    assert counts.sum() == counts[kept].sum()
    expected = (logits[kept] / temperature).softmax(0) * num_draws
    # 99.9 % quantiles of chi-square with 11 and 7 degrees of freedom.
    assert float(((counts[kept] - expected) ** 2 / expected).sum()) < {12: 31.26, 8: 24.32}[len(kept)]


def test_top_p_is_taken_of_what_top_k_left(native: NativeSampler) -> None:
    # 0.5 and 0.25 become 2/3 and 1/3 of the two that are left
    logits = torch.tensor([[math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]]).expand(300, -1)
    only_one = drawn(native, logits, [row(top_k=2, top_p=0.6, output_index=i) for i in range(300)])
    both = drawn(native, logits, [row(top_k=2, top_p=0.7, output_index=i) for i in range(300)])
    assert set(only_one.tolist()) == {1}
    assert set(both.tolist()) == {1, 3}


def test_lowest_ids_stay_among_equals_at_the_edge(native: NativeSampler) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]]).expand(300, -1)
    assert set(drawn(native, logits, [row(top_k=3, output_index=i) for i in range(300)]).tolist()) == {1, 2, 3}
    equal = torch.zeros(300, 1000)
    half = drawn(native, equal, [row(top_p=0.5, temperature=0.7, output_index=i) for i in range(300)])
    assert int(half.max()) < 500


def test_row_with_nothing_to_choose_gives_no_token_and_the_others_theirs(native: NativeSampler) -> None:
    for nothing in (float("nan"), float("-inf")):
        logits = torch.full((len(ALL_WAYS), 100), nothing)
        assert drawn(native, logits, ALL_WAYS).tolist() == [NO_TOKEN] * len(ALL_WAYS)
        logits = torch.full((3, 100), nothing)
        logits[1, 70] = 1.0
        assert drawn(native, logits, [row(), row(), row(0)]).tolist() == [NO_TOKEN, 70, NO_TOKEN]
    assert drawn(native, torch.zeros(1, 2), [row(banned_ids=frozenset({0, 1}))]).tolist() == [ALL_EXCLUDED]


def test_nan_is_never_chosen_and_weighs_nothing(native: NativeSampler) -> None:
    logits = torch.full((len(ALL_WAYS), 200), float("nan"))
    logits[:, 130] = -5.0
    assert drawn(native, logits, ALL_WAYS).tolist() == [130] * len(ALL_WAYS)


def test_infinite_logit_wins_and_the_lowest_of_several(native: NativeSampler) -> None:
    logits = torch.zeros(len(ALL_WAYS), 200)
    logits[:, [70, 150]] = float("inf")
    assert drawn(native, logits, ALL_WAYS).tolist() == [70] * len(ALL_WAYS)


@pytest.mark.parametrize("temperature", [1e-30, 1e-42])
def test_smallest_temperatures_are_greedy(native: NativeSampler, temperature: float) -> None:
    logits = torch.linspace(-90, -80, 200)[None]
    for some in (row(temperature), row(temperature, top_k=5), row(temperature, top_p=0.9)):
        assert drawn(native, logits, [some]).tolist() == [199]


def test_logits_of_any_layout_are_taken(native: NativeSampler) -> None:
    logits = torch.randn(130, 5, generator=torch.Generator().manual_seed(2))
    expected = drawn(native, logits.T.contiguous(), ALL_WAYS)
    assert torch.equal(drawn(native, logits.T, ALL_WAYS), expected)
    wider = torch.full((5, 200), 99.0)
    wider[:, :130] = logits.T
    assert torch.equal(drawn(native, wider[:, :130], ALL_WAYS), expected)


def test_threads_do_not_disturb_each_other(native: NativeSampler) -> None:
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(3))
    rows = [row(seed=i, top_k=i % 3 * 20, top_p=1 - i % 2 * 0.1) for i in range(40)]
    expected = drawn(native, logits, rows).tolist()
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: drawn(native, logits, rows).tolist(), range(8)))
    assert results == [expected] * 8


def test_without_a_compiler_the_torch_sampler_runs_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "inflight.executor.cpu.sampler.load_native", lambda name: BuildFailure("there is no C++ compiler")
    )
    with caplog.at_level(logging.WARNING):
        assert choose_sampler(torch.device("cpu")) is None
    assert [record.getMessage() for record in caplog.records] == ["sampling is slow, because there is no C++ compiler"]


def test_logits_elsewhere_than_on_a_cpu_are_sampled_by_torch() -> None:
    assert choose_sampler(torch.device("cuda")) is None
